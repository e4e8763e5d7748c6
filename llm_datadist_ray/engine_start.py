"""How ``init`` makes a native engine from options: pools first, the listener last."""

from __future__ import annotations

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine, NativeError
from llm_datadist_ray.errors import LLMException
from llm_datadist_ray.log import log
from llm_datadist_ray.membership import Membership
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import Placement

_MAX_TOS = 255
_MAX_PRIORITY = 6  # more takes CAP_NET_ADMIN


class EngineStart:
    """Makes the engine of each device; ``index`` is the device's place in ``options.device_ids``."""

    def __init__(self, options: EngineOptions, membership: Membership) -> None:
        self._options = options
        self._membership = membership
        self._ip_tos = _as_far_as_it_fits(keys.RDMA_TRAFFIC_CLASS, options.rdma_traffic_class, _MAX_TOS)
        self._priority = _as_far_as_it_fits(keys.RDMA_SERVICE_LEVEL, options.rdma_service_level, _MAX_PRIORITY)

    def __call__(self, index: int = 0) -> NativeEngine:
        """v2: with its pools, and then listening, if the options say so. v1: with neither, which are for
        :class:`~llm_datadist_ray.kv_cache.devices.Devices` to add.

        LLMException: LLM_OUT_OF_MEMORY (a pool), LLM_FAILED (cannot listen), LLM_FEATURE_NOT_ENABLED, LLM_PARAM_INVALID
        (data paths). Nothing is left of an engine that failed.
        """
        engine = self._make()
        if not self._options.cache_manager:
            return engine
        try:
            self._create_pools(engine)
            if self._options.listen_addresses:
                engine.listen(*self._options.listen_addresses[index])
        except BaseException:
            engine.close()
            raise
        return engine

    def _make(self) -> NativeEngine:
        options, membership = self._options, self._membership
        return NativeEngine(
            cluster_id=options.cluster_id,
            remote_access=options.remote_accessible,
            paths=membership.paths,
            secret=membership.secret,
            insecure=membership.insecure,
            layout_digest=membership.layout_digest,
            layout_text=membership.layout_text,
            heartbeat_interval_s=membership.heartbeat_ms / 1000,
            liveness_budget_s=membership.budget_ms / 1000,
            allow_ptracer=membership.allow_ptracer,
            one_way=options.is_hixl,
            ip_tos=self._ip_tos,
            socket_priority=self._priority,
        )

    def _create_pools(self, engine: NativeEngine) -> None:
        pools = (
            (Placement.DEVICE, keys.MEM_POOL_CONFIG, self._options.mem_pool),
            (Placement.HOST, keys.HOST_MEM_POOL_CONFIG, self._options.host_mem_pool),
        )
        for placement, key, pool in pools:
            if pool is None:
                continue
            try:
                engine.create_pool(placement=placement, size_bytes=pool.memory_size, page_shift=pool.page_shift)
            except NativeError as error:
                raise LLMException(f"{key}: {error.args[0]}", status_code=error.status_code) from error


def _as_far_as_it_fits(key: str, value: int | None, high: int) -> int:
    """What an RDMA number becomes on TCP sockets: itself, or 0, which leaves it to the kernel."""
    if value is None or value <= high:
        return value or 0
    log.warning(
        "%s %d has no counterpart on TCP, where it may be up to %d; the kernel's default is used", key, value, high
    )
    return 0
