"""Brings up the actors of a cluster, in parallel, and tells what they are doing meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from llm_datadist_ray import __version__
from llm_datadist_ray.actors.cluster_config import ClusterConfig, RoleConfig
from llm_datadist_ray.actors.coordinator import ClusterCoordinator
from llm_datadist_ray.actors.decoder import DecoderActor
from llm_datadist_ray.actors.errors import LaunchError
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
from llm_datadist_ray.actors.placement import check_resources, claims
from llm_datadist_ray.actors.prompt import PromptActor
from llm_datadist_ray.actors.ray_session import RaySession
from llm_datadist_ray.actors.state_store import StateStore
from llm_datadist_ray.actors.status import CoordinatorStatus, OwnerRecord

Say = Callable[[str], None]

# Ray's type hints know no .options() of a decorated class with concurrency groups.
_COORDINATOR: Any = ClusterCoordinator
_ROLE_ACTORS: tuple[tuple[Any, str], ...] = ((PromptActor, "prompt"), (DecoderActor, "decoder"))

_ANSWER_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


@dataclass
class Launcher:
    """The actors that this process started. :meth:`stop` ends them, whatever state they are in."""

    config: ClusterConfig
    say: Say
    session: RaySession
    owner: OwnerRecord = field(default_factory=lambda: OwnerRecord(socket.gethostname(), os.getpid(), __version__))
    coordinator: Any = None
    members: dict[str, Any] = field(default_factory=dict)
    """Actor name to handle."""
    _is_coordinator_asked_for: bool = False
    _deadline: float = 0.0
    _started_at: float = 0.0

    @property
    def namespace(self) -> str:
        return namespace_of(self.config.name)

    def start(self, secret: bytes, host: str | None) -> None:
        """Blocks until every member is registered, ``launch_timeout_s`` at most. LaunchError that names the first one
        that is not."""
        self._started_at = time.monotonic()
        self._deadline = self._started_at + self.config.launch_timeout_s
        check_resources(self.config)
        self._start_coordinator()
        for actor_class, prefix in _ROLE_ACTORS:
            role: RoleConfig = getattr(self.config, prefix)
            for index in range(role.replicas):
                name = f"{prefix}-{index}"
                try:
                    options = actor_class.options(name=name, namespace=self.namespace, **claims(role))
                    self.members[name] = options.remote(name, self.namespace, self.config, secret, host)
                except ValueError as error:
                    raise self._failed(f"Ray refuses to start {name}: {error}; see {prefix}.resources") from error
        self._wait_for_members()

    def stop(self) -> None:
        """Idempotent; waits a few seconds for members to close their engines, then ends the processes. Does nothing
        when their Ray is gone from this process."""
        members, self.members = self.members, {}
        coordinator, self.coordinator = self.coordinator, None
        if not self.session.is_alive:
            return
        coordinator = coordinator or self._interrupted_coordinator()
        self._is_coordinator_asked_for = False
        handles = [*members.values(), *([] if coordinator is None else [coordinator])]
        try:
            farewells = [handle.stop.remote() for handle in members.values()]
            if coordinator is not None:
                farewells.append(coordinator.close.remote())
            if farewells:
                ray.wait(farewells, num_returns=len(farewells), timeout=_STOP_TIMEOUT_S)
        finally:
            for handle in handles:
                ray.kill(handle)
            if coordinator is not None:
                StateStore(self.namespace).delete()  # if it was killed before it could

    def _start_coordinator(self) -> None:
        beginning = self._take_name()
        try:
            # Ray may have made it when an interrupt keeps us from ever getting the handle.
            self._is_coordinator_asked_for = True
            self.coordinator = _COORDINATOR.options(
                name=COORDINATOR_NAME, namespace=self.namespace, lifetime="detached"
            ).remote(self.config.name, self.namespace, self.owner, **beginning)
        except ValueError as error:
            self._is_coordinator_asked_for = False
            raise self._failed(f"somebody else is launching it right now: {error}") from error
        try:
            ray.get(self.coordinator.status.remote(), timeout=self._time_left_s())
        except GetTimeoutError as error:
            raise self._out_of_time([_last_word("the coordinator", [])]) from error
        except RayError as error:
            raise self._failed(f"its coordinator did not start: {_reason(error)}") from error

    def _take_name(self) -> dict[str, int]:
        """Where epochs and ids begin: behind those of a coordinator that nobody owns and that has no live members. Such
        a one is ended; any other is a LaunchError."""
        try:
            existing = ray.get_actor(COORDINATOR_NAME, namespace=self.namespace)
        except ValueError:
            return {}
        try:
            status: CoordinatorStatus = ray.get(existing.status.remote(), timeout=_ANSWER_TIMEOUT_S)
        except ActorDiedError:
            return {}
        except RayError as error:
            reason = "its name is taken, and the coordinator that has it does not answer"
            raise self._failed(f"{reason}: {_reason(error)}; use another name in the configuration") from error
        if status.lease_left_s > 0 or status.topology.members:
            raise LaunchError(
                f"cluster {self.config.name} is running, launched by {status.owner}, with "
                f"{len(status.topology.members)} members: end that one, or use another name in the configuration"
            )
        self.say(f"replacing what is left of cluster {self.config.name}, launched by {status.owner}")
        ray.kill(existing)
        return {"epoch": status.topology.epoch + 1, "next_cluster_id": status.next_cluster_id}

    def _interrupted_coordinator(self) -> Any:
        """The coordinator that was asked for and that we have no handle of; None when there is none of ours."""
        if not self._is_coordinator_asked_for:
            return None
        try:
            found = ray.get_actor(COORDINATOR_NAME, namespace=self.namespace)
            status: CoordinatorStatus = ray.get(found.status.remote(), timeout=_ANSWER_TIMEOUT_S)
        except (ValueError, RayError):
            return None
        return found if status.owner == self.owner else None

    def _wait_for_members(self) -> None:
        """Woken by whatever comes first: a sentence of a member, a member that is ready, one that failed."""
        starts = {handle.start.remote(): name for name, handle in self.members.items()}
        heard: dict[str, list[str]] = {name: [] for name in self.members}
        news = {handle.progress.remote(0): name for name, handle in self.members.items()}
        while starts or news:
            ready, _ = ray.wait([*starts, *news], num_returns=1, timeout=self._time_left_s())
            if not ready:
                raise self._out_of_time([_last_word(name, heard[name]) for name in starts.values() or news.values()])
            (ref,) = ready
            if ref in starts:
                self._check_started(starts.pop(ref), ref)
                continue
            name = news.pop(ref)
            sentences = _progress_of(ref)
            for sentence in sentences:
                self.say(sentence)
            heard[name] += sentences
            if sentences:
                news[self.members[name].progress.remote(len(heard[name]))] = name

    def _check_started(self, name: str, ref: Any) -> None:
        try:
            ray.get(ref)
        except RayError as error:
            elapsed_s = time.monotonic() - self._started_at
            raise LaunchError(
                f"{name} of cluster {self.config.name} did not start after {elapsed_s:.1f} s: {_reason(error)}"
            ) from error

    def _time_left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _out_of_time(self, pending: list[str]) -> LaunchError:
        limit = f"launch_timeout_s ({self.config.launch_timeout_s}) is over"
        return self._failed(f"{limit}; still pending: {', '.join(pending)}")

    def _failed(self, reason: str) -> LaunchError:
        elapsed_s = time.monotonic() - self._started_at
        return LaunchError(f"cluster {self.config.name} could not be launched after {elapsed_s:.1f} s: {reason}")


def _progress_of(ref: Any) -> tuple[str, ...]:
    try:
        return ray.get(ref)
    except RayError:
        return ()  # its start() says so too, with the reason


def _last_word(name: str, heard: list[str]) -> str:
    if heard:
        return f"{name} (its last word: {heard[-1].removeprefix(f'{name}: ')})"
    return f"{name} (its process has not begun: Ray may be waiting for resources that others hold, see ray status)"


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, GetTimeoutError):
        return "it did not answer in time"
    if isinstance(error, ActorDiedError):
        return f"its process has died: {error}"
    return f"{type(error).__name__}: {error}"
