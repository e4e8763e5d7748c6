"""Ray as a cluster finds it: joined where there is one, else started here. Imports Ray only when asked to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray.actors.cluster_config import RayConfig
from llm_datadist_ray.actors.errors import LaunchError

_AUTH_VARIABLE = "RAY_AUTH_MODE"
_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RaySession:
    """``is_owned``: this process started a Ray that exists on this host only, and :meth:`close` ends it."""

    is_owned: bool
    identity: tuple[str, str]
    """Of this process in that very Ray: a later one in the same process has another."""

    @classmethod
    def current(cls, *, is_owned: bool) -> RaySession:
        return cls(is_owned, _identity())

    @property
    def is_alive(self) -> bool:
        """False after somebody has called ``ray.shutdown()``: most calls of Ray would start a new one then."""
        import ray

        return ray.is_initialized() and _identity() == self.identity

    def close(self) -> None:
        if self.is_owned and self.is_alive:
            import ray

            ray.shutdown()


def _identity() -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def connect(config: RayConfig, say: Callable[[str], None]) -> RaySession:
    """Uses the Ray that this process is in already, else the one of ``ray.address`` or RAY_ADDRESS (a submitted job has
    the latter), else starts one. ``RAY_AUTH_MODE`` is always set afterwards; a value that is there already wins.

    Blocks for seconds. LaunchError.
    """
    set_auth_mode(config.auth_mode)
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        say("using the Ray of this process")
        return RaySession.current(is_owned=False)
    address = config.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    try:
        if address:
            say(f"joining Ray at {address}")
            ray.init(address=address, **quiet)
            return RaySession.current(is_owned=False)
        say(f"starting Ray on this host ({config.num_cpus} CPUs)")
        ray.init(
            address="local",
            num_cpus=config.num_cpus,
            object_store_memory=config.object_store_mb * _MB,
            include_dashboard=False,
            **quiet,
        )
        return RaySession.current(is_owned=True)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"join Ray at {address}" if address else "start Ray on this host"
        advice = (
            "check ray.address or RAY_ADDRESS, and that RAY_AUTH_MODE is what that cluster uses"
            if address
            else "check that the temporary folder and /dev/shm have room (ray.object_store_mb)"
        )
        raise LaunchError(
            f"could not {where} (RAY_AUTH_MODE={os.environ[_AUTH_VARIABLE]}): {type(error).__name__}: {error}; {advice}"
        ) from error


def set_auth_mode(mode: str) -> None:
    """Sets ``RAY_AUTH_MODE`` for this process and its children unless it is set; without it Ray's behaviour depends on
    whether anybody ever started a Ray on this machine."""
    if os.environ.get(_AUTH_VARIABLE):
        return
    os.environ[_AUTH_VARIABLE] = mode
    if "ray" in sys.modules:
        # Ray has read its configuration when it was imported, so it is told to read it again.
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")
