"""What a layer-wise transfer is told: when a layer is ready, and where it goes (spec api-types §10.1 - §10.4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llm_datadist_ray.checked_field import CheckedField
from llm_datadist_ray.checks import (
    check_isinstance,
    check_layer_range,
    check_list_uint64,
    check_uint32,
    check_uint64,
    num_layers,
)
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types.cache_keys import BlocksCacheKey, CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """Implemented by the user to say when a layer's bytes are final (spec api-types §10.1)."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Blocks until the model has written layer ``layer_index`` into the source cache, then returns True.

        A falsy result aborts the transfer. Called in the transfer's own thread, at most once per layer, in increasing
        order. The library passes None (no limit) as time-out.
        """


def _check_dst_addrs(name: str, value: Any) -> None:
    check_isinstance(name, value, (list, tuple), allow_none=False)
    check_list_uint64(name, value)


class TransferConfig:
    """One destination of a two-sided layer-wise transfer, by address (spec api-types §10.3).

    ``dst_addrs`` has two addresses (K, V) per layer of ``src_layer_range`` (None: all layers). Every assignment is
    checked: TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for the range.
    """

    dst_cluster_id: CheckedField[int] = CheckedField(check_uint64)
    dst_addrs: CheckedField[Sequence[int]] = CheckedField(_check_dst_addrs)
    src_layer_range: CheckedField[range | None] = CheckedField(check_layer_range)
    src_batch_index: CheckedField[int] = CheckedField(check_uint32)

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self.dst_cluster_id}, dst_addrs={self.dst_addrs}, "
            f"src_layer_range={self.src_layer_range}, src_batch_index={self.src_batch_index})"
        )


def _check_cache_key(name: str, value: Any) -> None:
    check_isinstance(name, value, (BlocksCacheKey, CacheKeyByIdAndIndex))


class TransferWithCacheKeyConfig:
    """One destination of a remote-access layer-wise transfer, by cache key (spec api-types §10.4).

    Both ranges are needed although they default to None (TypeError), and equally long. ``src_batch_index`` is 0 with a
    :class:`BlocksCacheKey`. Otherwise LLMException(LLM_PARAM_INVALID). Later assignments are checked one by one: they
    accept None for key and ranges, compare no lengths and leave ``dst_cluster_id`` as it is.
    """

    cache_key: CheckedField[BlocksCacheKey | CacheKeyByIdAndIndex | None] = CheckedField(_check_cache_key)
    src_layer_range: CheckedField[range | None] = CheckedField(check_layer_range)
    dst_layer_range: CheckedField[range | None] = CheckedField(check_layer_range)

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        check_isinstance("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex), allow_none=False)
        check_layer_range("src_layer_range", src_layer_range, allow_none=False)
        check_layer_range("dst_layer_range", dst_layer_range, allow_none=False)
        assert src_layer_range is not None and dst_layer_range is not None  # checked above
        raise_if_false(
            num_layers(src_layer_range) == num_layers(dst_layer_range),
            f"src_layer_range {src_layer_range} and dst_layer_range {dst_layer_range} should have the same length",
        )
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        check_uint32("src_batch_index", value)
        raise_if_false(
            value == 0 or not isinstance(self.cache_key, BlocksCacheKey),
            f"src_batch_index should be 0 when cache_key is a BlocksCacheKey, but got {value}",
        )
        self._src_batch_index = value

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self.cache_key}, src_layer_range={self.src_layer_range}, "
            f"dst_layer_range={self.dst_layer_range}, src_batch_index={self.src_batch_index})"
        )
