"""LLMDataDist: one data-distribution engine per process, its life, links and role (spec api-datadist)."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.cache.not_enabled import not_enabled
from llm_datadist_ray.checks import check_isinstance, check_uint64
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_true
from llm_datadist_ray.linking import LinkResult, check_clusters, link_all, unlink_all
from llm_datadist_ray.log import log
from llm_datadist_ray.membership import Membership
from llm_datadist_ray.options import EngineOptions, parse_listen_info
from llm_datadist_ray.types import LLMClusterInfo, LLMRole, RegisterMemStatus

_ROLE_NAMES = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}


class LLMDataDist:
    """Pulls and pushes KV caches between clusters of processes that link with each other.

    ``role`` is a label (spec api-types §3.1); ``cluster_id`` (uint64) must be unique among all that link together.
    Nothing is allocated before :meth:`init`. TypeError, ValueError for wrong arguments.

    Any thread may call any method, except that nothing may run beside :meth:`finalize`. Before :meth:`init` every
    method is RuntimeError.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The initialised instance of this process; at most one."""

    _lifecycle_lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._options: EngineOptions | None = None
        self._engine: NativeEngine | None = None
        self._cache_manager: CacheManager | None = None

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def role(self) -> LLMRole:
        """As given, or as :meth:`switch_role` has set it."""
        return self._role

    # Lifecycle (spec §2)

    def init(self, options: dict[str, str], *, membership: Membership | None = None) -> None:
        """Starts the engine, and its listener when ``llm.listenIpInfo`` is among the options.

        Initialised already: returns silently. ``options`` is what :meth:`LLMConfig.generate_options` returns, and is
        not modified. Without a ``membership`` the secret and the data paths come from the environment
        (``LLM_DATADIST_SECRET``, ``LLM_DATADIST_INSECURE``, ``LDR_PATHS``).

        Raises TypeError, ValueError, LLMException: LLM_FAILED (another instance of this process is initialised; the
        port is in use), LLM_PARAM_INVALID, LLM_FEATURE_NOT_ENABLED. After a failure another try is possible.
        """
        with LLMDataDist._lifecycle_lock:
            if self._engine is not None:
                return
            live = LLMDataDist.llm_engine_instance
            raise_if_true(
                live is not None,
                f"cluster {live and live.cluster_id} is initialised in this process already: finalize it first",
                LLMStatusCode.LLM_FAILED,
            )
            parsed = EngineOptions.parse(options, role=self._role, cluster_id=self._cluster_id)
            _check_supported(parsed)
            self._engine = _start_engine(parsed, membership)
            self._options = parsed
            self._cache_manager = CacheManager(self._engine, parsed)
            LLMDataDist.llm_engine_instance = self
        log.info("cluster %d is initialised: %s", self._cluster_id, parsed)

    def finalize(self) -> None:
        """Drops all links without asking peers, stops the listener, forgets all caches. Not initialised: nothing.

        The same object may be initialised again; cache ids start at 1 again and earlier caches are dead.
        """
        with LLMDataDist._lifecycle_lock:
            if self._engine is None:
                return
            engine, self._engine, self._options, self._cache_manager = self._engine, None, None, None
            LLMDataDist.llm_engine_instance = None
            engine.close()
        log.info("cluster %d is finalized", self._cluster_id)

    @property
    def cache_manager(self) -> CacheManager:
        """The v2 manager; after :meth:`finalize` its methods raise LLMException(LLM_FAILED)."""
        if self._cache_manager is None:
            raise _not_initialised("cache_manager")
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> NoReturn:
        """LLMException(LLM_PARAM_INVALID): belongs to v1, and only v2 can be initialised in this version."""
        self._initialised("kv_cache_manager")
        raise _v1_only("kv_cache_manager")

    @property
    def native_engine(self) -> NativeEngine:
        """The engine under this object, for grants, events and link states; its owner is this object."""
        return self._initialised("native_engine")[0]

    # Links (spec §4, §5)

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> LinkResult:
        """Connects to each cluster that listens, up to 16 in parallel, ``timeout`` ms for each.

        Returns the last failure's code, or success, and the code of each cluster in the order given; never raises for a
        failed link. Links that were made stay, whatever the others do, and both ends can use them. An empty list gives
        ``(LLM_PARAM_INVALID, [])``. Raises TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for arguments.
        """
        engine, options = self._initialised("link_clusters")
        check_clusters(clusters, timeout, needs_local_ip=options.needs_local_ip)
        return link_all(engine, clusters, timeout, derives_local_resources=_derives_local_resources(options))

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> LinkResult:
        """Drops the links; result as :meth:`link_clusters`.

        ``force=False`` asks the peer at its one remote address to drop its half first: when it cannot be reached, the
        link is kept (LLM_UNLINK_FAILED, LLM_TIMEOUT). ``force=True`` drops the local half only. A cluster that is not
        linked is success. Waits for a transfer that runs on the link.
        """
        engine, _ = self._initialised("unlink_clusters")
        check_clusters(clusters, timeout, needs_local_ip=False)
        check_isinstance("force", force, bool, allow_none=False)
        return unlink_all(engine, clusters, timeout, force=force)

    # Role (spec §6.1)

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Takes another role, and starts, moves or stops the listener as ``llm.listenIpInfo`` says (absent: stop).

        Caches stay. TypeError, ValueError; LLMException: LLM_EXIST_LINK while a link to a live peer is there,
        LLM_PARAM_INVALID, LLM_FAILED when it cannot listen (the old listener is gone then).
        """
        engine, _ = self._initialised("switch_role")
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_isinstance("switch_options", switch_options, dict)
        listen_info = (switch_options or {}).get(keys.LISTEN_IP_INFO)
        check_isinstance(keys.LISTEN_IP_INFO, listen_info, str)
        address = None if listen_info is None else parse_listen_info(listen_info)
        linked = [link.cluster_id for link in engine.links() if link.is_ready]
        raise_if_true(linked, f"switch_role: clusters {linked} are linked, unlink them first", _EXIST_LINK)
        if address is None:
            engine.listen(None)
        else:
            engine.listen(address[0], address[1])
        self._role = role
        log.info("cluster %d is %s now, listening: %s", self._cluster_id, role, address)

    # Collective links (spec §7) and v1 (spec §8)

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """LLMException(LLM_FEATURE_NOT_ENABLED): collective links are not supported by this version."""
        self._initialised("link")
        raise not_enabled("link: collective links (use link_clusters) are")

    def unlink(self, comm_id: int) -> None:
        """LLMException(LLM_FEATURE_NOT_ENABLED), as :meth:`link`."""
        self._initialised("unlink")
        raise not_enabled("unlink: collective links (use unlink_clusters) are")

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """LLMException(LLM_FEATURE_NOT_ENABLED), as :meth:`link`."""
        self._initialised("query_register_mem_status")
        raise not_enabled("query_register_mem_status: collective links are")

    def check_link_status(self, remote_cluster_id: int) -> None:
        """LLMException(LLM_PARAM_INVALID): belongs to v1, and only v2 can be initialised in this version."""
        self._initialised("check_link_status")
        raise _v1_only("check_link_status")

    def _initialised(self, method: str) -> tuple[NativeEngine, EngineOptions]:
        engine, options = self._engine, self._options
        if engine is None or options is None:
            raise _not_initialised(method)
        return engine, options

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return _ROLE_NAMES[role]


_EXIST_LINK = LLMStatusCode.LLM_EXIST_LINK


def _check_supported(options: EngineOptions) -> None:
    """LLMException(LLM_FEATURE_NOT_ENABLED) that names what this version does not have."""
    if not options.cache_manager:
        raise not_enabled(
            f"the v1 interface (KvCacheManager, {keys.ENABLE_CACHE_MANAGER} is not '1': set enable_cache_manager) is"
        )
    if options.transfer_backend is not None:
        raise not_enabled(f"transfer backend {options.transfer_backend!r} ({keys.TRANSFER_BACKEND}) is")
    for key, pool in ((keys.MEM_POOL_CONFIG, options.mem_pool), (keys.HOST_MEM_POOL_CONFIG, options.host_mem_pool)):
        if pool is not None:
            raise not_enabled(f"memory pools ({key}) are")


def _start_engine(options: EngineOptions, membership: Membership | None) -> NativeEngine:
    insecure = False
    if membership is None:
        insecure = os.environ.get("LLM_DATADIST_INSECURE") == "1"
        secret = os.environ.get("LLM_DATADIST_SECRET", "").encode() or None
        membership = Membership(secret, layout_digest=0, layout_text="", paths=os.environ.get("LDR_PATHS"))
    return NativeEngine(
        cluster_id=options.cluster_id,
        remote_access=options.remote_accessible,
        listen_ip=options.listen_ip,
        listen_port=options.listen_port or 0,
        paths=membership.paths,
        secret=membership.secret,
        insecure=insecure,
        layout_digest=membership.layout_digest,
        layout_text=membership.layout_text,
        heartbeat_interval_s=membership.heartbeat_ms / 1000,
        liveness_budget_s=membership.budget_ms / 1000,
        allow_ptracer=membership.allow_ptracer,
    )


def _derives_local_resources(options: EngineOptions) -> bool:
    """Whether upstream would derive its link resources from the one local IP entry, which must be there then: not with
    resources given, and not when ``""`` was given and the listen address has served for it (spec api-config §3.4)."""
    if options.local_comm_res:
        return False
    return options.local_comm_res is None or not options.listen_addresses


def _not_initialised(method: str) -> RuntimeError:
    return RuntimeError(f"{method}: LLMDataDist is not initialised, call init first")


def _v1_only(name: str) -> LLMException:
    return LLMException(
        f"{name} belongs to the v1 interface, this one was initialised with the cache manager",
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
