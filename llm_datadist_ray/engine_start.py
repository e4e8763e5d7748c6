"""How ``init`` makes a native engine from options, for v1 and v2: pools first, the listener last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine, NativeError
from llm_datadist_ray.errors import LLMException
from llm_datadist_ray.log import log
from llm_datadist_ray.membership import Membership
from llm_datadist_ray.options import EngineOptions, ListenAddress
from llm_datadist_ray.types import Placement

_MAX_TOS = 255
_MAX_PRIORITY = 6  # more takes CAP_NET_ADMIN


class Pool(NamedTuple):
    """A memory pool that an engine is to have; ``source`` is what asked for it, for texts."""

    source: str
    placement: Placement
    size_bytes: int
    page_shift: int
    is_lazy: bool = False


class EngineStart:
    """Makes the engine of each device, without pools and not listening: see :func:`equip`. ``index`` is the device's
    place in ``options.device_ids``; all devices have the same engine."""

    def __init__(self, options: EngineOptions, membership: Membership) -> None:
        self._options = options
        self._membership = membership
        self._ip_tos = _as_far_as_it_fits(keys.RDMA_TRAFFIC_CLASS, options.rdma_traffic_class, _MAX_TOS)
        self._priority = _as_far_as_it_fits(keys.RDMA_SERVICE_LEVEL, options.rdma_service_level, _MAX_PRIORITY)

    def __call__(self, index: int) -> NativeEngine:
        """LLMException: LLM_FAILED, LLM_FEATURE_NOT_ENABLED, LLM_PARAM_INVALID (data paths)."""
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


def equip(engine: NativeEngine, pools: Sequence[Pool], listen_address: ListenAddress | None) -> None:
    """Gives the engine its pools and has it listen, in this order: nobody reaches it before it has both.

    LLMException: LLM_OUT_OF_MEMORY (a pool), LLM_FAILED (cannot listen). The engine is the caller's to close then.
    """
    for pool in pools:
        try:
            engine.create_pool(
                placement=pool.placement,
                size_bytes=pool.size_bytes,
                page_shift=pool.page_shift,
                is_lazy=pool.is_lazy,
            )
        except NativeError as error:
            raise LLMException(f"{pool.source}: {error.args[0]}", status_code=error.status_code) from error
    if listen_address is not None:
        engine.listen(*listen_address)


def _as_far_as_it_fits(key: str, value: int | None, high: int) -> int:
    """What an RDMA number becomes on TCP sockets: itself, or 0, which leaves it to the kernel."""
    if value is None or value <= high:
        return value or 0
    log.warning(
        "%s %d has no counterpart on TCP, where it may be up to %d; the kernel's default is used", key, value, high
    )
    return 0
