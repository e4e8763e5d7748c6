"""How a key names the peer's cache (spec api-cachemanager §2.2, §5.5, §5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_datadist_ray._native import KeyKind, NativeKey, RemoteBy
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex


def check_cache_key(key: CacheKey) -> None:
    """LLMException(LLM_PARAM_INVALID) unless exactly one of ``req_id`` and ``prefix_id`` is valid (spec §5.2)."""
    raise_if_false(key.is_pullable, f"exactly one of req_id and prefix_id should be valid, but got {key}")


def remote_fields(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> dict[str, Any]:
    """The fields of a native transfer that say which cache of which peer. TypeError for a None inside a blocks key."""
    fields: dict[str, Any] = {"cluster_id": key.cluster_id}
    if isinstance(key, CacheKeyByIdAndIndex):
        fields.update(remote_by=RemoteBy.CACHE_ID, remote_cache_id=key.cache_id, remote_batch_index=key.batch_index)
    elif isinstance(key, CacheKey):
        remote_by, key_id = (
            (RemoteBy.PREFIX_KEY, key.prefix_id) if key.is_prefix_key else (RemoteBy.REQUEST_KEY, key.req_id)
        )
        fields.update(remote_by=remote_by, remote_key_id=key_id, remote_model_id=key.model_id)
    else:
        fields.update(remote_by=RemoteBy.BLOCKS_KEY, remote_model_id=key.model_id)
    return fields


def push_target_fields(key: CacheKeyByIdAndIndex) -> dict[str, Any]:
    """As :func:`remote_fields` for ``push_cache``: id 0 stands for the request key (0, 0), and a negative id is no
    number that could be sent (spec §7)."""
    if key.cache_id < 0:
        raise TypeError(f"cache_id of the destination only support 0 and above, but got {key}")
    if key.cache_id == 0:
        return {
            "cluster_id": key.cluster_id,
            "remote_by": RemoteBy.REQUEST_KEY,
            "remote_key_id": 0,
            "remote_model_id": 0,
            "remote_batch_index": key.batch_index,
        }
    return remote_fields(key)


def native_keys(keys: Sequence[CacheKey]) -> list[NativeKey]:
    """Entry ``i`` is named by ``keys[i]``; placeholders name nothing."""
    return [
        NativeKey(KeyKind.PREFIX, key.prefix_id, key.model_id, index)
        if key.is_prefix_key
        else NativeKey(KeyKind.REQUEST, key.req_id, key.model_id, index)
        for index, key in enumerate(keys)
        if not key.is_placeholder
    ]
