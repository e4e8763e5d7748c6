"""JSON-valued options that describe memory pools (spec api-config §3.1, §3.3)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llm_datadist_ray.errors import param_invalid, raise_if_false

_MIB = 1 << 20
_MAX_PAGES = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool of ``memory_size`` bytes, reserved in full at ``init`` in pages of ``2**page_shift`` bytes."""

    memory_size: int
    page_shift: int = 16

    @property
    def page_bytes(self) -> int:
        return 1 << self.page_shift

    @property
    def num_pages(self) -> int:
        """Whole pages in the pool; what is left over is not used."""
        return self.memory_size >> self.page_shift

    @classmethod
    def parse(cls, text: str, key: str) -> PoolConfig:
        """From the JSON text of option ``key``; unknown fields are ignored (spec api-config §3.1).

        LLMException(LLM_PARAM_INVALID) for malformed JSON, a missing, negative or non-integer field, ``page_shift``
        outside [10, 31), less than one page or 2**32 - 1 pages and more.
        """
        fields = parse_json_object(text, key)
        pool = cls(_unsigned(fields, "memory_size", key), _unsigned(fields, "page_shift", key, default=16))
        raise_if_false(
            10 <= pool.page_shift < 31, f"{key}: page_shift should be in [10, 31), but got {pool.page_shift}"
        )
        raise_if_false(
            1 <= pool.num_pages < _MAX_PAGES,
            f"{key}: memory_size {pool.memory_size} is {pool.num_pages} pages of {pool.page_bytes} bytes, "
            f"but should be 1 to {_MAX_PAGES - 1}",
        )
        return pool


@dataclass(frozen=True, slots=True)
class BufferClass:
    """One size class of the v1 allocator, in bytes. A hint: it is validated and steers nothing."""

    total_size: int
    blk_size: int
    max_buf_size: int


def parse_buffer_classes(text: str, key: str) -> tuple[BufferClass, ...]:
    """The size classes in the JSON text of option ``key`` (spec api-config §3.3).

    LLMException(LLM_PARAM_INVALID) for malformed JSON or a broken rule; the text names entry and rule.
    """
    entries = parse_json_object(text, key).get("buf_cfg")
    if not isinstance(entries, list):
        raise param_invalid(f"{key}: buf_cfg should be a list, but got {entries!r}")
    classes: list[BufferClass] = []
    for index, entry in enumerate(entries):
        where = f"{key}: buf_cfg[{index}]"
        if not isinstance(entry, dict):
            raise param_invalid(f"{where} should be an object, but got {entry!r}")
        found = BufferClass(*(_unsigned(entry, name, where) for name in BufferClass.__slots__))
        _check_buffer_class(found, where)
        raise_if_false(
            not classes or classes[-1].max_buf_size < found.max_buf_size,
            f"{where}: max_buf_size {found.max_buf_size} should be greater than that of the entry before it",
        )
        classes.append(found)
    return tuple(classes)


def _check_buffer_class(found: BufferClass, where: str) -> None:
    total, block, largest = found.total_size, found.blk_size, found.max_buf_size
    raise_if_false(
        0 < block <= 2 * _MIB and block & (block - 1) == 0,
        f"{where}: blk_size should be a power of two up to 2 MiB, but got {block}",
    )
    raise_if_false(
        total <= 0xFFFFFFFF and total % (2 * _MIB) == 0 and total % block == 0,
        f"{where}: total_size should be a multiple of 2 MiB and of blk_size, at most 0xFFFFFFFF, but got {total}",
    )
    raise_if_false(
        block <= largest < total,
        f"{where}: max_buf_size should be at least blk_size {block} and below total_size {total}, but got {largest}",
    )


def parse_json_object(text: str, key: str) -> dict[str, Any]:
    """The JSON object in the text of option ``key``; LLMException(LLM_PARAM_INVALID) when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise param_invalid(f"{key} is not valid JSON ({error}): {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise param_invalid(f"{key} should be a JSON object, but got {text[:200]!r}")
    return value


def _unsigned(fields: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    # JSON's true is a Python int, and a size it is not.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise param_invalid(f"{where}: {name} should be an unsigned integer, but got {value!r}")
    return value
