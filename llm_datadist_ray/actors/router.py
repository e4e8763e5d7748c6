"""Chooses the prompt and the decoder of a request from a cached topology; asks the coordinator when that is old."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from llm_datadist_ray.actors.errors import RequestError, RequestRejected
from llm_datadist_ray.actors.interrupt import Interrupt
from llm_datadist_ray.actors.messages import LinkReport, MemberRecord, Topology
from llm_datadist_ray.actors.ray_session import RaySession
from llm_datadist_ray.actors.status import CoordinatorStatus
from llm_datadist_ray.types import LLMRole

Wait = Callable[[Any], Any]
"""Waits for one answer, as ``ray.get`` does."""

_ANSWER_TIMEOUT_S = 30.0


class RouteError(RuntimeError):
    """No way for a request, or none to the coordinator: who is to blame, in which step, and what to do next."""

    def __init__(self, who: str, step: str, reason: str) -> None:
        super().__init__(f"{who} failed in step {step}: {reason}")
        self.who = who
        self.step = step
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Route:
    """The two members that serve one request, with their actor handles."""

    prompt_record: MemberRecord
    decoder_record: MemberRecord
    prompt: Any
    decoder: Any

    @property
    def pair(self) -> tuple[int, int]:
        return self.decoder_record.cluster_id, self.prompt_record.cluster_id


def describe(member: MemberRecord) -> str:
    """A member as errors name it."""
    return f"{member.actor_name} (cluster {member.cluster_id}, pid {member.pid} on {member.host})"


class Router:
    """Any thread. The least busy live member of each role serves a request, by this router's own count."""

    def __init__(self, coordinator: Any, cluster_name: str, namespace: str, session: RaySession) -> None:
        """RouteError when the coordinator does not answer."""
        self._coordinator = coordinator
        self._cluster_name = cluster_name
        self._namespace = namespace
        self._session = session
        self._lock = threading.Lock()
        self._topology = Topology(0, ())
        self._handles: dict[int, Any] = {}
        self._active: dict[str, Interrupt] = {}
        self._num_requests: Counter[int] = Counter()
        self._dead: set[int] = set()
        self._broken: set[tuple[int, int]] = set()
        self._is_closed = False
        self.refresh()

    def refresh(self, wait: Wait | None = None) -> None:
        """Asks the coordinator. RouteError when it is gone."""
        self.check_open()
        self._adopt(self._ask("topology", self._coordinator.topology.remote(), wait))

    def coordinator_status(self) -> CoordinatorStatus:
        """Asks the coordinator, and learns the topology by the way. RouteError when it is gone."""
        self.check_open()
        status: CoordinatorStatus = self._ask("status", self._coordinator.status.remote())
        self._adopt(status.topology)
        return status

    def close(self, reason: RequestError) -> None:
        """From now on nobody gets a route, and every request that is on one ends for that reason."""
        with self._lock:
            self._is_closed = True
            interrupts = list(self._active.values())
        for interrupt in interrupts:
            interrupt.set(reason)

    @property
    def is_open(self) -> bool:
        """Whether Ray may still be called for this cluster: a call after its end would start a new Ray."""
        return not self._is_closed and self._session.is_alive

    def check_open(self) -> None:
        """RouteError when the cluster is shut down or its Ray is gone from this process."""
        if self._is_closed:
            raise RouteError(f"cluster {self._cluster_name}", "route", "it is shut down: launch it again")
        if not self._session.is_alive:
            reason = "the Ray that it runs in was shut down in this process: launch it again"
            raise RouteError(f"cluster {self._cluster_name}", "route", reason)

    @contextmanager
    def route(self, request_id: str, interrupt: Interrupt) -> Iterator[Route]:
        """The members for one request, counted as busy meanwhile; :meth:`close` ends it through ``interrupt``.

        RequestRejected for an id that is in use, RouteError when a role has no live member.
        """
        with self._in_use(request_id, interrupt):
            route = self._choose(interrupt.wait)
            try:
                yield route
            finally:
                with self._lock:
                    self._num_requests.subtract(route.pair)

    def ensure_link(self, route: Route, wait: Wait) -> None:
        """At the first request of a pair the coordinator has them linked. RouteError with the decoder's reason."""
        with self._lock:
            if route.pair in self._topology.links and route.pair not in self._broken:
                return
        report: LinkReport = self._ask("link", self._coordinator.ensure_link.remote(*route.pair), wait)
        if report.error:
            raise RouteError(
                describe(route.decoder_record),
                "link",
                f"it cannot link to {describe(route.prompt_record)}: {report.error}; check that "
                f"{route.prompt_record.host}:{route.prompt_record.port} is reachable from the decoder's host, and try "
                "again",
            )
        with self._lock:
            self._broken.discard(route.pair)
        self.refresh(wait)

    def mark_dead(self, cluster_id: int) -> None:
        """Ray said that this actor has died; it gets no more requests, whenever the coordinator hears of it."""
        with self._lock:
            self._dead.add(cluster_id)

    def mark_broken(self, route: Route) -> None:
        """A transfer failed: the next request of this pair links again. Tells the coordinator, waits for nothing."""
        with self._lock:
            self._broken.add(route.pair)
        if self.is_open:
            self._coordinator.report_broken_link.remote(*route.pair)

    def handle_of(self, member: MemberRecord) -> Any:
        """The member's actor handle. ValueError when Ray has no such actor (any more)."""
        with self._lock:
            handle = self._handles.get(member.cluster_id)
        if handle is None:
            handle = ray.get_actor(member.actor_name, namespace=self._namespace)
            with self._lock:
                self._handles[member.cluster_id] = handle
        return handle

    @contextmanager
    def _in_use(self, request_id: str, interrupt: Interrupt) -> Iterator[None]:
        with self._lock:
            if request_id in self._active:
                raise RequestRejected(
                    f"request {request_id}: this id is in use by another request of cluster {self._cluster_name}: "
                    "wait for its end, or take another id"
                )
            self._active[request_id] = interrupt
        try:
            self.check_open()  # after it was noted: a close() from here on finds it
            yield
        finally:
            with self._lock:
                del self._active[request_id]

    def _choose(self, wait: Wait) -> Route:
        prompt, decoder = self._least_busy(LLMRole.PROMPT), self._least_busy(LLMRole.DECODER)
        if prompt is None or decoder is None:
            self.refresh(wait)  # one may have joined since
            prompt, decoder = self._least_busy(LLMRole.PROMPT), self._least_busy(LLMRole.DECODER)
        if prompt is None or decoder is None:
            missing = "prompt" if prompt is None else "decoder"
            reason = f"no {missing} actor is alive; end this cluster and launch it again"
            raise RouteError(f"cluster {self._cluster_name}", "route", reason)
        try:
            route = Route(prompt, decoder, self.handle_of(prompt), self.handle_of(decoder))
        except ValueError as error:
            reason = f"a member has just gone: {error}; try again"
            raise RouteError(f"cluster {self._cluster_name}", "route", reason) from error
        with self._lock:
            self._num_requests.update(route.pair)
        return route

    def _least_busy(self, role: LLMRole) -> MemberRecord | None:
        with self._lock:
            live = [
                member
                for member in self._topology.members
                if member.role == role and member.cluster_id not in self._dead
            ]
            return min(live, key=lambda member: self._num_requests[member.cluster_id], default=None)

    def _adopt(self, topology: Topology) -> None:
        with self._lock:
            if topology.epoch >= self._topology.epoch:
                self._topology = topology

    def _ask(self, step: str, ref: Any, wait: Wait | None = None) -> Any:
        who = f"the coordinator of cluster {self._cluster_name}"
        try:
            # Not ray.get(), which would start a new Ray if this one were shut down just now.
            return wait(ref) if wait is not None else ref.future().result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise RouteError(who, step, f"no answer within {_ANSWER_TIMEOUT_S:.0f} s; try again") from error
        except RayTaskError as error:
            raise RouteError(who, step, f"it refused: {error.cause}; try again, the topology has changed") from error
        except RayError as error:
            reason = f"it is gone ({type(error).__name__}: {error}); end this cluster and launch it again"
            raise RouteError(who, step, reason) from error
