"""transfer_cache_async of v1: what is checked at the call, and how one layer is pushed (spec api-kvcachemanager §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray._native import Move, NativeEngine
from llm_datadist_ray.cache.layerwise import (
    TENSORS_PER_LAYER,
    LayerTarget,
    LayerwiseJob,
    check_layers,
    pushes_to_addresses,
)
from llm_datadist_ray.checks import check_isinstance, check_list_uint64, check_uint64
from llm_datadist_ray.errors import raise_if_false, raise_if_true
from llm_datadist_ray.kv_cache.arguments import check_device_cache
from llm_datadist_ray.kv_cache.busy_links import BusyLinks
from llm_datadist_ray.kv_cache.errors import v1_codes
from llm_datadist_ray.types import KvCache, LayerSynchronizer, TransferConfig

_METHOD = "transfer_cache_async"


def check_layer_push(
    src_cache: Any,
    layer_synchronizer: Any,
    transfer_configs: Any,
    src_block_indices: Any,
    dst_block_indices: Any,
    dst_block_memory_size: Any,
) -> None:
    """The checks at the call, in the order of spec api-cachemanager §8.1. A ``src_layer_range`` that is None becomes
    the full range, in the caller's config."""
    check_device_cache("src_cache", src_cache)
    check_list_uint64("dst_block_indices", dst_block_indices)
    check_list_uint64("src_block_indices", src_block_indices)
    if dst_block_memory_size is not None:
        check_uint64("dst_block_memory_size", dst_block_memory_size)
    if src_block_indices:
        raise_if_true(dst_block_indices is None, f"{_METHOD}: transfer from blocks to cache is not supported")
        raise_if_false(
            len(src_block_indices) == len(dst_block_indices),
            f"src_block_indices has {len(src_block_indices)} blocks and dst_block_indices {len(dst_block_indices)}, "
            "not equally many",
        )
    else:
        raise_if_false(dst_block_indices is None, f"{_METHOD}: transfer from cache to blocks is not supported")
    check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
    check_isinstance("transfer_configs", transfer_configs, (list, tuple), TransferConfig, allow_none=False)
    raise_if_true(
        dst_block_memory_size and dst_block_indices is None, "dst_block_memory_size is given without dst_block_indices"
    )
    num_tensors = src_cache.cache_desc.num_tensors
    raise_if_false(
        num_tensors % TENSORS_PER_LAYER == 0,
        f"a layer has {TENSORS_PER_LAYER} tensors, but src_cache has {num_tensors}",
    )
    for index, config in enumerate(transfer_configs):
        check_layers(
            f"transfer_configs[{index}]",
            config,
            num_tensors // TENSORS_PER_LAYER,
            has_src_blocks=bool(src_block_indices),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPush:
    """What the configs of one call have in common. ``source`` is held so that it is not collected meanwhile;
    ``cache_id`` is 0 when it is not of this life."""

    engine: NativeEngine
    busy_links: BusyLinks
    source: KvCache
    cache_id: int
    is_blocks: bool
    src_blocks: Sequence[int]
    dst_blocks: Sequence[int]
    dst_block_bytes: int
    timeout_s: float

    def start(self, synchronizer: LayerSynchronizer, configs: Sequence[TransferConfig]) -> LayerwiseJob:
        num_layers = self.source.cache_desc.num_tensors // TENSORS_PER_LAYER
        targets = [self._target(config) for config in configs]
        job = LayerwiseJob(synchronizer, targets, num_layers, f"ldr-layers-{self.source.cache_id}")
        job.start()
        return job

    def _target(self, config: TransferConfig) -> LayerTarget:
        # The caller may change its config later.
        cluster_id, batch_index = config.dst_cluster_id, config.src_batch_index
        layers, addrs = config.src_layer_range, tuple(config.dst_addrs)
        assert layers is not None  # see check_layers

        def send(layer: int, position: int) -> None:
            with self.busy_links.use(cluster_id, f"{_METHOD}, layer {layer}"), v1_codes():
                fields = {"cluster_id": cluster_id, "local_cache_id": self.cache_id, **self._move(batch_index)}
                for transfer in pushes_to_addresses(addrs, layer, position, self.timeout_s, fields):
                    self.engine.transfer(transfer)

        return LayerTarget(cluster_id, layers, send)

    def _move(self, batch_index: int) -> dict[str, Any]:
        if self.dst_blocks:
            return {
                "move": Move.BLOCKS,
                "src_blocks": self.src_blocks,
                "dst_blocks": self.dst_blocks,
                "dst_block_bytes": self.dst_block_bytes,
            }
        if self.is_blocks:
            # Without lists a blocks cache is one entry of the size of a block: the first one.
            raise_if_true(batch_index, f"src_batch_index should be 0 for a blocks cache, not {batch_index}")
            return {"move": Move.BLOCKS, "src_blocks": (0,), "dst_blocks": (0,)}
        return {"move": Move.ENTRY, "local_batch_index": batch_index}
