"""Rows of the option dictionary: what v1 reads, and what nobody does (spec api-config §2, §3.3, §5)."""

from __future__ import annotations

import json

from llm_datadist_ray import CacheKey, LLMRole, LLMStatusCode
from tests.conformance.collective import free_port
from tests.conformance.option_checks import (
    LISTEN,
    SMALL,
    V1_DECODER,
    V1_PROMPT,
    V2,
    check_ignored,
    check_v1,
    check_v2,
    tensor_of,
)
from tests.conformance.row_checks import (
    MIB,
    V1_POOL_BYTES,
    init_refused,
    initialised,
    is_listening,
    options_of,
    refused,
)
from tests.conformance.status import FEATURE_NOT_ENABLED, PARAM_INVALID

DEVICE_OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


def test_option_ge_exec_deviceid() -> None:
    """One number in v2, 0 unless given; one or more in v1, where every cache is there once per device."""
    check_v2({**V2, "ge.exec.deviceId": "3"})
    for text in ("0;1", "", "-1", "first"):
        init_refused(PARAM_INVALID, {**V2, "ge.exec.deviceId": text})
    with initialised({**V1_DECODER, "ge.exec.deviceId": "0;1"}, LLMRole.DECODER) as dist:
        addrs = dist.kv_cache_manager.allocate_cache(SMALL).per_device_tensor_addrs
        assert [len(of_device) for of_device in addrs] == [2, 2]
        assert len({address for of_device in addrs for address in of_device}) == 4
    missing = dict(V1_DECODER)
    del missing["ge.exec.deviceId"]
    init_refused(PARAM_INVALID, missing, LLMRole.DECODER)
    init_refused(PARAM_INVALID, {**V1_DECODER, "ge.exec.deviceId": "0,1"}, LLMRole.DECODER)


def test_option_ge_session_device_id() -> None:
    """Emitted by LLMConfig and not read."""
    assert options_of(device_id=[2, 1])["ge.session_device_id"] == "2"
    check_ignored("ge.session_device_id", "nonsense")


def test_option_ge_flowgraphmemmaxsize() -> None:
    """Bytes of the v1 pool, times the utilization; checked in v2 as well (spec §2)."""
    key = "ge.flowGraphMemMaxSize"
    check_v2({**V2, key: "1"})
    for options in (V2, V1_PROMPT):
        init_refused(TypeError, {**options, key: 4096})
        for text in ("1,2", "", "1k", "-1"):
            init_refused(PARAM_INVALID, {**options, key: text})
    for size, fits in ((V1_POOL_BYTES, False), (4 * V1_POOL_BYTES, True)):
        with initialised({**V1_PROMPT, key: str(size)}) as dist:
            cache = tensor_of(2 * V1_POOL_BYTES)
            if fits:
                assert dist.kv_cache_manager.allocate_cache(cache).cache_id == 1
            else:
                refused(DEVICE_OUT_OF_MEMORY, dist.kv_cache_manager.allocate_cache, cache)


def test_option_llm_memoryutilization() -> None:
    """How much of ``ge.flowGraphMemMaxSize`` v1 takes; not looked at in v2."""
    key = "llm.MemoryUtilization"
    check_v2({**V2, key: "nonsense"})
    three_quarters = tensor_of(V1_POOL_BYTES * 3 // 4)
    with initialised({**V1_PROMPT, key: "1.0"}) as dist:
        assert dist.kv_cache_manager.allocate_cache(three_quarters).cache_id == 1
    with initialised({**V1_PROMPT, key: "0.5"}) as dist:
        refused(DEVICE_OUT_OF_MEMORY, dist.kv_cache_manager.allocate_cache, three_quarters)


def test_option_llm_bufpoolcfg() -> None:
    """Size classes of v1: checked, and only a hint (spec §3.3)."""
    key = "llm.BufPoolCfg"

    def text(*classes: tuple[int, int, int]) -> str:
        names = ("total_size", "blk_size", "max_buf_size")
        return json.dumps({"buf_cfg": [dict(zip(names, values, strict=True)) for values in classes]})

    check_v2({**V2, key: "nonsense"})
    check_v1({**V1_PROMPT, key: text((2 * MIB, 256, 256), (4 * MIB, 8192, 8192))})
    for wrong in (
        text((2 * MIB + 256, 256, 256)),
        text((3 * MIB, MIB, MIB)),
        text((2**32, 256, 256)),
        text((2 * MIB, 300, 300)),
        text((2 * MIB, 0, 256)),
        text((8 * MIB, 4 * MIB, 4 * MIB)),
        text((2 * MIB, 512, 256)),
        text((2 * MIB, 256, 2 * MIB)),
        text((2 * MIB, 256, 512), (2 * MIB, 256, 512)),
        text((2 * MIB, 256, 512), (2 * MIB, 256, 256)),
        "{",
    ):
        init_refused(PARAM_INVALID, {**V1_PROMPT, key: wrong})


def test_option_llm_enableswitchrole() -> None:
    """v1 switches roles only with it; v2 does not need it."""
    with initialised(V2) as dist:
        dist.switch_role(LLMRole.DECODER)
        assert dist.role is LLMRole.DECODER
    with initialised(V1_DECODER, LLMRole.DECODER) as dist:
        refused(FEATURE_NOT_ENABLED, dist.switch_role, LLMRole.PROMPT, LISTEN)
    with initialised({**V1_DECODER, "llm.EnableSwitchRole": "0"}, LLMRole.DECODER) as dist:
        refused(FEATURE_NOT_ENABLED, dist.switch_role, LLMRole.PROMPT, LISTEN)
    with initialised({**V1_DECODER, "llm.EnableSwitchRole": "1"}, LLMRole.DECODER) as dist:
        refused(PARAM_INVALID, dist.kv_cache_manager.allocate_cache, SMALL, [CacheKey(1, 0)])
        dist.switch_role(LLMRole.PROMPT, LISTEN)
        assert dist.kv_cache_manager.allocate_cache(SMALL, [CacheKey(1, 0)]).cache_id == 1


def test_option_llm_clusterinfo() -> None:
    """Made by the library in v1 when absent; given, it says where a PROMPT listens (spec §5). Ignored in v2."""
    check_v2({**V2, "llm.ClusterInfo": "nonsense"})
    port = free_port()
    cluster_info = json.dumps({"cluster_id": 1, "listen_ip_info": [{"ip": "127.0.0.1", "port": port}]})
    options = options_of(cluster_info=cluster_info, device_id=0, ge_options={"ge.flowGraphMemMaxSize": "4194304"})
    with initialised(options):
        assert is_listening(port)
    init_refused(PARAM_INVALID, {**options, "llm.ClusterInfo": "{"})


def test_option_llm_outputmaxsize() -> None:
    check_ignored("llm.OutputMaxSize", "nonsense", "")


def test_option_llm_deployrespath() -> None:
    check_ignored("llm.deployResPath", "/no/such/directory")


def test_option_ge_exec_rankid() -> None:
    check_ignored("ge.exec.rankId", "nonsense")


def test_option_ge_resourceconfigpath() -> None:
    check_ignored("ge.resourceConfigPath", "/no/such/file")


def test_option_llm_refinputshapes() -> None:
    check_ignored("llm.RefInputShapes", "1,2;3")


def test_option_llm_refinputdtypes() -> None:
    check_ignored("llm.RefInputDtypes", "nonsense")


def test_option_llm_refinputseqlendimindex() -> None:
    check_ignored("llm.RefInputSeqLenDimIndex", "nonsense")


def test_option_llm_kvtensorformat() -> None:
    check_ignored("llm.kvTensorFormat", "ND")


def test_option_llm_role() -> None:
    """The library's own: the constructor's role decides, whatever the caller writes there (spec §2)."""
    check_ignored("llm.Role", "Decoder", "nonsense")
    with initialised({**V1_PROMPT, "llm.Role": "Decoder"}) as dist:
        assert dist.kv_cache_manager.allocate_cache(SMALL, [CacheKey(1, 0)]).cache_id == 1, "PROMPT only"


def check_listen_part(key: str, text: str) -> None:
    """The library's own: only ``llm.listenIpInfo`` says where to listen, and the caller's dict gets no such key."""
    port = free_port()
    with initialised({**V2, "llm.ListenIp": "127.0.0.1", "llm.ListenPort": str(port)}):
        assert not is_listening(port)
    options = {**V2, "llm.listenIpInfo": f"127.0.0.1:{port}", key: text}
    check_v2(options)
    with initialised(options):
        assert is_listening(port)


def test_option_llm_listenip() -> None:
    check_listen_part("llm.ListenIp", "nonsense")


def test_option_llm_listenport() -> None:
    check_listen_part("llm.ListenPort", "nonsense")
