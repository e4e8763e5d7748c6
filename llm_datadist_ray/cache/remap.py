"""The check of memory to remap, an operation that hosts do not need (spec api-cachemanager §10)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray.cache.operation import ManagerPart
from llm_datadist_ray.errors import LLMStatusCode, raise_if_false
from llm_datadist_ray.types import MemInfo, Memtype


class Remap(ManagerPart):
    """Part of :class:`CacheManager`."""

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Checks the arguments and, when there is a link, does nothing: registered host memory is never remapped.

        LLMException: LLM_PARAM_INVALID (also for wrong types), LLM_NOT_YET_LINK without a usable link.
        """
        infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        raise_if_false(infos, "mem_infos should not be empty")
        for info in infos:
            _check_mem_info(info)
        raise_if_false(
            any(link.is_ready and not link.is_inbound for link in self._engine.links()),
            "remap_registered_memory needs a link, and there is none: link first",
            LLMStatusCode.LLM_NOT_YET_LINK,
        )


def _check_mem_info(info: Any) -> None:
    raise_if_false(isinstance(info, MemInfo), f"mem_infos only support MemInfo, but got {type(info).__name__}")
    raise_if_false(
        info.mem_type == Memtype.MEM_TYPE_DEVICE, f"only {Memtype.MEM_TYPE_DEVICE} can be remapped, but got {info}"
    )
    raise_if_false(info.addr, f"addr should not be 0, but got {info}")
    raise_if_false(info.size is not None and info.size > 0, f"size should be greater than zero, but got {info}")
