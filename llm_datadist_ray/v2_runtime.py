"""What an :class:`LLMDataDist` has while it is initialised for v2: an engine, its events, links and caches."""

from __future__ import annotations

from collections.abc import Callable

from llm_datadist_ray import option_keys as keys
from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.engine_start import Pool, equip
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.comm import CommLinks
from llm_datadist_ray.linking.hixl import HixlLinks
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import Placement

_CLOSE_TIMEOUT_S = 5.0


class V2Runtime:
    """``make_engine`` takes the index of the device, of which v2 has one; what it returns has no pools and does not
    listen yet. Errors are those of ``make_engine`` and :func:`~llm_datadist_ray.engine_start.equip`; nothing is left of
    an engine that failed."""

    def __init__(self, options: EngineOptions, make_engine: Callable[[int], NativeEngine]) -> None:
        self.engine = make_engine(0)
        try:
            equip(self.engine, _pools(options), options.listen_addresses[0] if options.listen_addresses else None)
        except BaseException:
            self.engine.close()
            raise
        self.events = EventDispatcher(self.engine)
        self.links: CommLinks | HixlLinks = (
            HixlLinks(self.engine, options) if options.is_hixl else CommLinks(self.engine, options, self.events)
        )
        self.cache_manager = CacheManager(self.engine, options, events=self.events, not_ready=self.links.not_ready)

    def close(self) -> None:
        """Closes the engine, which ends what other threads do with it, and waits for our own threads."""
        self.links.stop()
        self.engine.close()
        self.links.join()
        self.events.join(_CLOSE_TIMEOUT_S)


def _pools(options: EngineOptions) -> list[Pool]:
    asked = (
        (keys.MEM_POOL_CONFIG, Placement.DEVICE, options.mem_pool),
        (keys.HOST_MEM_POOL_CONFIG, Placement.HOST, options.host_mem_pool),
    )
    return [
        Pool(key, placement, pool.memory_size, pool.page_shift) for key, placement, pool in asked if pool is not None
    ]
