"""The devices of a v1 process: one native engine each, all of the same cluster id (spec api-kvcachemanager §1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.engine_start import Pool, equip
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.kv_cache.errors import v1_codes
from llm_datadist_ray.option_keys import FLOW_GRAPH_MEM_MAX_SIZE, MEMORY_UTILIZATION
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.parallel import in_parallel
from llm_datadist_ray.types import Placement

T = TypeVar("T")

_PAGE_SHIFT = 16


class Devices:
    """Every cache, link and transfer of the process exists once on each of its devices.

    Actions for all of them raise the failure of the first device that has one, with v1's codes.
    """

    def __init__(self, engines: Sequence[NativeEngine]) -> None:
        self.engines = tuple(engines)

    @classmethod
    def start(cls, options: EngineOptions, make_engine: Callable[[int], NativeEngine]) -> Devices:
        """Makes the engine of each device and its pool, then has it listen where ``options`` say: nobody reaches it
        before. What was made is closed again when one of them fails."""
        is_given = options.kv_pool_bytes is not None
        source = FLOW_GRAPH_MEM_MAX_SIZE if is_given else f"{FLOW_GRAPH_MEM_MAX_SIZE}, which is not given"
        pool = Pool(source, Placement.DEVICE, pool_bytes(options), _PAGE_SHIFT, is_lazy=not is_given)
        addresses = options.listen_addresses or (None,) * len(options.device_ids)
        with ExitStack() as started:
            engines = []
            for index, address in enumerate(addresses):
                engine = started.enter_context(make_engine(index))
                equip(engine, [pool], address)
                engines.append(engine)
            started.pop_all()
        return cls(engines)

    def __len__(self) -> int:
        return len(self.engines)

    @property
    def first(self) -> NativeEngine:
        """The only one, where v1 allows no more than one."""
        return self.engines[0]

    def each(self, action: Callable[[NativeEngine], T]) -> list[T]:
        """One after the other, for what is short. Stops at the first failure."""
        with v1_codes():
            return [action(engine) for engine in self.engines]

    def at_once(self, action: Callable[[NativeEngine], T]) -> list[T]:
        """For what waits: all devices run to their end, whatever the others do."""
        with v1_codes():
            return in_parallel("ldr-device", action, self.engines)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def pool_bytes(options: EngineOptions) -> int:
    """Bytes of the pool of one device: ``ge.flowGraphMemMaxSize`` × ``mem_utilization`` (spec api-config §2).

    Without the former it is our choice: half of the memory that is available on this machine, divided among the
    devices, × ``mem_utilization``; such a pool takes real memory only as its pages are touched.
    LLMException(LLM_PARAM_INVALID) when less than a page remains.
    """
    if options.kv_pool_bytes is None:
        whole_bytes = available_memory_bytes() // 2 // len(options.device_ids)
    else:
        whole_bytes = options.kv_pool_bytes
    size_bytes = int(whole_bytes * options.mem_utilization)
    raise_if_false(
        size_bytes >> _PAGE_SHIFT,
        f"a pool of {whole_bytes} bytes ({FLOW_GRAPH_MEM_MAX_SIZE}) x {options.mem_utilization} ({MEMORY_UTILIZATION}) "
        f"has no page of {1 << _PAGE_SHIFT} bytes",
    )
    return size_bytes


def available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
