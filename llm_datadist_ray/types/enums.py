"""The small enumerations of the transfer API (spec api-types §3)."""

from __future__ import annotations

from enum import Enum

from llm_datadist_ray._named_enum import NamedIntEnum


class LLMRole(NamedIntEnum):
    """What a process is for (spec api-types §3.1). A label in v2; in v1 it gates methods."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    @property
    def native_name(self) -> str:
        """``"Prompt"``, ``"Decoder"`` or ``"Mix"``: the text of option ``llm.Role``."""
        return self.name.capitalize()


class Placement(NamedIntEnum):
    """Where a cache's tensors live (spec api-types §3.4). Note that :class:`Memtype` counts the other way round."""

    HOST = 0
    DEVICE = 1


class Memtype(Enum):
    """Kind of memory in a :class:`MemInfo` (spec api-types §3.4)."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


MemType = Memtype
"""The spelling of upstream's documentation; the same class."""


class RegisterMemStatus(Enum):
    """How far the exchange started by ``link()`` has come (spec api-types §3.4)."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class DataType(Enum):
    """Element type of a tensor; the values are upstream's wire codes (spec api-types §3.3)."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 16 for a string, which stands for its (address, length) header."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}
