"""``link``, ``unlink`` and ``query_register_mem_status``: collective links (spec api-datadist §7, design section 4)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from llm_datadist_ray._native import NativeEngine, NativeError
from llm_datadist_ray.checks import check_uint64
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.arguments import check_link_arguments
from llm_datadist_ray.linking.communicator import Communicator, Members, TimeLimits
from llm_datadist_ray.linking.rank_table import RankAddress, parse_rank_table
from llm_datadist_ray.log import log
from llm_datadist_ray.options import EngineOptions, ListenAddress, link_total_time_s
from llm_datadist_ray.types import RegisterMemStatus

MAX_COMMUNICATORS = 512

_MAX_TRY_S = 5.0
"""Of one attempt at one address: an address that swallows packets must not eat the time of the next one, nor keep
``unlink`` waiting."""


class Communicators:
    """The collective links of one engine. Any thread; :meth:`link` and :meth:`unlink` wait for each other."""

    def __init__(self, engine: NativeEngine, options: EngineOptions, events: EventDispatcher) -> None:
        self._engine = engine
        self._events = events
        self._cluster_id = options.cluster_id
        total_s = link_total_time_s(options)
        self._limits = TimeLimits(total_s, min(total_s / options.link_retry_count, _MAX_TRY_S))
        self._calls = threading.Lock()
        self._state = threading.Lock()
        self._communicators: dict[int, Communicator] = {}
        self._ids = count(1)
        self._not_ready: set[int] = set()
        self._epochs_made: set[int] = set()
        """Of the links that communicators have left to others, which have a use for them, when they were unlinked."""

    @property
    def not_ready(self) -> Collection[int]:
        """A live view of the cluster ids with which an exchange is not OK, in progress or failed, and none is. Not of
        those that were linked before it: what worked goes on working."""
        return self._not_ready

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Starts a communicator and returns its id; reaching the members goes on in a thread of its own.

        TypeError, ValueError; LLMException: LLM_PARAM_INVALID, LLM_LINK_FAILED (rank table, port).
        """
        check_link_arguments(comm_name, cluster_rank_info, rank_table)
        raise_if_false(
            self._cluster_id in cluster_rank_info,
            f"cluster_rank_info {cluster_rank_info} lacks this process, cluster {self._cluster_id}",
        )
        with self._calls:
            raise_if_false(
                len(self._communicators) < MAX_COMMUNICATORS,
                f"link {comm_name!r}: there are {MAX_COMMUNICATORS} communicators already, unlink some",
            )
            earlier = self._engine.links()  # before we listen: who connects to this listener comes later
            members = self._members(comm_name, cluster_rank_info, parse_rank_table(rank_table))
            communicator = Communicator(
                self._engine,
                self._events,
                comm_name,
                members,
                self._limits,
                earlier=earlier,
                publish=self._publish,
                is_wanted=self._is_wanted,
            )
            return self._start(communicator, comm_name)

    def unlink(self, comm_id: int) -> None:
        """Ends a communicator, here only: waits for its exchange and for transfers, drops the links that came about
        through communicators and that no other one has.

        LLMException: LLM_NOT_YET_LINK for an unknown id, LLM_UNLINK_FAILED (the id is gone).
        """
        check_uint64("comm_id", comm_id)
        with self._calls:
            communicator = self._find(comm_id)
            communicator.stop()
            communicator.join()
            with self._state:
                del self._communicators[comm_id]
                self._update_not_ready()
            self._release(comm_id, communicator)

    def status(self, comm_id: int) -> RegisterMemStatus:
        """Never blocks. LLMException(LLM_NOT_YET_LINK) for an unknown id. Once it is OK transfers are let through."""
        check_uint64("comm_id", comm_id)
        with self._state:
            return self._find(comm_id).status

    def stop(self) -> None:
        """For the end of the engine: no thread begins another try."""
        for communicator in self._all():
            communicator.stop()

    def join(self) -> None:
        """Waits for the threads, which the closed engine lets go at once."""
        for communicator in self._all():
            communicator.join()

    def _find(self, comm_id: int) -> Communicator:
        communicator = self._communicators.get(comm_id)
        if communicator is None:
            raise LLMException(
                f"there is no communicator {comm_id}, link returns the ids that there are",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        return communicator

    def _all(self) -> list[Communicator]:
        with self._state:
            return list(self._communicators.values())

    def _members(
        self, comm_name: str, cluster_rank_info: Mapping[int, int], ranks: Mapping[int, RankAddress]
    ) -> Members:
        """Who connects to whom. Listens when there is a higher rank, which LLM_LINK_FAILED may stop."""
        if len(set(cluster_rank_info.values())) < len(cluster_rank_info):
            raise _link_failed(comm_name, f"two clusters have one rank: {cluster_rank_info}")
        own_rank = cluster_rank_info[self._cluster_id]
        for cluster_id, rank in cluster_rank_info.items():
            if rank not in ranks:
                raise _link_failed(comm_name, f"rank {rank} of cluster {cluster_id} is not in the rank table")
        lower = {cluster_id: ranks[rank] for cluster_id, rank in cluster_rank_info.items() if rank < own_rank}
        peers = frozenset(cluster_rank_info) - {self._cluster_id}
        for cluster_id, address in lower.items():
            if not address.candidates:
                raise _link_failed(comm_name, f"no IP address of cluster {cluster_id}: {address}")
        listen_address = self._listen(comm_name, ranks[own_rank]) if len(lower) < len(peers) else None
        return Members(peers, lower, listen_address)

    def _listen(self, comm_name: str, address: RankAddress) -> ListenAddress:
        local = next((candidate for candidate in address.candidates if is_local_address(candidate.ip)), None)
        if local is None:
            raise _link_failed(comm_name, f"no address of this process's {address} is one of this host")
        try:
            self._engine.listen_also(local.ip, address.port)
        except NativeError as error:
            where = f"{local.field} {local.ip}, port {address.port} ({address.port_source})"
            raise _link_failed(comm_name, f"cannot listen on {where}: {error.args[0]}") from error
        return local.ip, address.port

    def _start(self, communicator: Communicator, comm_name: str) -> int:
        try:
            communicator.start()
        except RuntimeError as error:
            if communicator.members.listen_address is not None:
                self._engine.unlisten(*communicator.members.listen_address)
            raise _link_failed(comm_name, f"no thread for it: {error}") from error
        comm_id = next(self._ids)
        with self._state:
            self._communicators[comm_id] = communicator
            self._update_not_ready()
        log.info("link %r is communicator %d", comm_name, comm_id)
        return comm_id

    def _release(self, comm_id: int, communicator: Communicator) -> None:
        errors: list[LLMException] = []

        def attempt(step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            try:
                step(*args, **kwargs)
            except LLMException as error:
                errors.append(error)

        links = self._engine.links()
        self._epochs_made = (self._epochs_made | communicator.epochs_made) & {link.epoch for link in links}
        for link in links:
            if link.epoch in self._epochs_made and not self._is_wanted(link.cluster_id):
                attempt(self._engine.unlink, link.cluster_id, force=True, timeout_s=None)
        if communicator.members.listen_address is not None:
            attempt(self._engine.unlisten, *communicator.members.listen_address)
        if errors:
            raise LLMException(
                f"unlink {comm_id}: {'; '.join(map(str, errors))}", status_code=LLMStatusCode.LLM_UNLINK_FAILED
            ) from errors[0]

    def _is_wanted(self, cluster_id: int) -> bool:
        return any(cluster_id in communicator.members.peers for communicator in self._all())

    def _publish(self, communicator: Communicator, status: RegisterMemStatus) -> None:
        """As one step, for who asks for the status and then transfers."""
        with self._state:
            communicator.status = status
            self._update_not_ready()

    def _update_not_ready(self) -> None:
        """With the lock. Changes the set in place: others hold it, and read it without. Between the two steps they see
        too many, never too few."""
        ready: set[int] = set()
        waiting: set[int] = set()
        for communicator in self._communicators.values():
            if communicator.status == RegisterMemStatus.OK:
                ready |= communicator.members.peers
            else:
                waiting |= communicator.members.peers - communicator.linked_before
        not_ready = waiting - ready
        self._not_ready |= not_ready
        self._not_ready &= not_ready


def is_local_address(ip: str) -> bool:
    """Whether this host has that address: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _link_failed(comm_name: str, what: str) -> LLMException:
    return LLMException(f"link {comm_name!r}: {what}", status_code=LLMStatusCode.LLM_LINK_FAILED)
