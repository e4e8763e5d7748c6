"""Brings up the actors of a cluster, in parallel, and tells what they are doing meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from llm_datadist_ray import __version__
from llm_datadist_ray.actors.cluster_config import ClusterConfig, RoleConfig
from llm_datadist_ray.actors.coordinator import ClusterCoordinator
from llm_datadist_ray.actors.decoder import DecoderActor
from llm_datadist_ray.actors.errors import LaunchError
from llm_datadist_ray.actors.messages import MemberRecord
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
from llm_datadist_ray.actors.prompt import PromptActor
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
    namespace: str = field(init=False)
    coordinator: Any = None
    members: dict[str, Any] = field(default_factory=dict)
    """Actor name to handle."""

    def __post_init__(self) -> None:
        self.namespace = namespace_of(self.config.name)

    def start(self, secret: bytes, host: str | None) -> None:
        """Blocks until every member is registered. LaunchError that names the first one that is not."""
        self._check_resources()
        self.coordinator = self._start_coordinator()
        for actor_class, prefix in _ROLE_ACTORS:
            role: RoleConfig = getattr(self.config, prefix)
            for index in range(role.replicas):
                name = f"{prefix}-{index}"
                options = actor_class.options(name=name, namespace=self.namespace, **_claims(role))
                self.members[name] = options.remote(name, self.namespace, self.config, secret, host)
        self._wait_for_members()

    def stop(self) -> None:
        """Idempotent; waits a few seconds for members to close their engines, then ends the processes."""
        members, self.members = self.members, {}
        coordinator, self.coordinator = self.coordinator, None
        farewells = [handle.stop.remote() for handle in members.values()]
        if coordinator is not None:
            farewells.append(coordinator.close.remote())
        if farewells:
            ray.wait(farewells, num_returns=len(farewells), timeout=_STOP_TIMEOUT_S)
        for handle in (*members.values(), coordinator):
            if handle is not None:
                ray.kill(handle)

    def _check_resources(self) -> None:
        """What can never be placed would be waited for without an end."""
        available = ray.cluster_resources()
        wanted: dict[str, float] = {}
        for role in (self.config.prompt, self.config.decoder):
            for name, amount in role.resources.items():
                wanted[name] = wanted.get(name, 0.0) + amount * role.replicas
        for name, amount in wanted.items():
            if amount > available.get(name, 0.0):
                raise LaunchError(
                    f"cluster {self.config.name} wants {amount:g} {name} in all, this Ray has "
                    f"{available.get(name, 0.0):g}: see prompt.resources and decoder.resources"
                )

    def _start_coordinator(self) -> Any:
        self._check_name_is_free()
        owner = OwnerRecord(socket.gethostname(), os.getpid(), __version__)
        try:
            coordinator = _COORDINATOR.options(
                name=COORDINATOR_NAME, namespace=self.namespace, lifetime="detached"
            ).remote(self.config.name, self.namespace, owner)
        except ValueError as error:
            raise LaunchError(f"cluster {self.config.name} is being launched by somebody else: {error}") from error
        try:
            ray.get(coordinator.status.remote())
        except RayError as error:
            ray.kill(coordinator)
            raise LaunchError(f"the coordinator of cluster {self.config.name} did not start: {error}") from error
        return coordinator

    def _check_name_is_free(self) -> None:
        """Takes the name over from a coordinator that nobody owns and that has no live members."""
        try:
            existing = ray.get_actor(COORDINATOR_NAME, namespace=self.namespace)
        except ValueError:
            return
        try:
            status: CoordinatorStatus = ray.get(existing.status.remote(), timeout=_ANSWER_TIMEOUT_S)
        except RayActorError:
            return
        except RayError as error:
            raise LaunchError(
                f"cluster {self.config.name} exists and its coordinator does not answer: {error}"
            ) from error
        if status.lease_left_s > 0 or status.topology.members:
            raise LaunchError(
                f"cluster {self.config.name} is running, launched by {status.owner}, with "
                f"{len(status.topology.members)} members: end that one, or use another name in the configuration"
            )
        self.say(f"replacing what is left of cluster {self.config.name}, launched by {status.owner}")
        ray.kill(existing)

    def _wait_for_members(self) -> None:
        """Woken by whatever comes first: a sentence of a member, a member that is ready, one that failed."""
        starts = {handle.start.remote(): name for name, handle in self.members.items()}
        num_read = dict.fromkeys(self.members, 0)
        news = {handle.progress.remote(0): name for name, handle in self.members.items()}
        started_at = time.monotonic()
        while starts or news:
            (ref,), _ = ray.wait([*starts, *news], num_returns=1)
            if ref in starts:
                name = starts.pop(ref)
                self._member_started(name, ref, time.monotonic() - started_at)
                continue
            name = news.pop(ref)
            sentences = self._progress_of(ref)
            for sentence in sentences:
                self.say(sentence)
            num_read[name] += len(sentences)
            if sentences:
                news[self.members[name].progress.remote(num_read[name])] = name

    def _progress_of(self, ref: Any) -> tuple[str, ...]:
        try:
            return ray.get(ref)
        except RayActorError:
            return ()  # its start() says so too, with the reason

    def _member_started(self, name: str, ref: Any, elapsed_s: float) -> MemberRecord:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}"
        except RayActorError as error:
            reason = f"its process has died: {error}"
        raise LaunchError(f"{name} of cluster {self.config.name} did not start after {elapsed_s:.1f} s: {reason}")


def _claims(role: RoleConfig) -> dict[str, Any]:
    """Ray's options for a claim; without one an actor is placed anywhere, so that two cores suffice for everything."""
    resources = dict(role.resources)
    return {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
