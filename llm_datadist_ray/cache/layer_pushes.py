"""Layer-wise pushes in the background, beside the model that still writes (spec api-cachemanager §8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray._native import BlockList, Direction, Move, TensorSpan, Transfer
from llm_datadist_ray.cache.arguments import own_block_indices
from llm_datadist_ray.cache.layerwise import (
    TENSORS_PER_LAYER,
    LayerTarget,
    LayerwiseJob,
    check_layers,
    pushes_to_addresses,
)
from llm_datadist_ray.cache.operation import ManagerPart
from llm_datadist_ray.cache.remote import push_target_fields
from llm_datadist_ray.checks import check_isinstance, check_uint64
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import (
    Cache,
    CacheTask,
    LayerSynchronizer,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)


@dataclass(frozen=True)
class LayerBlocks:
    """The blocks that a layer-wise push takes and fills, the same for each layer. ``dst_block_bytes`` is what the
    caller takes for a destination block, 0 when that was not said. The lists are the job's own: the caller may change
    his as soon as the call has returned."""

    src: BlockList
    dst: BlockList
    dst_block_bytes: int

    @property
    def move(self) -> Move:
        if len(self.dst) == 0:
            return Move.ENTRY
        return Move.BLOCKS if len(self.src) else Move.ENTRY_TO_BLOCKS

    @classmethod
    def checked(cls, src_blocks: Any, dst_blocks: Any, dst_block_bytes: Any) -> LayerBlocks:
        """The rows of spec §8.1 from the lists to ``dst_block_memory_size``. TypeError, ValueError, LLMException."""
        dst = own_block_indices("dst_block_indices", dst_blocks)
        src = own_block_indices("src_block_indices", src_blocks)
        if dst_block_bytes is not None:
            check_uint64("dst_block_memory_size", dst_block_bytes)
        raise_if_false(
            len(src) == 0 or len(src) == len(dst),
            f"{len(src)} src_block_indices need as many dst_block_indices, but got {len(dst)}",
        )
        raise_if_false(
            len(dst) == 0 or len(src) > 0 or dst_block_bytes is not None,
            "dst_block_indices without src_block_indices need dst_block_memory_size",
        )
        return cls(src, dst, dst_block_bytes or 0)

    def check_dst_block_bytes(self) -> None:
        """LLMException(LLM_PARAM_INVALID), of a layer: to the native core 0 says that nothing is known about the
        destination's blocks; here it is their size."""
        raise_if_false(
            self.move != Move.ENTRY_TO_BLOCKS or self.dst_block_bytes,
            "dst_block_memory_size should be greater than zero, but got 0",
        )


class LayerPushes(ManagerPart):
    """Part of :class:`CacheManager`."""

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig] | Sequence[TransferWithCacheKeyConfig],
        src_block_indices: BlockList | None = None,
        dst_block_indices: BlockList | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Pushes each layer (two tensors, K and V) to the destinations as soon as the synchronizer says it is ready.

        Destinations are :class:`TransferConfig` in two-sided mode (addresses inside caches of the peer) and
        :class:`TransferWithCacheKeyConfig` in remote-access mode. Without block lists whole entries go; with
        destination blocks only, the entry is cut into pieces of ``dst_block_memory_size`` bytes; with both, source
        block ``k`` goes to destination block ``k`` (spec §8.3). Returns at once; a thread of its own does the work,
        and a synchronizer that blocks for ever keeps it, and the process, alive. Each layer may take
        ``sync_kv_timeout`` to each destination.

        TypeError, ValueError, LLMException(LLM_PARAM_INVALID) for arguments; the task has the rest.
        """
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        desc = src_cache.cache_desc
        raise_if_false(
            desc.placement != Placement.HOST,
            f"transfer_cache_async needs a device cache, but {src_cache} is on the host",
        )
        blocks = LayerBlocks.checked(src_block_indices, dst_block_indices, dst_block_memory_size)
        check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
        config_class = TransferWithCacheKeyConfig if self._is_remote_access else TransferConfig
        check_isinstance("transfer_configs", transfer_configs, (list, tuple), config_class, allow_none=False)
        raise_if_false(
            blocks.dst_block_bytes == 0 or len(blocks.dst) > 0, "dst_block_memory_size needs dst_block_indices"
        )
        raise_if_false(
            desc.num_tensors % TENSORS_PER_LAYER == 0,
            f"layers have {TENSORS_PER_LAYER} tensors, but {src_cache} has {desc.num_tensors}",
        )
        num_layers = desc.num_tensors // TENSORS_PER_LAYER
        configs: Sequence[TransferConfig | TransferWithCacheKeyConfig] = transfer_configs
        for index, config in enumerate(configs):
            check_layers(f"transfer_configs[{index}]", config, num_layers, has_src_blocks=len(blocks.src) > 0)
        targets = [self._layer_target(config, src_cache.id_for(self), blocks) for config in configs]
        self._check_open()
        job = LayerwiseJob(layer_synchronizer, targets, num_layers, f"ldr-layers-of-cache-{src_cache.cache_id}")
        job.start()
        return CacheTask(job)

    def _layer_target(self, config: Any, cache_id: int, blocks: LayerBlocks) -> LayerTarget:
        """What is in the config now: the caller may use it again for something else."""
        common = {
            "move": blocks.move,
            "local_cache_id": cache_id,
            "local_batch_index": config.src_batch_index,
            "src_blocks": blocks.src,
            "dst_blocks": blocks.dst,
            "dst_block_bytes": blocks.dst_block_bytes,
        }
        if isinstance(config, TransferConfig):
            addresses, fields = tuple(config.dst_addrs), {**common, "cluster_id": config.dst_cluster_id}

            def send(layer: int, q: int) -> None:
                blocks.check_dst_block_bytes()
                for transfer in pushes_to_addresses(addresses, layer, q, self._timeout_s, fields):
                    self._run((transfer, None))

        else:
            dst_layers, target = config.dst_layer_range, push_target_fields(config.cache_key)

            def send(layer: int, q: int) -> None:
                blocks.check_dst_block_bytes()
                transfer = Transfer(
                    direction=Direction.PUSH,
                    local_tensors=_tensors_of(layer),
                    remote_tensors=_tensors_of(dst_layers[q]),
                    timeout_s=self._timeout_s,
                    **target,
                    **common,
                )
                self._run((transfer, None))

        return LayerTarget(config.dst_cluster_id, config.src_layer_range, send)


def _tensors_of(layer: int) -> TensorSpan:
    return TensorSpan(layer * TENSORS_PER_LAYER, TENSORS_PER_LAYER)
