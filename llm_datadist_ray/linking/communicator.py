"""One collective link: the thread that reaches all of its members (spec api-datadist §7, design section 4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from llm_datadist_ray._native import Event, EventKind, LinkInfo, NativeEngine, NativeError, NativeStatus
from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.rank_table import Candidate, RankAddress
from llm_datadist_ray.log import log
from llm_datadist_ray.options import ListenAddress
from llm_datadist_ray.types import RegisterMemStatus

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_HOPELESS = {NativeStatus.MODE_MISMATCH, NativeStatus.AUTH, NativeStatus.VERSION, NativeStatus.LAYOUT}
"""Another try with the same peer will not end otherwise."""


@dataclass(frozen=True, slots=True)
class Members:
    """Who belongs to a communicator besides this process, and what this process does about it."""

    peers: frozenset[int]
    lower: Mapping[int, RankAddress]
    """Peers of a lower rank: we connect to them. The others connect to us."""
    listen_address: ListenAddress | None
    """Where we listen for them; None when we have the highest rank."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    total_s: float
    try_s: float
    """Of one attempt at one address."""


class Communicator:
    """Connects to the lower ranks, waits for the higher ones, and then is OK, or FAILED at its time limit, for ever.

    A peer counts as linked however its link came about. ``earlier`` are the links that there were before: they are
    none of the communicator's. ``publish`` is called in the thread with the final status, and sets it; ``is_wanted``
    says of a cluster that answered at somebody else's address whether its link is of use here.
    """

    def __init__(
        self,
        engine: NativeEngine,
        events: EventDispatcher,
        name: str,
        members: Members,
        limits: TimeLimits,
        *,
        earlier: Collection[LinkInfo],
        publish: Callable[[Communicator, RegisterMemStatus], None],
        is_wanted: Callable[[int], bool],
    ) -> None:
        self.members = members
        self.status = RegisterMemStatus.PREPARING
        self.linked_before = members.peers & {link.cluster_id for link in earlier if link.is_ready}
        self.epochs_made: set[int] = set()
        """Of the links to peers that the exchange has seen come up. Complete after :meth:`join`."""
        self._earlier_epochs = {link.epoch for link in earlier}
        self._engine = engine
        self._events = events
        self._name = name
        self._limits = limits
        self._publish = publish
        self._is_wanted = is_wanted
        self._errors: dict[int, LLMException] = {}
        self._is_stopping = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ldr-link-{name}"[:32], daemon=True)

    def start(self) -> None:
        self._deadline = time.monotonic() + self._limits.total_s
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end; it may be in the middle of a try."""
        self._is_stopping = True
        self._woken.set()

    def join(self) -> None:
        """Waits for the thread, at most one try after :meth:`stop`; no longer than that when the engine is closed."""
        self._thread.join()

    def _run(self) -> None:
        status = RegisterMemStatus.FAILED  # PREPARING for ever is what not even a defect of ours may leave behind
        try:
            status = self._run_exchange()
        finally:
            if not self._is_stopping:
                self._publish(self, status)

    def _run_exchange(self) -> RegisterMemStatus:
        try:
            unsubscribe = self._events.subscribe(EventKind.LINK_UP, self._on_link_up)
            try:
                failure = self._exchange()
            finally:
                unsubscribe()
        except NativeError as error:  # of a link that is beyond trying again, or the engine is closed
            failure = str(error)
        if not self._is_stopping:
            if failure is None:
                log.info("link %r: all of clusters %s are linked", self._name, sorted(self.members.peers))
            else:
                log.error("link %r failed: %s", self._name, failure)
        return RegisterMemStatus.OK if failure is None else RegisterMemStatus.FAILED

    def _on_link_up(self, event: Event) -> None:
        if event.id in self.members.peers and event.id not in self.members.lower:
            self._woken.set()

    def _exchange(self) -> str | None:
        """None when all are linked (or nobody wants to know any more), else the reason of the failure."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._woken.clear()
            missing = self._missing()
            if self._is_stopping:
                return None
            hopeless = self._connect(missing)
            if hopeless is not None:
                return hopeless
            missing = self._missing()
            if not missing:
                return None
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                return self._describe(missing)
            is_retrying = any(peer in self.members.lower for peer in missing)
            self._woken.wait(min(pause_s, remaining_s) if is_retrying else remaining_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _missing(self) -> list[int]:
        """The peers without a usable link, by the link table; remembers the links of the others."""
        peers = self.members.peers
        links = {link.cluster_id: link for link in self._engine.links() if link.is_ready and link.cluster_id in peers}
        self.epochs_made.update({link.epoch for link in links.values()} - self._earlier_epochs)
        return sorted(peers - links.keys())

    def _connect(self, missing: Sequence[int]) -> str | None:
        """One try at each missing peer of a lower rank. A text when another try could not help."""
        for peer in missing:
            address = self.members.lower.get(peer)
            if address is None:
                continue
            errors = []
            for candidate in address.candidates:
                if self._is_stopping:
                    return None
                error = self._try(peer, candidate, address)
                if error is None:
                    break
                errors.append(error)
            else:
                self._errors[peer] = errors[-1]
                if all(isinstance(error, NativeError) and error.native_status in _HOPELESS for error in errors):
                    return self._describe([peer])
        return None

    def _try(self, peer: int, candidate: Candidate, address: RankAddress) -> LLMException | None:
        timeout_s = max(0.001, min(self._limits.try_s, self._deadline - time.monotonic()))
        try:
            link = self._engine.link(ip=candidate.ip, port=address.port, timeout_s=timeout_s)
        except NativeError as error:
            if error.native_status == NativeStatus.CLOSED:
                raise
            is_there = error.native_status == NativeStatus.ALREADY_LINKED and peer not in self._missing()
            return None if is_there else error
        if link.cluster_id == peer:
            return None
        self._drop_stranger(link, timeout_s)
        return LLMException(
            f"at {candidate.ip}:{address.port} ({candidate.field}) answers cluster {link.cluster_id}",
            status_code=LLMStatusCode.LLM_LINK_FAILED,
        )

    def _drop_stranger(self, link: LinkInfo, timeout_s: float) -> None:
        """The link that we have just made to a cluster that we did not mean. With its consent it sees no break."""
        if self._is_wanted(link.cluster_id):
            return
        try:
            self._engine.unlink(link.cluster_id, timeout_s=timeout_s)
        except NativeError as error:
            if error.native_status == NativeStatus.CLOSED:
                raise
            self._engine.unlink(link.cluster_id, force=True, timeout_s=timeout_s)

    def _describe(self, missing: Sequence[int]) -> str:
        elapsed_s = self._limits.total_s - max(0.0, self._deadline - time.monotonic())
        what = [f"cluster {peer} ({self._describe_peer(peer)})" for peer in missing]
        return f"after {elapsed_s:.1f} s there is no link to {'; '.join(what)}"

    def _describe_peer(self, peer: int) -> str:
        if peer in self.members.lower:
            return f"{self.members.lower[peer]}: {self._errors.get(peer, 'linked and lost again')}"
        ip, port = self.members.listen_address or ("nowhere", 0)
        return f"it has not connected to us at {ip}:{port}; does it call link with the same arguments?"
