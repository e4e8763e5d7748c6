"""The logger of the transfer API: ``LLM_DATADIST``, to stdout (spec api-types §1).

Its level comes from ``ASCEND_GLOBAL_LOG_LEVEL`` (``"0"`` debug, ``"1"`` info, ``"2"`` warning, ``"3"`` error) when this
is imported; error by default. Level and handlers that the application has set before are left alone, and records
propagate to the root logger as usual.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

__all__ = ["debug", "error", "info", "log", "warn", "warning"]

_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}


class _StdoutHandler(logging.StreamHandler):
    """Writes to what ``sys.stdout`` is at that moment: it may be replaced, and the old one closed, at any time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("[%(levelname)s] %(name)s(%(process)d) %(asctime)s: %(message)s"))

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def _configured() -> logging.Logger:
    logger = logging.getLogger("LLM_DATADIST")
    if not logger.handlers:
        logger.addHandler(_StdoutHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", ""), logging.ERROR))
    return logger


log = _configured()

# As functions, for who imports this module under upstream's name llm_datadist.utils.log.
debug = log.debug
info = log.info
warn = warning = log.warning
error = log.error
