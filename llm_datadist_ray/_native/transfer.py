"""One transfer, described: any number of pieces, moved by one native call."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.blocks import BlockList, blocks_to_c
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
    ADDRESS = 5
    """``remote_key_id`` is an address in the peer's memory, inside a cache of its; pushes of two-sided engines"""


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


_new = ffi.new
_new_object = object.__new__
_PARAMS = ffi.typeof("ldr_transfer_params_t *")
_defaults_p = ffi.new("ldr_transfer_params_t *")
_defaults_p.struct_size = ffi.sizeof("ldr_transfer_params_t")
_defaults_p.size_bytes = WHOLE_ENTRY
_DEFAULTS = _defaults_p[0]
_KEEP_KEY = lib.LDR_TRANSFER_KEEP_KEY
_timeout_ns = lru_cache(maxsize=64)(timeout_ns)  # a program has few time limits
_PATHS = {int(path): path for path in Path}


class Transfer:
    """The arguments of :meth:`NativeEngine.transfer` and ``submit``: a filled ``ldr_transfer_params_t``.

    ``src_blocks`` is empty for ENTRY moves; with OPEN_GRANT empty means all granted blocks, else positions in the
    grant. Block lists of Python ints are copied, arrays are not: they must stay as they are until the call. Of
    ``timeout_s``, which counts from the moment when the link is ours, None is no limit. The offsets are of pulled
    entries, inside the entry of each side; ``dst_block_bytes`` is what a pusher takes for a destination block (0: not
    given); with ``keep_key`` a pull does not consume the key that named its source.

    TypeError for a block list of a wrong type and for a number outside its field.
    """

    __slots__ = ("_dst", "_src", "params")

    def __init__(
        self,
        direction: Direction,
        cluster_id: int,
        local_cache_id: int,
        move: Move,
        remote_by: RemoteBy,
        remote_cache_id: int = 0,
        remote_batch_index: int = 0,
        remote_key_id: int = 0,
        remote_model_id: int = 0,
        local_batch_index: int = 0,
        size_bytes: int = WHOLE_ENTRY,
        local_tensors: TensorSpan = ALL_TENSORS,
        remote_tensors: TensorSpan = ALL_TENSORS,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        timeout_s: float | None = None,
        local_offset_bytes: int = 0,
        remote_offset_bytes: int = 0,
        dst_block_bytes: int = 0,
        keep_key: bool = False,
    ) -> None:
        self.params = params = _new(_PARAMS, _DEFAULTS)
        # A tenth of a microsecond goes into each field that is set: those that are right already are left alone.
        try:
            if direction:
                params.direction = direction
            params.cluster_id = cluster_id
            params.remote_by = remote_by
            if remote_cache_id:
                params.remote_cache_id = remote_cache_id
            if remote_key_id:
                params.remote_key_id = remote_key_id
            if remote_model_id != 0:  # None is not, and a TypeError
                params.remote_model_id = remote_model_id
            if remote_batch_index:
                params.remote_batch_index = remote_batch_index
            params.local_cache_id = local_cache_id
            if local_batch_index:
                params.local_batch_index = local_batch_index
            if move:
                params.move = move
            if size_bytes != WHOLE_ENTRY:
                params.size_bytes = size_bytes
            if local_tensors is not ALL_TENSORS:
                params.local_first_tensor, params.local_num_tensors = local_tensors
            if remote_tensors is not ALL_TENSORS:
                params.remote_first_tensor, params.remote_num_tensors = remote_tensors
            params.timeout_ns = _timeout_ns(timeout_s)
            if local_offset_bytes or remote_offset_bytes:
                params.local_offset_bytes = local_offset_bytes
                params.remote_offset_bytes = remote_offset_bytes
            if dst_block_bytes:
                params.dst_block_bytes = dst_block_bytes
            if keep_key:
                params.flags = _KEEP_KEY
        except OverflowError as error:
            raise TypeError(f"the ids and indices of a transfer only support numbers that fit: {error}") from error
        self._set_blocks(src_blocks, dst_blocks)

    def with_blocks(self, src_blocks: BlockList, dst_blocks: BlockList) -> Transfer:
        """The same transfer with other blocks; that one is left alone. Much quicker than making it anew."""
        twin = _new_object(Transfer)
        twin.params = _new(_PARAMS, self.params[0])
        twin._set_blocks(src_blocks, dst_blocks)
        return twin

    def _set_blocks(self, src_blocks: BlockList, dst_blocks: BlockList) -> None:
        self._src, self._dst = src, dst = blocks_to_c("src_blocks", src_blocks), blocks_to_c("dst_blocks", dst_blocks)
        if src is not None:
            self.params.src_blocks = src
        if dst is not None:
            self.params.dst_blocks = dst


class TransferResult(NamedTuple):
    num_bytes: int
    latency_s: float
    path: Path


def result_from_c(result: CData) -> TransferResult:
    return TransferResult(result.bytes, seconds(result.latency_ns), _PATHS[result.path])
