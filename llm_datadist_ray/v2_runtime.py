"""What an :class:`LLMDataDist` has while it is initialised for v2: an engine, its events, links and caches."""

from __future__ import annotations

from collections.abc import Callable

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.comm import CommLinks
from llm_datadist_ray.linking.hixl import HixlLinks
from llm_datadist_ray.options import EngineOptions

_CLOSE_TIMEOUT_S = 5.0


class V2Runtime:
    """``make_engine`` takes the index of the device, of which v2 has one. Errors are those of ``make_engine``."""

    def __init__(self, options: EngineOptions, make_engine: Callable[[int], NativeEngine]) -> None:
        self.engine = make_engine(0)
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
