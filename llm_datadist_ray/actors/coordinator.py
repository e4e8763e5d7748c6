"""The coordinator: a thin actor around :class:`ClusterState`. It is never asked per request."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import ray
from ray.exceptions import RayError

from llm_datadist_ray.actors.end_watch import reason_of_end
from llm_datadist_ray.actors.messages import (
    JoinReply,
    JoinRequest,
    LinkOrder,
    LinkReport,
    MemberRecord,
    Topology,
)
from llm_datadist_ray.actors.remote import actor, method
from llm_datadist_ray.actors.state import ClusterState
from llm_datadist_ray.actors.state_store import StateStore
from llm_datadist_ray.actors.status import CoordinatorStatus, OwnerRecord

OWNER_LEASE_S = 10.0
LINK_TIMEOUT_MS = 5000

T = TypeVar("T")


@actor(num_cpus=0, max_restarts=-1, max_task_retries=-1, concurrency_groups={"control": 8, "links": 16})
class ClusterCoordinator:
    """Named, detached, one per cluster; the launcher owns and ends it.

    Every mutation is idempotent, so Ray may repeat a call. After a death of this process Ray starts it again, and the
    state comes back from Ray's key-value store. A member is evicted when Ray says that its actor has died; a call that
    is not answered is no evidence.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        owner: OwnerRecord,
        *,
        epoch: int = 0,
        next_cluster_id: int = 1,
        lease_s: float = OWNER_LEASE_S,
    ) -> None:
        """``epoch`` and ``next_cluster_id`` are where a cluster of this name that nobody owned any more has ended."""
        self._name = name
        self._namespace = namespace
        self._owner = owner
        self._lease_s = lease_s
        self._lease_until = time.monotonic() + lease_s
        self._store = StateStore(namespace)
        self._lock = threading.Lock()
        self._pair_locks: dict[tuple[int, int], threading.Lock] = {}
        self._is_closed = False
        self._state = self._stored_state() or ClusterState(epoch=epoch, next_cluster_id=next_cluster_id)
        for member in self._state.topology().members:
            self._watch(member)

    @method(concurrency_group="control")
    def join(self, request: JoinRequest) -> JoinReply:
        """A cluster id that no other process of this cluster ever had. MembershipError."""
        return self._mutate(lambda state: state.join(request))

    @method(concurrency_group="control")
    def register(self, record: MemberRecord) -> int:
        """Makes the caller a member, and watches its actor from now on. Returns the epoch. MembershipError."""
        with self._lock:  # one section: of two calls with the same record one begins to watch
            is_new = record not in self._state.topology().members
            epoch = self._state.register(record)
            self._save()
            if is_new:
                self._watch(record)
            return epoch

    @method(concurrency_group="control")
    def topology(self) -> Topology:
        with self._lock:
            return self._state.topology()

    @method(concurrency_group="links")
    def ensure_link(self, decoder_id: int, prompt_id: int) -> LinkReport:
        """Has the decoder link to the prompt, and records what it reports; blocks for that. A link that cannot be made
        is in the report; MembershipError when one of the two is no live member or has the wrong role."""
        with self._lock:
            decoder, prompt = self._state.check_pair(decoder_id, prompt_id)
            pair_lock = self._pair_locks.setdefault((decoder_id, prompt_id), threading.Lock())
        order = LinkOrder(prompt_id, prompt.incarnation, prompt.host, prompt.port, LINK_TIMEOUT_MS)
        with pair_lock:
            report = self._order_link(decoder, order)
            self._mutate(lambda state: state.record_link(decoder_id, decoder.incarnation, report))
        return report

    @method(concurrency_group="control")
    def report_broken_link(self, decoder_id: int, prompt_id: int) -> bool:
        """A router saw that link fail: it is down until somebody asks for it again. Nobody is evicted for it."""
        return self._mutate(lambda state: state.break_link(decoder_id, prompt_id))

    @method(concurrency_group="control")
    def renew_lease(self) -> None:
        """The owner is alive."""
        self._lease_until = time.monotonic() + self._lease_s

    @method(concurrency_group="control")
    def status(self) -> CoordinatorStatus:
        lease_left_s = max(0.0, self._lease_until - time.monotonic())
        with self._lock:
            topology, next_cluster_id = self._state.topology(), self._state.next_cluster_id
        return CoordinatorStatus(self._name, os.getpid(), self._owner, lease_left_s, topology, next_cluster_id)

    @method(concurrency_group="control")
    def close(self) -> None:
        """Forgets the stored state for good; the owner kills the actor next."""
        with self._lock:
            self._is_closed = True
            self._store.delete()

    def _mutate(self, change: Callable[[ClusterState], T]) -> T:
        with self._lock:
            result = change(self._state)
            self._save()
            return result

    def _save(self) -> None:
        """Before a change is answered: an id that somebody may have heard of is never given out again. Not after the
        close, when members are still ending."""
        if not self._is_closed:
            self._store.save(pickle.dumps((self._owner, self._state)))

    def _stored_state(self) -> ClusterState | None:
        """What an earlier process of this very launch had stored; what is left of another launch is nothing to us."""
        stored = self._store.load()
        if stored is None:
            return None
        owner, state = pickle.loads(stored)
        return state if owner == self._owner else None

    def _order_link(self, decoder: MemberRecord, order: LinkOrder) -> LinkReport:
        try:
            handle = ray.get_actor(decoder.actor_name, namespace=self._namespace)
            return ray.get(handle.link_to.remote(order))
        except (ValueError, RayError) as error:
            return LinkReport(
                order.cluster_id, order.incarnation, error=f"{decoder.actor_name} could not be told to link: {error}"
            )

    def _watch(self, member: MemberRecord) -> None:
        """One thread per member, asleep in a call that ends with the actor."""
        threading.Thread(target=self._wait_for_end, args=(member,), name=member.actor_name, daemon=True).start()

    def _wait_for_end(self, member: MemberRecord) -> None:
        def ask() -> bool:
            handle = ray.get_actor(member.actor_name, namespace=self._namespace)
            return ray.get(handle.until_end.remote())

        reason = reason_of_end(ask, time.sleep)
        if reason is not None:
            self._mutate(lambda state: state.remove(member.cluster_id, reason))
