"""CacheManager: the caches of an engine, and what moves between them and those of peers (spec api-cachemanager)."""

from __future__ import annotations

from collections.abc import Collection

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cache.layer_pushes import LayerPushes
from llm_datadist_ray.cache.local_copies import LocalCopies
from llm_datadist_ray.cache.pools import Pools
from llm_datadist_ray.cache.pulls import Pulls
from llm_datadist_ray.cache.pushes import Pushes
from llm_datadist_ray.cache.registration import Registration
from llm_datadist_ray.cache.remap import Remap
from llm_datadist_ray.cache.remote import check_cache_key
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import CacheKey


class CacheManager(Registration, Pools, Pulls, Pushes, LayerPushes, LocalCopies, Remap):
    """The caches of one initialised :class:`LLMDataDist`, which makes it; see ``LLMDataDist.cache_manager``.

    Any thread may call. Transfers block the caller, at most ``sync_kv_timeout`` (a push: for each of its layers, as one
    sum) from the moment when the link is theirs; those on one link queue up. Each is one native call however many
    pieces it has. The ``*_async`` forms of pulls and pushes return a :class:`~llm_datadist_ray.cache.task.TransferTask`
    instead. Failures are LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_TIMEOUT (link
    again), LLM_OUT_OF_MEMORY, LLM_FEATURE_NOT_ENABLED, LLM_FAILED (also after ``finalize``); the text says which peer,
    which step, how far (spec §11).
    """

    def __init__(
        self,
        engine: NativeEngine,
        options: EngineOptions,
        *,
        events: EventDispatcher,
        not_ready: Collection[int] = (),
    ) -> None:
        """``events`` reads the queue of ``engine``. Transfers with a cluster that is in ``not_ready``, looked at anew
        each time, are LLM_NOT_YET_LINK: its ``link()`` has not exchanged everything yet."""
        super().__init__(engine, options, events, not_ready)

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """LLMException(LLM_PARAM_INVALID) unless exactly one of ``req_id`` and ``prefix_id`` is valid (spec §5.2)."""
        check_cache_key(cache_key)
