"""Cache, KvCache (spec api-types §7), LLMClusterInfo (§8) and MemInfo (§9)."""

from __future__ import annotations

import gc
import logging
import pickle
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import (
    Cache,
    CacheDesc,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    int_to_ip,
    ip_to_int,
)


def _desc(placement: Placement = Placement.DEVICE, num_tensors: int = 2) -> CacheDesc:
    return CacheDesc(num_tensors, [4, 8], DataType.DT_FLOAT, placement)


class _Manager:
    """Records what is deallocated, as a KvCacheManager would be told."""

    def __init__(self, initialized: bool = True, error: LLMException | None = None) -> None:
        self.initialized = initialized
        self.error = error
        self.freed: list[int] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def deallocate_cache(self, cache: KvCache) -> None:
        self.freed.append(cache.cache_id)
        if self.error:
            raise self.error


def test_7_cache() -> None:
    desc, addrs = _desc(), [16, 32]
    cache = Cache(1, desc, addrs, None, True, False)
    assert (cache.cache_id, cache.cache_desc, cache.tensor_addrs) == (1, desc, addrs)
    assert (cache.is_blocks_cache, cache.is_registered) == (False, True)
    assert f"{cache=}" == "cache=Cache(cache_id=1, num_tensor_addrs=2, is_blocks_cache=False)"
    cache.mark_deallocated()
    assert cache.tensor_addrs == []
    assert addrs == [16, 32]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("1", _desc(), [1]), TypeError),
        ((2**63, _desc(), [1]), ValueError),
        ((1, None, [1]), TypeError),
        ((1, _desc(), (1,)), TypeError),
        ((1, _desc(), ["1"]), TypeError),
    ],
)
def test_7_cache_violations(args: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Cache(*args, None, False, False)


def test_7_cpu_cache() -> None:
    cache = Cache.create_cpu_cache(_desc(Placement.HOST), [16, 32])
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, [16, 32])


@pytest.mark.parametrize("maker", [Cache, KvCache])
@pytest.mark.parametrize(
    ("desc", "addrs", "error"),
    [
        (_desc(Placement.HOST), None, TypeError),
        (_desc(Placement.HOST), (16, 32), TypeError),
        (_desc(Placement.HOST), [16, "32"], TypeError),
        (_desc(Placement.DEVICE), [16, 32], LLMException),
        (_desc(Placement.HOST), [16], LLMException),
        (_desc(Placement.HOST), [], LLMException),
        (None, [16, 32], TypeError),
    ],
    ids=["none", "tuple", "element", "device", "short", "empty", "no-desc"],
)
def test_7_cpu_cache_violations(maker: Any, desc: Any, addrs: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        maker.create_cpu_cache(desc, addrs)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_7_kv_cpu_cache_flat_and_nested() -> None:
    desc = _desc(Placement.HOST)
    flat = KvCache.create_cpu_cache(desc, [16, 32])
    assert (flat.cache_id, flat.per_device_tensor_addrs) == (-1, [[16, 32]])
    nested = KvCache.create_cpu_cache(desc, [[16, 32], [48, 64]])
    assert nested.per_device_tensor_addrs == [[16, 32], [48, 64]]
    assert str(nested) == "KvCache(cache_id=-1, num_devices=2)"


@pytest.mark.parametrize(
    ("addrs", "error", "text"),
    [
        ([16, [32]], LLMException, "should be consistent"),
        ([[16, 32], 48], LLMException, "should be consistent"),
        ([[16, 32], [48]], LLMException, r"addrs\[1\]"),
        ([[]], LLMException, "one address for each"),
        (["16", 32], TypeError, "inner type only support"),
        ([[16, "32"]], TypeError, "inner type only support"),
    ],
    ids=str,
)
def test_7_kv_cpu_cache_violations(addrs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        KvCache.create_cpu_cache(_desc(Placement.HOST), addrs)


def test_7_kv_cache_is_deallocated_when_dropped() -> None:
    manager = _Manager()
    cache = KvCache(3, _desc(), [[16, 32]], manager)
    assert cache.is_valid
    del cache
    gc.collect()
    assert manager.freed == [3]


@pytest.mark.parametrize("how", ["deallocated", "not initialised", "cpu"])
def test_7_kv_cache_dropped_without_deallocating(how: str) -> None:
    manager = _Manager(initialized=how != "not initialised")
    cache = KvCache(3, _desc(), [[16, 32]], None if how == "cpu" else manager)
    if how == "deallocated":
        cache.mark_deallocated()
        assert (cache.per_device_tensor_addrs, cache.is_valid) == ([], False)
    del cache
    gc.collect()
    assert manager.freed == []


@pytest.mark.logs("could not be deallocated")
def test_7_kv_cache_failing_finaliser_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cache = KvCache(3, _desc(), [[16]], _Manager(error=LLMException("gone", status_code=LLMStatusCode.LLM_FAILED)))
    with caplog.at_level(logging.WARNING):
        del cache
        gc.collect()
    assert "cache 3 was garbage collected" in caplog.text


def test_7_kv_cache_constructor_that_raises_leaves_nothing_to_finalise() -> None:
    manager = _Manager()
    with pytest.raises(TypeError):
        KvCache(3, None, [[16]], manager)  # type: ignore[arg-type]
    gc.collect()
    assert manager.freed == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.2.3.4", 0x04030201), ("127.0.0.1", 0x0100007F), ("255.255.255.255", 2**32 - 1), ("0.0.0.0", 0)],
)
def test_8_first_octet_is_the_least_significant_byte(text: str, value: int) -> None:
    assert ip_to_int(text) == value
    assert int_to_ip(value) == text


@pytest.mark.parametrize("text", ["", "::1", "localhost", "256.0.0.1", "1.2.3.4.5", "1.2.3.4:5"])
def test_8_text_that_is_no_ipv4_address(text: str) -> None:
    with pytest.raises(RuntimeError, match="not an IPv4 address") as caught:
        LLMClusterInfo().append_remote_ip_info(text, 1)
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize(("value", "error"), [(None, TypeError), (-1, ValueError), (2**32, ValueError)])
def test_8_int_to_ip_violations(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        int_to_ip(value)


@pytest.mark.parametrize("side", ["local", "remote"])
def test_8_append(side: str) -> None:
    info = LLMClusterInfo()
    append = getattr(info, f"append_{side}_ip_info")
    append("1.2.3.4", 26000)
    append(ip=77, port=0)
    append(None, 65535)
    expected = [(0x04030201, 26000), (77, 0), (None, 65535)]
    assert getattr(info, f"{side}_ip_info_list") == expected
    assert "1.2.3.4:26000" in repr(info)
    for ip, port, error in [(1.5, 1, TypeError), ("1.2.3.4", None, TypeError), ("1.2.3.4", "1", TypeError)]:
        with pytest.raises(error):
            append(ip, port)
    for port in (-1, 65536):
        with pytest.raises(ValueError):
            append("1.2.3.4", port)
    assert getattr(info, f"{side}_ip_info_list") == expected
    with pytest.raises(AttributeError):
        setattr(info, f"{side}_ip_info_list", [])


def test_8_cluster_id_and_role() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.remote_role_type) == (None, None)
    info.remote_cluster_id = 2**64 - 1
    for role in (LLMRole.PROMPT, 2, None):
        info.remote_role_type = role
        assert info.remote_role_type is role
    for bad, error in [(None, TypeError), ("1", TypeError), (-1, ValueError), (2**64, ValueError)]:
        with pytest.raises(error):
            info.remote_cluster_id = bad  # type: ignore[assignment]
    assert info.remote_cluster_id == 2**64 - 1
    with pytest.raises(TypeError, match="only support"):
        info.remote_role_type = "PROMPT"  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(info)).remote_cluster_id == 2**64 - 1


def test_8_lists_are_not_shared_between_objects() -> None:
    LLMClusterInfo().append_local_ip_info("1.2.3.4", 1)
    assert LLMClusterInfo().local_ip_info_list == []


def test_9_mem_info() -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 8)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, 4096, 8)
    assert str(info) == "MemInfo(mem_type=Memtype.MEM_TYPE_DEVICE, addr=4096, size=8)"
    MemInfo(None, None, -1)  # type: ignore[arg-type]
    for args in [(Placement.HOST, 1, 1), (Memtype.MEM_TYPE_HOST, "1", 1), (Memtype.MEM_TYPE_HOST, 1, 1.5)]:
        with pytest.raises(TypeError, match="only support"):
            MemInfo(*args)  # type: ignore[arg-type]
