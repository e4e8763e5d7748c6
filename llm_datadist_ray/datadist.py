"""LLMDataDist: one data-distribution engine per process, its life, links and role (spec api-datadist)."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import LinkInfo, NativeEngine
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.checks import check_isinstance, check_uint64
from llm_datadist_ray.engine_start import EngineStart
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_true
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.kv_cache import KvCacheManager, V1Runtime
from llm_datadist_ray.linking.changes import LinkChangeCallback, watch_links
from llm_datadist_ray.linking.clusters import LinkResult
from llm_datadist_ray.log import log
from llm_datadist_ray.membership import Membership
from llm_datadist_ray.options import EngineOptions, parse_listen_info
from llm_datadist_ray.types import LLMClusterInfo, LLMRole, RegisterMemStatus
from llm_datadist_ray.v2_runtime import V2Runtime


class LLMDataDist:
    """Pulls and pushes KV caches between clusters of processes that link with each other.

    ``role`` is a label in v2, and says what is allowed in v1 (spec api-types §3.1); ``cluster_id`` (uint64) must be
    unique among all that link together. Nothing is allocated before :meth:`init`, whose options choose between the two
    interfaces. TypeError, ValueError for wrong arguments.

    Any thread may call any method, except that nothing may run beside :meth:`finalize`. Before :meth:`init` every
    method is RuntimeError; a method of the other interface is LLMException(LLM_PARAM_INVALID), whatever its arguments.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The initialised instance of this process; at most one."""

    _lifecycle_lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._runtime: V1Runtime | V2Runtime | None = None

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def role(self) -> LLMRole:
        """As given, or as :meth:`switch_role` has set it."""
        return self._role

    # Lifecycle (spec §2)

    def init(self, options: dict[str, str], *, membership: Membership | None = None) -> None:
        """Reserves the memory pools and starts the engine, with a listener when ``llm.listenIpInfo`` is among the
        options (v1: when the role is PROMPT).

        Initialised already: returns silently. ``options`` is what :meth:`LLMConfig.generate_options` returns, and is
        not modified. Without a ``membership`` the secret and the data paths come from the environment
        (``LLM_DATADIST_SECRET``, ``LLM_DATADIST_INSECURE``, ``LDR_PATHS``).

        Raises TypeError, ValueError, LLMException: LLM_FAILED (another instance of this process is initialised; the
        port is in use), LLM_PARAM_INVALID, LLM_OUT_OF_MEMORY (a pool), LLM_FEATURE_NOT_ENABLED (a data path that this
        machine lacks). After a failure nothing stays behind, and another try is possible.
        """
        with LLMDataDist._lifecycle_lock:
            if self._runtime is not None:
                return
            live = LLMDataDist.llm_engine_instance
            raise_if_true(
                live is not None,
                f"cluster {live and live.cluster_id} is initialised in this process already: finalize it first",
                LLMStatusCode.LLM_FAILED,
            )
            parsed = EngineOptions.parse(options, role=self._role, cluster_id=self._cluster_id)
            start = EngineStart(parsed, membership or Membership.of_environment())
            self._runtime = V2Runtime(parsed, start) if parsed.cache_manager else V1Runtime(parsed, start)
            LLMDataDist.llm_engine_instance = self
        log.info("cluster %d is initialised: %s", self._cluster_id, parsed)

    def finalize(self) -> None:
        """Drops all links without asking peers, stops the listener, forgets all caches and frees the pools; our threads
        have ended when it returns. Not initialised: nothing.

        The same object may be initialised again; cache ids and communicator ids start at 1 again and earlier caches are
        dead.
        """
        with LLMDataDist._lifecycle_lock:
            if self._runtime is None:
                return
            runtime, self._runtime = self._runtime, None
            LLMDataDist.llm_engine_instance = None
            runtime.close()
        log.info("cluster %d is finalized", self._cluster_id)

    @property
    def cache_manager(self) -> CacheManager:
        """v2. After :meth:`finalize` its methods raise LLMException(LLM_FAILED)."""
        return self._v2("cache_manager").cache_manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """v1."""
        return self._v1("kv_cache_manager").kv_cache_manager

    # Links (spec §4, §5; v1: §8, §9)

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> LinkResult:
        """Connects to each cluster that listens, up to 16 in parallel, ``timeout`` ms for each.

        Returns the last failure's code, or success, and the code of each cluster in the order given; never raises for a
        failed link. Links that were made stay, whatever the others do. Both ends can use them, but with the hixl
        backend only this one. An empty list gives ``(LLM_PARAM_INVALID, [])``. In v1 the overall code and the roll-back
        follow spec §9. Raises TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for arguments.
        """
        runtime = self._initialised("link_clusters")
        links = runtime.links if isinstance(runtime, V2Runtime) else runtime
        return links.link_clusters(clusters, timeout)

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> LinkResult:
        """Drops links, both halves; with ``force`` (and always with the hixl backend) the local half only, without a
        word to the peer.

        Waits for the transfer that runs on a link, within ``timeout`` ms. No link is success. A peer that cannot be
        reached at its address is LLM_UNLINK_FAILED or LLM_TIMEOUT, and the link is kept. Result and errors as
        :meth:`link_clusters`.
        """
        runtime = self._initialised("unlink_clusters")
        check_isinstance("force", force, bool, allow_none=False)
        links = runtime.links if isinstance(runtime, V2Runtime) else runtime
        return links.unlink_clusters(clusters, timeout, force)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """v1, DECODER: one round trip over the link. LLMException: LLM_NOT_YET_LINK, LLM_LINK_BUSY,
        LLM_WAIT_PROCESS_TIMEOUT (spec §8)."""
        self._v1("check_link_status").check_link_status(remote_cluster_id)

    # Role (spec §6)

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Takes another role, and starts, moves or stops the listener as ``llm.listenIpInfo`` says (absent: stop; with
        the hixl backend it stays, and another address is LLM_FEATURE_NOT_ENABLED).

        Caches stay. TypeError, ValueError; LLMException: LLM_EXIST_LINK while a link to a live peer is there (hixl: not
        looked at), LLM_PARAM_INVALID, LLM_FAILED when it cannot listen (the old listener is gone then). v1 has rules of
        its own (spec §6.2).
        """
        runtime = self._initialised("switch_role")
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_isinstance("switch_options", switch_options, dict)
        listen_info = (switch_options or {}).get(keys.LISTEN_IP_INFO)
        check_isinstance(keys.LISTEN_IP_INFO, listen_info, str)
        if isinstance(runtime, V1Runtime):
            runtime.switch_role(role, listen_info)
        else:
            runtime.links.switch_listener(None if listen_info is None else parse_listen_info(listen_info))
        self._role = role
        log.info("cluster %d is %s now", self._cluster_id, role)

    # Collective links (spec §7)

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """v2. Starts to link with all other clusters of ``cluster_rank_info``, 2 to 4 with this one, each of which must
        call it with equivalent arguments; returns the communicator's id, 1 for the first.

        Returns at once; :meth:`query_register_mem_status` tells when transfers are possible. A rank listens at the
        first of ``device_ip``, ``host_ip``, ``server_id`` in ``rank_table`` that is an address of its host, port
        ``device_port``, else 16666 + ``device_id``; those of higher ranks connect to it, for ``link_total_time``
        seconds (0: ``HCCL_CONNECT_TIMEOUT``, else 120). Afterwards nothing can be registered remote accessible.

        TypeError, ValueError; LLMException: LLM_PARAM_INVALID, LLM_LINK_FAILED (rank table, port),
        LLM_FEATURE_NOT_ENABLED (hixl backend).
        """
        runtime = self._v2("link")
        comm_id = runtime.links.link(comm_name, cluster_rank_info, rank_table)
        runtime.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """v2. Ends a communicator, on this side: its exchange, if that still runs (which may take a few seconds), and
        after running transfers those of its links that no other communicator has.

        TypeError, ValueError; LLMException: LLM_NOT_YET_LINK for an unknown id, LLM_UNLINK_FAILED (the id is gone),
        LLM_FEATURE_NOT_ENABLED (hixl backend).
        """
        self._v2("unlink").links.unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """v2. PREPARING until all members are linked, then OK, or FAILED when the time is up, for ever; never blocks.

        TypeError, ValueError; LLMException: LLM_NOT_YET_LINK for an unknown id, LLM_FEATURE_NOT_ENABLED (hixl backend).
        """
        return self._v2("query_register_mem_status").links.query_register_mem_status(comm_id)

    # Ours: upstream has nothing like it

    def link_states(self) -> list[LinkInfo]:
        """v2. Every link, also broken ones and (hixl backend) those that peers made to us; ours, not upstream's."""
        return self._v2("link_states").engine.links()

    def on_link_change(self, callback: LinkChangeCallback) -> Callable[[], None]:
        """v2. Calls back with a :class:`~llm_datadist_ray.linking.changes.LinkChange` whenever a link comes up or is no
        longer usable, until the returned function is called or :meth:`finalize`; ours, not upstream's.

        In a thread of this object, one change after the other: a callback must not block, nor call :meth:`finalize`.
        What it raises is logged. With the hixl backend links that peers made to us are not reported.
        """
        return watch_links(self._v2("on_link_change").events, callback)

    @property
    def native_engine(self) -> NativeEngine:
        """v2. The engine under this object, for grants and low-level transfers; its owner is this object."""
        return self._v2("native_engine").engine

    @property
    def events(self) -> EventDispatcher:
        """v2. The one reader of the native engine's events. Its thread starts with the first subscriber."""
        return self._v2("events").events

    def _initialised(self, member: str) -> V1Runtime | V2Runtime:
        runtime = self._runtime
        if runtime is None:
            raise RuntimeError(f"{member}: LLMDataDist is not initialised, call init first")
        return runtime

    def _v1(self, member: str) -> V1Runtime:
        runtime = self._initialised(member)
        if not isinstance(runtime, V1Runtime):
            raise _other_interface(member, "v1", "with the cache manager")
        return runtime

    def _v2(self, member: str) -> V2Runtime:
        runtime = self._initialised(member)
        if not isinstance(runtime, V2Runtime):
            raise _other_interface(member, "v2", f"without {keys.ENABLE_CACHE_MANAGER} '1'")
        return runtime

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return role.native_name


def _other_interface(member: str, interface: str, how: str) -> LLMException:
    return LLMException(
        f"{member} belongs to the {interface} interface, and this object was initialised {how}",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )


def _shutdown_handler() -> None:
    """At interpreter exit: finalizes the live instance. Swallows LLMException, there is nobody left to tell."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        return
    try:
        instance.finalize()
    except LLMException:
        LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
