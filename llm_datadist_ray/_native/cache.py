"""A cache as the native core registers it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist_ray._native._ldr import ffi

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


class CacheKind(IntEnum):
    CONTIGUOUS = 0
    BLOCKS = 1


class KeyKind(IntEnum):
    REQUEST = 0
    PREFIX = 1
    BLOCKS = 2


class NativeKey(NamedTuple):
    """Names batch entry ``batch_index`` of the cache; ``id`` is the request or prefix id, ignored for BLOCKS."""

    kind: KeyKind
    id: int
    model_id: int
    batch_index: int = 0


def cache_to_c(
    kind: CacheKind,
    placement: int,
    remote_accessible: bool,
    num_entries: int,
    tensor_bytes: int,
    addresses: Sequence[int] | None,
    keys: Sequence[NativeKey],
) -> tuple[CData, Any]:
    """The parameter struct, and what must be kept alive while it is used. TypeError for an address or id that is no
    unsigned number of 64 bits. Without addresses the caller sets the number of tensors."""
    try:
        c_addresses = ffi.NULL if addresses is None else ffi.new("uint64_t[]", list(addresses))
        c_keys = ffi.new("ldr_cache_key_t[]", [(key.kind, key.batch_index, key.id, key.model_id) for key in keys])
    except OverflowError as error:
        raise TypeError(f"addresses and the ids of keys only support unsigned 64-bit integers: {error}") from error
    params = ffi.new("ldr_cache_params_t *")
    params.struct_size = ffi.sizeof("ldr_cache_params_t")
    params.kind = kind
    params.placement = placement
    params.remote_accessible = remote_accessible
    params.num_tensors = 0 if addresses is None else len(addresses)
    params.num_keys = len(keys)
    params.num_entries = num_entries
    params.tensor_bytes = tensor_bytes
    params.addresses = c_addresses
    params.keys = c_keys if keys else ffi.NULL
    return params, (c_addresses, c_keys)


def key_to_c(key: NativeKey) -> CData:
    """A ``ldr_cache_key_t *``."""
    return ffi.new("ldr_cache_key_t *", (key.kind, key.batch_index, key.id, key.model_id))
