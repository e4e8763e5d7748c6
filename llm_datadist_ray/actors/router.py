"""Chooses the prompt and the decoder of a request from a cached topology; asks the coordinator when that is old."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from llm_datadist_ray.actors.errors import RequestFailed
from llm_datadist_ray.actors.messages import LinkReport, MemberRecord, Topology
from llm_datadist_ray.types import LLMRole


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

    def __init__(self, coordinator: Any, namespace: str) -> None:
        self._coordinator = coordinator
        self._namespace = namespace
        self._lock = threading.Lock()
        self._topology = Topology(0, ())
        self._handles: dict[int, Any] = {}
        self._num_requests: Counter[int] = Counter()
        self._dead: set[int] = set()
        self.refresh()

    def refresh(self) -> Topology:
        """Asks the coordinator. RequestFailed when it is gone."""
        topology: Topology = self._ask(self._coordinator.topology.remote())
        with self._lock:
            if topology.epoch >= self._topology.epoch:
                self._topology = topology
            return self._topology

    @contextmanager
    def route(self, request_id: str) -> Iterator[Route]:
        """The members for one request, counted as busy meanwhile. RequestFailed when a role has no live member."""
        route = self._choose(request_id)
        try:
            yield route
        finally:
            with self._lock:
                self._num_requests.subtract(route.pair)

    def ensure_link(self, route: Route) -> None:
        """At the first request of a pair the coordinator has them linked. RequestFailed with the decoder's reason."""
        with self._lock:
            if route.pair in self._topology.links:
                return
        report: LinkReport = self._ask(self._coordinator.ensure_link.remote(*route.pair))
        if report.error:
            raise RequestFailed(
                f"{describe(route.decoder_record)} cannot link to {describe(route.prompt_record)}: {report.error}",
                member=describe(route.decoder_record),
                step="link",
            )
        self.refresh()

    def mark_dead(self, cluster_id: int) -> None:
        """Ray said that this actor has died; it gets no more requests, whenever the coordinator hears of it."""
        with self._lock:
            self._dead.add(cluster_id)

    def report_broken_link(self, route: Route) -> None:
        """A transfer failed: the next request of this pair links again."""
        self._ask(self._coordinator.report_broken_link.remote(*route.pair))
        self.refresh()

    def handle_of(self, member: MemberRecord) -> Any:
        """The member's actor handle. ValueError when Ray has no such actor (any more)."""
        with self._lock:
            handle = self._handles.get(member.cluster_id)
        if handle is None:
            handle = ray.get_actor(member.actor_name, namespace=self._namespace)
            with self._lock:
                self._handles[member.cluster_id] = handle
        return handle

    def _choose(self, request_id: str) -> Route:
        prompt, decoder = self._least_busy(LLMRole.PROMPT), self._least_busy(LLMRole.DECODER)
        if prompt is None or decoder is None:
            self.refresh()  # one may have joined since
            prompt, decoder = self._least_busy(LLMRole.PROMPT), self._least_busy(LLMRole.DECODER)
        if prompt is None or decoder is None:
            missing = "prompt" if prompt is None else "decoder"
            raise RequestFailed(
                f"request {request_id}: no {missing} actor is alive; end this cluster and launch it again",
                member=missing,
                step="route",
            )
        try:
            route = Route(prompt, decoder, self.handle_of(prompt), self.handle_of(decoder))
        except ValueError as error:
            raise RequestFailed(f"request {request_id}: a member has just gone: {error}", step="route") from error
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

    def _ask(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise RequestFailed(f"the coordinator refused: {error.cause}", member="coordinator") from error
        except RayActorError as error:
            raise RequestFailed(f"the coordinator is gone: {error}", member="coordinator") from error
