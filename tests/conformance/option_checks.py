"""What ``init`` makes of an option dictionary, seen from outside."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMRole
from tests.conformance.row_checks import initialised, refused, v1_options
from tests.conformance.status import NOT_YET_LINK, PARAM_INVALID

V2 = {"llm.EnableCacheManager": "1"}
REMOTE = {**V2, "llm.EnableRemoteCacheAccessible": "1"}
LISTEN = {"llm.listenIpInfo": "127.0.0.1:0"}
V1_PROMPT = v1_options(LLMRole.PROMPT)
V1_DECODER = v1_options(LLMRole.DECODER)
SMALL = CacheDesc(2, [2, 8], DataType.DT_INT8)


def tensor_of(num_bytes: int) -> CacheDesc:
    return CacheDesc(1, [1, num_bytes], DataType.DT_INT8)


def check_v2(options: dict[str, Any], *, remote_access: bool = False) -> None:
    """``init`` takes the options as v2, in this mode, and leaves the dict alone."""
    given = dict(options)
    with initialised(options) as dist:
        assert options == given
        cache = dist.cache_manager.register_cache(tensor_of(8), [4096])
        push = dist.cache_manager.push_cache, CacheKeyByIdAndIndex(2, 1), cache
        code = NOT_YET_LINK if remote_access else PARAM_INVALID
        refused(code, *push, tensor_num_per_layer=1)


def check_v1(options: dict[str, Any], role: LLMRole = LLMRole.PROMPT) -> None:
    given = dict(options)
    with initialised(options, role) as dist:
        assert options == given
        assert dist.kv_cache_manager.allocate_cache(SMALL).cache_id == 1


def check_ignored(key: str, *texts: str) -> None:
    """Any text in both interfaces."""
    for text in texts:
        check_v2({**V2, key: text})
        check_v1({**V1_PROMPT, key: text})
