"""A cache manager over an engine that records what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist_ray import (
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray._native import NativeError, NativeStatus, Transfer
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.pool_config import PoolConfig

POOL = PoolConfig(1 << 20)
LISTS = ("src_blocks", "dst_blocks")


def fields_of(transfer: Transfer) -> dict[str, Any]:
    """Those that are not zero, and how many blocks are in the lists."""
    params = transfer.params
    values = {name: getattr(params, name) for name in dir(params) if name != "struct_size"}
    values.update({name: values[name].count for name in LISTS})
    return {name: value for name, value in values.items() if value}


class FakeEngine:
    """``calls`` are the name and the keyword arguments of each; ``answers`` are raised, or given back."""

    cluster_id = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {"allocate_cache": (9, [4096, 8192]), "links": []}
        self.is_open = True

    def run(self, transfer: Transfer) -> Any:
        return self._call("run", **fields_of(transfer))

    def submit(self, transfer: Transfer, *, user_tag: int) -> Any:
        return self._call("submit", user_tag=user_tag, **fields_of(transfer))

    def _call(self, method: str, **kwargs: Any) -> Any:
        self.calls.append((method, kwargs))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self._call(method, **({"arg": args[0]} if args else {}), **kwargs)


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class FakeEvents:
    def __init__(self) -> None:
        self.expected: dict[int, Any] = {}

    def expect_op(self, handler: Any) -> int:
        self.expected[11] = handler
        return 11

    def forget_op(self, tag: int) -> None:
        del self.expected[tag]


class Fake:
    def __init__(
        self, *, remote_access: bool = False, pools: Collection[Placement] = (), not_ready: Collection[int] = ()
    ) -> None:
        options = EngineOptions(
            role=LLMRole.DECODER,
            cluster_id=1,
            cache_manager=True,
            remote_accessible=remote_access,
            sync_kv_timeout_ms=2000,
            mem_pool=POOL if Placement.DEVICE in pools else None,
            host_mem_pool=POOL if Placement.HOST in pools else None,
        )
        self.engine = FakeEngine()
        self.events = FakeEvents()
        self.manager = CacheManager(
            self.engine,  # type: ignore[arg-type]
            options,
            events=self.events,  # type: ignore[arg-type]
            not_ready=not_ready,
        )


def desc(
    tensors: int = 2, shape: Any = (4, 16), placement: Placement = Placement.DEVICE, batch_dim_index: int = 0
) -> CacheDesc:
    return CacheDesc(tensors, list(shape), DataType.DT_INT8, placement, batch_dim_index)


def cache(*, blocks: bool = False, cache_id: int = 3, **kwargs: Any) -> Cache:
    made = desc(**kwargs)
    return Cache(cache_id, made, [4096 * (i + 1) for i in range(made.num_tensors)], None, True, blocks)


def cpu_cache(**kwargs: Any) -> Cache:
    made = desc(placement=Placement.HOST, **kwargs)
    return Cache.create_cpu_cache(made, [4096 * (i + 1) for i in range(made.num_tensors)])


def native_error(status: int = NativeStatus.INVALID, text: str = "the native core's words") -> NativeError:
    return NativeError(text, status)


def ready_link(is_ready: bool = True, is_inbound: bool = False) -> Any:
    return SimpleNamespace(is_ready=is_ready, is_inbound=is_inbound)


Error = Any


def check_raises(error: Error, match: str | None, call: Callable[[], Any]) -> None:
    """``error`` is an exception class, or the status code of an LLMException."""
    if isinstance(error, LLMStatusCode):
        with pytest.raises(LLMException, match=match) as caught:
            call()
        assert caught.value.status_code == error
    else:
        with pytest.raises(error, match=match):
            call()
