"""The types of the transfer API (spec api-types §3, §5 - §11): plain Python, one noun per module.

``Tensor`` and ``TensorDesc`` need NumPy and are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist_ray.types.cache import CPU_CACHE_ID, Cache, KvCache
from llm_datadist_ray.types.cache_desc import CacheDesc
from llm_datadist_ray.types.cache_keys import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist_ray.types.cache_task import CacheTask, TransferJob
from llm_datadist_ray.types.cluster_info import LLMClusterInfo, int_to_ip, ip_to_int
from llm_datadist_ray.types.enums import DataType, LLMRole, MemType, Memtype, Placement, RegisterMemStatus
from llm_datadist_ray.types.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist_ray.types.mem_info import MemInfo

if TYPE_CHECKING:
    from llm_datadist_ray.types.tensor import Tensor, TensorDesc

__all__ = [
    "CPU_CACHE_ID",
    "INVALID_ID",
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMRole",
    "LayerSynchronizer",
    "MemInfo",
    "MemType",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferJob",
    "TransferWithCacheKeyConfig",
    "int_to_ip",
    "ip_to_int",
]


def __getattr__(name: str) -> Any:
    if name not in ("Tensor", "TensorDesc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llm_datadist_ray.types import tensor

    return getattr(tensor, name)
