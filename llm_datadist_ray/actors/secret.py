"""Where the cluster secret comes from (design section 8). It is passed on as a constructor argument only."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from llm_datadist_ray.actors.errors import ConfigError

SECRET_VARIABLE = "LLM_DATADIST_SECRET"
_MADE_BYTES = 32
_MIN_BYTES = 16


def cluster_secret(secret_file: str | None, environ: Mapping[str, str] = os.environ) -> bytes:
    """``LLM_DATADIST_SECRET``, else the contents of ``secret_file`` (white space around it is dropped), else a new
    random secret. ConfigError for one of fewer than 16 bytes, an unreadable file, or one that others may read."""
    if text := environ.get(SECRET_VARIABLE):
        return _checked(text.encode(), SECRET_VARIABLE)
    if secret_file is None:
        return secrets.token_bytes(_MADE_BYTES)
    path = Path(secret_file).expanduser()
    try:
        mode = path.stat().st_mode
        content = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file: cannot read {str(path)!r}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"secret_file: {str(path)!r} is open to other users; run: chmod 600 {path}")
    return _checked(content, f"secret_file {str(path)!r}")


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < _MIN_BYTES:
        raise ConfigError(f"{source}: the secret has {len(secret)} bytes, at least {_MIN_BYTES} are needed")
    return secret
