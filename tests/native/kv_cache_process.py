"""A V1Runtime over fake engines."""

from __future__ import annotations

from typing import Any, cast

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.kv_cache import KvCacheManager, V1Runtime
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import CacheDesc, DataType, KvCache, LLMRole, Placement
from tests.native.fake_engine import FakeEngine


class FakeProcess:
    def __init__(self, role: LLMRole, num_devices: int = 1, **options: str) -> None:
        """``options``: of the option dictionary, with ``__`` for ``.``"""
        self.engines = [FakeEngine() for _ in range(num_devices)]
        self.options = v1_options(role, num_devices, **options)
        self.runtime = V1Runtime(self.options, lambda index: cast(NativeEngine, self.engines[index]))
        self.engine = self.engines[0]

    @property
    def manager(self) -> KvCacheManager:
        return self.runtime.kv_cache_manager

    def cache(self, *, tensors: int = 4, blocks: bool = False, shape: tuple[int, ...] = (6, 96)) -> KvCache:
        desc = device_desc(tensors=tensors, shape=shape)
        return self.manager.allocate_blocks_cache(desc) if blocks else self.manager.allocate_cache(desc)


def v1_options(role: LLMRole, num_devices: int = 1, **options: str) -> EngineOptions:
    listen = ";".join(f"127.0.0.1:{26000 + index}" for index in range(num_devices))
    given = {
        "ge.exec.deviceId": ";".join(map(str, range(num_devices))),
        "ge.flowGraphMemMaxSize": str(1 << 20),
        "llm.listenIpInfo": listen,
        **{name.replace("__", "."): value for name, value in options.items()},
    }
    return EngineOptions.parse(given, role=role, cluster_id=1)


def device_desc(*, tensors: int = 4, shape: Any = (6, 96), placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, shape, DataType.DT_UINT8, placement)


def cpu_cache(*, tensors: int = 4, shape: tuple[int, ...] = (6, 96), devices: int = 1) -> KvCache:
    desc = device_desc(tensors=tensors, shape=shape, placement=Placement.HOST)
    return KvCache.create_cpu_cache(desc, [list(range(1, tensors + 1)) for _ in range(devices)])
