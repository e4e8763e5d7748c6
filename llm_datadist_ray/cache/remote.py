"""How a key names the peer's cache, and an own one (spec api-cachemanager §2.2, §5.5, §5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_datadist_ray._native import KeyKind, NativeKey, RemoteBy
from llm_datadist_ray.errors import param_invalid
from llm_datadist_ray.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

RemoteFields = dict[str, Any]
"""The fields of a native transfer that say which cache of which peer."""

# One look-up each at import: as attributes of their class they cost more than the call that uses them.
_BY_CACHE_ID, _BY_REQUEST_KEY = RemoteBy.CACHE_ID, RemoteBy.REQUEST_KEY
_BY_PREFIX_KEY, _BY_BLOCKS_KEY = RemoteBy.PREFIX_KEY, RemoteBy.BLOCKS_KEY


def check_cache_key(key: CacheKey) -> None:
    """LLMException(LLM_PARAM_INVALID) unless exactly one of ``req_id`` and ``prefix_id`` is valid (spec §5.2)."""
    if not key.is_pullable:
        raise param_invalid(f"exactly one of req_id and prefix_id should be valid, but got {key}")


def remote_fields(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> RemoteFields:
    """TypeError for a None inside a blocks key, when the transfer is made of it."""
    if isinstance(key, BlocksCacheKey):
        return {"cluster_id": key.cluster_id, "remote_by": _BY_BLOCKS_KEY, "remote_model_id": key.model_id}
    if isinstance(key, CacheKey):
        remote_by, key_id = (_BY_PREFIX_KEY, key.prefix_id) if key.is_prefix_key else (_BY_REQUEST_KEY, key.req_id)
        return {
            "cluster_id": key.cluster_id,
            "remote_by": remote_by,
            "remote_key_id": key_id,
            "remote_model_id": key.model_id,
        }
    return {
        "cluster_id": key.cluster_id,
        "remote_by": _BY_CACHE_ID,
        "remote_cache_id": key.cache_id,
        "remote_batch_index": key.batch_index,
    }


def pull_source_fields(
    key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, *, is_remote_access: bool
) -> RemoteFields:
    """As :func:`remote_fields` for pulls: in remote-access mode a cache id of 0 or less stands for the request key
    (INVALID, 0), which is the one that the blocks cache of model 0 is filed under (spec §2.2, §5.7)."""
    if is_remote_access and isinstance(key, CacheKeyByIdAndIndex) and key.cache_id <= 0:
        return {"cluster_id": key.cluster_id, "remote_by": _BY_BLOCKS_KEY, "remote_model_id": 0}
    return remote_fields(key)


def push_target_fields(key: CacheKeyByIdAndIndex | BlocksCacheKey) -> RemoteFields:
    """As :func:`remote_fields` for pushes: cache id 0 stands for the request key (0, 0), and a negative one is no
    number that could be sent (spec §7)."""
    if isinstance(key, BlocksCacheKey) or key.cache_id > 0:
        return remote_fields(key)
    if key.cache_id < 0:
        raise TypeError(f"cache_id of the destination only support 0 and above, but got {key}")
    return {
        "cluster_id": key.cluster_id,
        "remote_by": _BY_REQUEST_KEY,
        "remote_key_id": 0,
        "remote_model_id": 0,
        "remote_batch_index": key.batch_index,
    }


def native_key(key: CacheKey, batch_index: int = 0) -> NativeKey:
    if key.is_prefix_key:
        return NativeKey(KeyKind.PREFIX, key.prefix_id, key.model_id, batch_index)
    return NativeKey(KeyKind.REQUEST, key.req_id, key.model_id, batch_index)


def native_keys(keys: Sequence[CacheKey]) -> list[NativeKey]:
    """Entry ``i`` is named by ``keys[i]``; placeholders name nothing."""
    return [native_key(key, index) for index, key in enumerate(keys) if not key.is_placeholder]


def native_blocks_keys(key: BlocksCacheKey | None) -> list[NativeKey]:
    return [] if key is None else [NativeKey(KeyKind.BLOCKS, 0, key.model_id)]
