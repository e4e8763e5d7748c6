"""One transfer, described: any number of pieces, moved by one native call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist_ray._native._ldr import ffi
from llm_datadist_ray._native.blocks import BlockList, fill_block_list
from llm_datadist_ray._native.clock import seconds, timeout_ns
from llm_datadist_ray._native.paths import Path

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


class Direction(IntEnum):
    PULL = 0
    PUSH = 1


class RemoteBy(IntEnum):
    """How the peer's cache is named, and by which fields of a :class:`Transfer`."""

    CACHE_ID = 0
    """``remote_cache_id``, ``remote_batch_index``"""
    REQUEST_KEY = 1
    """``remote_key_id``, ``remote_model_id``"""
    PREFIX_KEY = 2
    """``remote_key_id``, ``remote_model_id``"""
    BLOCKS_KEY = 3
    """``remote_model_id``"""
    OPEN_GRANT = 4
    """``remote_key_id`` is the open id; the granted blocks, in order, are the source blocks"""


class Move(IntEnum):
    ENTRY = 0
    """contiguous to contiguous, one batch entry"""
    BLOCKS = 1
    """blocks to blocks, ``src_blocks[k]`` to ``dst_blocks[k]``"""
    ENTRY_TO_BLOCKS = 2
    """one contiguous entry, cut into the blocks ``dst_blocks[k]``"""


class TensorSpan(NamedTuple):
    """Consecutive tensors of a cache; a length of 0 means all of them."""

    first: int
    length: int


ALL_TENSORS = TensorSpan(0, 0)
WHOLE_ENTRY = -1


@dataclass(slots=True)
class Transfer:
    """The arguments of :meth:`NativeEngine.transfer` and ``submit``; field by field what ldr_transfer_params_t says.

    ``src_blocks`` is empty for ENTRY moves; with OPEN_GRANT empty means all granted blocks, else positions in the
    grant. ``timeout_s`` counts from the moment when the link is ours; None is no limit.
    """

    direction: Direction
    cluster_id: int
    local_cache_id: int
    move: Move
    remote_by: RemoteBy
    remote_cache_id: int = 0
    remote_batch_index: int = 0
    remote_key_id: int = 0
    remote_model_id: int = 0
    local_batch_index: int = 0
    size_bytes: int = WHOLE_ENTRY
    local_tensors: TensorSpan = ALL_TENSORS
    remote_tensors: TensorSpan = ALL_TENSORS
    src_blocks: BlockList = ()
    dst_blocks: BlockList = ()
    timeout_s: float | None = None


class TransferResult(NamedTuple):
    num_bytes: int
    latency_s: float
    path: Path


_PARAMS_BYTES = ffi.sizeof("ldr_transfer_params_t")


def transfer_to_c(transfer: Transfer) -> tuple[CData, Any]:
    """The parameter struct, and what must be kept alive while it is used. TypeError for a block list of a wrong type
    and for a number outside its field."""
    params = ffi.new("ldr_transfer_params_t *")
    try:
        _fill(params, transfer)
    except OverflowError as error:
        raise TypeError(f"the ids and indices of a transfer only support numbers that fit: {error}") from error
    keep_alive = (
        fill_block_list(params.src_blocks, "src_blocks", transfer.src_blocks),
        fill_block_list(params.dst_blocks, "dst_blocks", transfer.dst_blocks),
    )
    return params, keep_alive


def _fill(params: CData, transfer: Transfer) -> None:
    params.struct_size = _PARAMS_BYTES
    params.direction = transfer.direction
    params.cluster_id = transfer.cluster_id
    params.remote_by = transfer.remote_by
    params.remote_batch_index = transfer.remote_batch_index
    params.remote_cache_id = transfer.remote_cache_id
    params.remote_key_id = transfer.remote_key_id
    params.remote_model_id = transfer.remote_model_id
    params.local_cache_id = transfer.local_cache_id
    params.local_batch_index = transfer.local_batch_index
    params.move = transfer.move
    params.size_bytes = transfer.size_bytes
    params.local_first_tensor, params.local_num_tensors = transfer.local_tensors
    params.remote_first_tensor, params.remote_num_tensors = transfer.remote_tensors
    params.timeout_ns = timeout_ns(transfer.timeout_s)


def result_from_c(result: CData) -> TransferResult:
    return TransferResult(result.bytes, seconds(result.latency_ns), Path(result.path))
