"""The cffi binding of the native core (``native/include/ldr.h``): handles, completions, status to exception.

Importing this needs the compiled module ``_ldr``; nothing below this package (types, config, errors) does.
"""

from __future__ import annotations

from llm_datadist_ray._native.blocks import BlockList
from llm_datadist_ray._native.cache import CacheKind, KeyKind, NativeKey
from llm_datadist_ray._native.engine import NativeEngine, Progress
from llm_datadist_ray._native.event import Event, EventKind
from llm_datadist_ray._native.grant import CloseOutcome, GrantId, GrantStats
from llm_datadist_ray._native.info import EngineInfo, LinkInfo, LinkState
from llm_datadist_ray._native.paths import DATA_PATHS, Path, PathSet, parse_paths
from llm_datadist_ray._native.pool import PoolInfo
from llm_datadist_ray._native.shared_memory import alloc_shared
from llm_datadist_ray._native.status import NativeError, NativeStatus
from llm_datadist_ray._native.transfer import (
    ALL_TENSORS,
    WHOLE_ENTRY,
    Direction,
    Move,
    RemoteBy,
    TensorSpan,
    Transfer,
    TransferResult,
)

__all__ = [
    "ALL_TENSORS",
    "DATA_PATHS",
    "WHOLE_ENTRY",
    "BlockList",
    "CacheKind",
    "CloseOutcome",
    "Direction",
    "EngineInfo",
    "Event",
    "EventKind",
    "GrantId",
    "GrantStats",
    "KeyKind",
    "LinkInfo",
    "LinkState",
    "Move",
    "NativeEngine",
    "NativeError",
    "NativeKey",
    "NativeStatus",
    "Path",
    "PathSet",
    "PoolInfo",
    "Progress",
    "RemoteBy",
    "TensorSpan",
    "Transfer",
    "TransferResult",
    "alloc_shared",
    "parse_paths",
]
