"""Prefill and decode of large language models in different Ray actors, over a native KV transport.

The transfer API has the names of Huawei's LLM-DataDist (:class:`LLMDataDist`, :class:`LLMConfig` and their types);
:class:`DisaggCluster` is the actor framework on top. Names are resolved at their first use: importing this package
imports neither Ray nor torch, nor the compiled module.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_datadist_ray.actors import DisaggCluster
    from llm_datadist_ray.config import LLMConfig, LlmConfig
    from llm_datadist_ray.datadist import LLMDataDist
    from llm_datadist_ray.errors import LLMException, LLMStatusCode, Status
    from llm_datadist_ray.kv_cache import KvCacheManager
    from llm_datadist_ray.types import (
        BlocksCacheKey,
        Cache,
        CacheDesc,
        CacheKey,
        CacheKeyByIdAndIndex,
        CacheTask,
        DataType,
        KvCache,
        LayerSynchronizer,
        LLMClusterInfo,
        LLMRole,
        MemInfo,
        MemType,
        Memtype,
        Placement,
        RegisterMemStatus,
        Tensor,
        TensorDesc,
        TransferConfig,
        TransferWithCacheKeyConfig,
    )

# Ascend's runtime reads it; harmless elsewhere (spec api-types §1).
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")

__version__ = "0.1.0"

_HOMES = {
    "DisaggCluster": "llm_datadist_ray.actors",
    "KvCacheManager": "llm_datadist_ray.kv_cache",
    "LLMConfig": "llm_datadist_ray.config",
    "LLMDataDist": "llm_datadist_ray.datadist",
    "LLMException": "llm_datadist_ray.errors",
    "LLMStatusCode": "llm_datadist_ray.errors",
    "LlmConfig": "llm_datadist_ray.config",
    "Status": "llm_datadist_ray.errors",
}
_TYPES_HOME = "llm_datadist_ray.types"

v2_list = [
    "LLMDataDist",
    "LLMConfig",
    "LlmConfig",
    "LLMRole",
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "Status",
    "DataType",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "BlocksCacheKey",
    "Cache",
    "KvCache",
    "Placement",
    "RegisterMemStatus",
    "Memtype",
    "MemInfo",
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "CacheTask",
]
"""The names of upstream's v2 interface (spec api-types §1)."""

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "DisaggCluster",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "MemType",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, _TYPES_HOME)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
