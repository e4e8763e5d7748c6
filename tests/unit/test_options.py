"""EngineOptions and the JSON options (spec api-config §2 - §5)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.options import EngineOptions, link_total_time_s, parse_listen_info
from llm_datadist_ray.pool_config import BufferClass, PoolConfig
from llm_datadist_ray.types import LLMRole

_CM = "llm.EnableCacheManager"
_RA = "llm.EnableRemoteCacheAccessible"
_LCR = "llm.LocalCommRes"
_TB = "llm.TransferBackend"
_LISTEN = "llm.listenIpInfo"
_V2 = {_CM: "1"}
_V1 = {"ge.exec.deviceId": "0"}
_MIB = 1 << 20


def _parse(options: Any, role: LLMRole = LLMRole.DECODER) -> EngineOptions:
    return EngineOptions.parse(options, role=role, cluster_id=1)


def _refused(options: Any, role: LLMRole = LLMRole.DECODER) -> str:
    """The text of the LLM_PARAM_INVALID that parsing raises."""
    with pytest.raises(LLMException) as caught:
        _parse(options, role)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    return str(caught.value)


def test_2_v2_defaults() -> None:
    assert _parse(_V2) == EngineOptions(role=LLMRole.DECODER, cluster_id=1, cache_manager=True)
    got = _parse(_V2)
    assert (got.sync_kv_timeout_ms, got.device_ids, got.remote_accessible) == (1000, (0,), False)
    assert (got.listen_ip, got.listen_port, got.transfer_backend, got.mem_pool) == (None, None, None, None)
    assert (got.link_total_time_s, got.link_retry_count, got.rdma_traffic_class) == (0, 1, None)


def test_2_v1_defaults() -> None:
    assert _parse(_V1) == EngineOptions(role=LLMRole.DECODER, cluster_id=1, cache_manager=False)


@pytest.mark.parametrize("text", ["0", "", "true", "2"])
def test_2_anything_but_1_is_v1(text: str) -> None:
    assert not _parse({**_V1, _CM: text}).cache_manager


def test_2_any_other_key_is_ignored() -> None:
    legacy = [
        "llm.OutputMaxSize",
        "llm.deployResPath",
        "ge.exec.rankId",
        "ge.resourceConfigPath",
        "llm.RefInputShapes",
        "llm.RefInputDtypes",
        "llm.RefInputSeqLenDimIndex",
        "llm.kvTensorFormat",
        "ge.session_device_id",
        "who.knows",
    ]
    for base in (_V1, _V2):
        assert _parse({**base, **dict.fromkeys(legacy, "?")}) == _parse(base)


def test_2_the_other_interfaces_keys_are_not_looked_at() -> None:
    v1_keys = ["llm.MemoryUtilization", "llm.BufPoolCfg", "llm.EnableSwitchRole", "llm.ClusterInfo"]
    assert _parse({**_V2, **dict.fromkeys(v1_keys, "?")}) == _parse(_V2)
    v2_keys = [_RA, "llm.MemPoolConfig", "llm.HostMemPoolConfig", "llm.LinkTotalTime", "llm.RdmaTrafficClass"]
    assert _parse({**_V1, **dict.fromkeys(v2_keys, "?")}) == _parse(_V1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (None, AttributeError),
        ([], TypeError),
        ("", TypeError),
        ({1: "a"}, TypeError),
        ({"a": 1}, TypeError),
        ({"a": None}, TypeError),
        ({"ge.flowGraphMemMaxSize": 1}, TypeError),
    ],
    ids=lambda value: f"datadist-2.2-{value}",
)
def test_dictionary_types(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _parse(options)


@pytest.mark.parametrize(
    ("role", "cluster_id", "error"),
    [(None, 1, TypeError), (1, 1, TypeError), (LLMRole.MIX, "1", TypeError), (LLMRole.MIX, 2**64, ValueError)],
)
def test_role_and_cluster_id(role: Any, cluster_id: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        EngineOptions.parse(_V2, role=role, cluster_id=cluster_id)


@pytest.mark.parametrize("base", [_V1, _V2], ids=["v1", "v2"])
def test_2_flow_graph_mem_is_checked_in_both_and_before_everything_else(base: dict[str, str]) -> None:
    key = "ge.flowGraphMemMaxSize"
    for bad in ("1,2", "", "1G", "-1", "1.5", " 1", "²"):
        assert key in _refused({**base, key: bad, _TB: "x", _LISTEN: "x"})
    got = _parse({**base, key: "1073741824"})
    assert got.kv_pool_bytes == (None if base is _V2 else 1 << 30)


_INTERPLAY = [
    # §4 rule, options, expected (cache manager, remote access)
    ("1+2", {_LCR: ""}, (True, True)),
    ("1+2", {_LCR: '{"version": "1.3"}'}, (True, True)),
    ("2", {_LCR: "", _CM: "1"}, (True, True)),
    ("2-explicit-off", {_LCR: "", _RA: "0"}, (True, False)),
    ("5", {_CM: "1", _TB: "hixl", _LISTEN: "1.2.3.4:5"}, (True, True)),
    ("1+5", {_LCR: "", _TB: "hixl", _LISTEN: "1.2.3.4:5"}, (True, True)),
    ("none", {_CM: "1", _RA: "1"}, (True, True)),
    ("none", {_CM: "1"}, (True, False)),
]


@pytest.mark.parametrize(("rule", "options", "expected"), _INTERPLAY, ids=lambda value: f"4-{value}")
def test_interplay_defaults_leave_the_callers_dict_alone(
    rule: str, options: dict[str, str], expected: tuple[bool, bool]
) -> None:
    before = dict(options)
    got = _parse(options)
    assert (got.cache_manager, got.remote_accessible) == expected
    assert options == before


_INTERPLAY_ERRORS = [
    ("3", {_LCR: "", _CM: "0"}, "EnableCacheManager"),
    ("4", {_TB: "hixl", _LISTEN: "1.2.3.4:5"}, "EnableCacheManager"),
    ("4-empty-is-present", {_TB: ""}, "EnableCacheManager"),
    ("4-before-6-and-7", {_TB: "hixl", _CM: "0", _RA: "0"}, "EnableCacheManager"),
    ("6", {_TB: "hixl", _CM: "1", _RA: "0", _LISTEN: "1.2.3.4:5"}, "EnableRemoteCacheAccessible"),
    ("6-before-7", {_TB: "hixl", _CM: "1", _RA: "0"}, "EnableRemoteCacheAccessible"),
    ("7", {_TB: "hixl", _CM: "1"}, "listenIpInfo"),
    ("7-with-3.4", {_TB: "hixl", _LCR: ""}, "listenIpInfo"),
    ("7-before-9", {_TB: "other", _CM: "1"}, "listenIpInfo"),
    ("8-before-9", {_TB: "other", _CM: "1", _LISTEN: "x"}, "listenIpInfo"),
    ("9-flag-before-backend", {_CM: "1", _RA: "yes"}, "EnableRemoteCacheAccessible"),
    ("9-backend", {_TB: "", _CM: "1", _LISTEN: "1.2.3.4:5"}, "TransferBackend"),
    ("9-backend", {_TB: "HIXL", _CM: "1", _LISTEN: "1.2.3.4:5"}, "TransferBackend"),
    ("9-numbers-before-json", {_CM: "1", "llm.SyncKvCacheWaitTime": "x", "llm.MemPoolConfig": "x"}, "SyncKv"),
]


@pytest.mark.parametrize(("rule", "options", "text"), _INTERPLAY_ERRORS, ids=lambda value: f"4-{value}")
def test_interplay_errors(rule: str, options: dict[str, str], text: str) -> None:
    before = dict(options)
    assert text in _refused(options)
    assert options == before


@pytest.mark.parametrize("values", list(itertools.product([None, "0", "1", "?"], repeat=2)), ids=str)
def test_4_every_pair_of_flags_with_local_comm_res(values: tuple[str | None, str | None]) -> None:
    flags = {key: value for key, value in zip((_CM, _RA), values, strict=True) if value is not None}
    cache_manager, remote = values
    if cache_manager in (None, "1") and remote in (None, "0", "1"):
        got = _parse({_LCR: "", **flags})
        assert (got.cache_manager, got.remote_accessible) == (True, remote != "0")
    else:
        _refused({_LCR: "", **flags})


@pytest.mark.parametrize(("options", "needed"), [({}, True), ({_LCR: ""}, True), ({_LCR: "{}"}, False)], ids=str)
def test_datadist_4_1_local_ip_is_needed_without_local_comm_res(options: dict[str, str], needed: bool) -> None:
    assert _parse({**_V2, **options}).needs_local_ip is needed


_NUMBERS = [
    ("llm.SyncKvCacheWaitTime", "sync_kv_timeout_ms", ["1", "1000", "2147483647"], ["2147483648"]),
    ("llm.LinkTotalTime", "link_total_time_s", ["0", "4294967295"], ["4294967296"]),
    ("llm.LinkRetryCount", "link_retry_count", ["1", "100"], ["0", "101"]),
    ("llm.RdmaTrafficClass", "rdma_traffic_class", ["0", "100", "4294967295"], ["4294967296"]),
    ("llm.RdmaServiceLevel", "rdma_service_level", ["0", "100", "4294967295"], ["4294967296"]),
    ("ge.exec.deviceId", "device_ids", ["0", "7"], ["0;1", "2147483648"]),
]


@pytest.mark.parametrize(("key", "field", "good", "bad"), _NUMBERS, ids=lambda value: f"2-{value}")
def test_numbers(key: str, field: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        value = int(text)
        assert getattr(_parse({**_V2, key: text}), field) == ((value,) if field == "device_ids" else value)
    for text in [*bad, "", "-1", "1.0", "0x1", " 1", "²", "9" * 5000]:
        assert key in _refused({**_V2, key: text})


@pytest.mark.parametrize(
    ("option", "environment", "expected_s"),
    [
        ({}, None, 120),
        ({"llm.LinkTotalTime": "0"}, None, 120),
        ({"llm.LinkTotalTime": "0"}, "600", 600),
        ({"llm.LinkTotalTime": "7"}, "600", 7),
    ],
)
def test_2_link_total_time(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, str], environment: str | None, expected_s: int
) -> None:
    assert total_time_s(monkeypatch, option, environment) == expected_s


@pytest.mark.logs("HCCL_CONNECT_TIMEOUT")
@pytest.mark.parametrize("environment", ["", "0", "soon", "-1", "1e3", "9" * 40])
def test_2_an_unusable_environment_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch, environment: str) -> None:
    assert total_time_s(monkeypatch, {}, environment) == 120


def total_time_s(monkeypatch: pytest.MonkeyPatch, option: dict[str, str], environment: str | None) -> int:
    if environment is None:
        monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    else:
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", environment)
    return link_total_time_s(_parse({**_V2, **option}))


_HIXL = {**_V2, _TB: "hixl", _LISTEN: "1.2.3.4:5"}


@pytest.mark.parametrize("text", ["", "{}", '{"any": [1, {}]}'])
def test_2_global_resource_config(text: str) -> None:
    got = _parse({**_HIXL, "llm.GlobalResourceConfig": text})
    assert (got.global_resource_config, got.is_hixl) == (text, True)


@pytest.mark.parametrize("text", ["{", "[]", "1", "null", "text"])
def test_2_global_resource_config_is_looked_at_with_hixl_only(text: str) -> None:
    assert "GlobalResourceConfig" in _refused({**_HIXL, "llm.GlobalResourceConfig": text})
    got = _parse({**_V2, "llm.GlobalResourceConfig": text})
    assert (got.global_resource_config, got.is_hixl) == (text, False)


@pytest.mark.parametrize("key", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"], ids=lambda key: f"3.1-{key}")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"memory_size": 65536}', PoolConfig(65536, 16)),
        ('{"memory_size": 131071, "page_shift": 16, "unknown": []}', PoolConfig(131071, 16)),
        ('{"memory_size": 1024, "page_shift": 10}', PoolConfig(1024, 10)),
        ('{"memory_size": 1073741824, "page_shift": 30}', PoolConfig(1 << 30, 30)),
        (json.dumps({"memory_size": (2**32 - 2) << 10, "page_shift": 10}), PoolConfig((2**32 - 2) << 10, 10)),
        ("", None),
        ("{", "JSON"),
        ("[]", "object"),
        ("null", "object"),
        ("[" * 100_000, "JSON"),
        ("{}", "memory_size"),
        ('{"memory_size": -1}', "memory_size"),
        ('{"memory_size": 1e9}', "memory_size"),
        ('{"memory_size": "65536"}', "memory_size"),
        ('{"memory_size": true}', "unsigned integer"),
        ('{"memory_size": null}', "memory_size"),
        ('{"memory_size": 65535}', "page"),
        ('{"memory_size": 65536, "page_shift": 9}', "page_shift"),
        ('{"memory_size": 4294967296, "page_shift": 31}', "page_shift"),
        ('{"memory_size": 65536, "page_shift": -1}', "page_shift"),
        ('{"memory_size": 65536, "page_shift": "16"}', "page_shift should be an unsigned"),
        (json.dumps({"memory_size": (2**32 - 1) << 10, "page_shift": 10}), "page"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_pools(key: str, text: str, expected: PoolConfig | str | None) -> None:
    field = "mem_pool" if key == "llm.MemPoolConfig" else "host_mem_pool"
    if isinstance(expected, str):
        refusal = _refused({**_V2, key: text})
        assert key in refusal
        assert expected in refusal
    else:
        assert getattr(_parse({**_V2, key: text}), field) == expected


def test_3_1_pages() -> None:
    pool = PoolConfig(100_000, 12)
    assert (pool.page_bytes, pool.num_pages) == (4096, 24)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:26000", ("127.0.0.1", 26000)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("1.2.3.4:65535", ("1.2.3.4", 65535))],
)
def test_2_listen_info(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen_info(text) == expected
    got = _parse({**_V2, _LISTEN: text})
    assert (got.listen_ip, got.listen_port) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", LLMException),
        ("127.0.0.1", LLMException),
        ("::1:26000", LLMException),
        ("1.2.3.4:1:2", LLMException),
        ("localhost:1", LLMException),
        (":1", LLMException),
        ("1.2.3:1", LLMException),
        ("256.1.1.1:1", LLMException),
        ("127.0.0.1:", ValueError),
        ("127.0.0.1:port", ValueError),
        ("nonsense:port", ValueError),
        ("127.0.0.1:65536", ValueError),
        ("127.0.0.1:-1", ValueError),
        ("127.0.0.1: 1", ValueError),
        ("127.0.0.1:1_0", ValueError),
        ("127.0.0.1:\u0663", ValueError),
    ],
)
def test_2_listen_info_violations_in_v2(text: str, error: type[Exception]) -> None:
    for call in (lambda: parse_listen_info(text), lambda: _parse({**_V2, _LISTEN: text})):
        with pytest.raises(error, match="listenIpInfo") as caught:
            call()
        assert type(caught.value) is error


def test_5_v1_device_ids() -> None:
    assert _parse({"ge.exec.deviceId": "0;3;1"}).device_ids == (0, 3, 1)
    for bad in ("", "0;", "a", "0,1", "-1", "0;;1"):
        assert "deviceId" in _refused({"ge.exec.deviceId": bad})
    assert "deviceId" in _refused({})


@pytest.mark.parametrize("role", [LLMRole.DECODER, LLMRole.MIX], ids=str)
def test_5_v1_only_a_prompt_needs_listen_info(role: LLMRole) -> None:
    assert _parse(_V1, role).listen_addresses == ()
    assert _parse({**_V1, _LISTEN: "never parsed"}, role).listen_addresses == ()


def test_5_v1_prompt_listens_once_per_device() -> None:
    options = {"ge.exec.deviceId": "0;1", _LISTEN: "1.2.3.4:5;1.2.3.5:6"}
    assert _parse(options, LLMRole.PROMPT).listen_addresses == (("1.2.3.4", 5), ("1.2.3.5", 6))


@pytest.mark.parametrize(
    "options",
    [
        _V1,
        {**_V1, _LISTEN: ""},
        {**_V1, _LISTEN: "1.2.3.4"},
        {**_V1, _LISTEN: "1.2.3.4:port"},
        {**_V1, _LISTEN: "1.2.3.4:65536"},
        {**_V1, _LISTEN: "1.2.3.4:5;1.2.3.5:6"},
        {"ge.exec.deviceId": "0;1", _LISTEN: "1.2.3.4:5"},
    ],
    ids=str,
)
def test_5_v1_prompt_listen_violations(options: dict[str, str]) -> None:
    assert "listenIpInfo" in _refused(options, LLMRole.PROMPT)


def test_5_v1_cluster_info_replaces_listen_info() -> None:
    text = '{"cluster_id": 1, "listen_ip_info": [{"ip": 67305985, "port": 5}]}'
    for options in ({"llm.ClusterInfo": text}, {**_V1, "llm.ClusterInfo": text, _LISTEN: "ignored"}):
        got = _parse(options, LLMRole.PROMPT)
        assert (got.device_ids, got.listen_addresses) == ((0,), (("1.2.3.4", 5),))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"listen_ip_info": [{"port": 5}]}',
        '{"listen_ip_info": [{"ip": 1, "port": "x"}]}',
        '{"listen_ip_info": [{"ip": -1, "port": 1}]}',
        '{"listen_ip_info": 7}',
        '{"listen_ip_info": [7]}',
        '{"listen_ip_info": [{"ip": "::1", "port": 1}]}',
        '{"listen_ip_info": [{"ip": 1, "port": 1}, {"ip": 1, "port": 2}]}',
    ],
)
def test_5_v1_cluster_info_violations(text: str) -> None:
    _refused({**_V1, "llm.ClusterInfo": text}, LLMRole.PROMPT)


def test_2_v1_settings() -> None:
    got = _parse({**_V1, "llm.MemoryUtilization": "0.5", "llm.EnableSwitchRole": "1", "llm.SyncKvCacheWaitTime": "7"})
    assert (got.mem_utilization, got.enable_switch_role, got.sync_kv_timeout_ms) == (0.5, True, 7)
    assert not _parse({**_V1, "llm.EnableSwitchRole": "true"}).enable_switch_role
    for bad in ("", "x", "1.5", "-0.1", "nan"):
        assert "MemoryUtilization" in _refused({**_V1, "llm.MemoryUtilization": bad})


def _buf_pool(*rows: tuple[Any, Any, Any]) -> dict[str, str]:
    names = ("total_size", "blk_size", "max_buf_size")
    return {**_V1, "llm.BufPoolCfg": json.dumps({"buf_cfg": [dict(zip(names, row, strict=True)) for row in rows]})}


def test_3_3_buffer_classes() -> None:
    rows = [(2 * _MIB, 256, 256), (2048 * _MIB, 2 * _MIB, 2 * _MIB)]
    assert _parse(_buf_pool(*rows)).buffer_classes == tuple(BufferClass(*row) for row in rows)
    assert _parse({**_V1, "llm.BufPoolCfg": ""}).buffer_classes == ()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(3 * _MIB, 256, 512)], "total_size"),
        ([(4096 * _MIB, 256, 512)], "total_size"),
        ([(2 * _MIB, 0, 512)], "blk_size"),
        ([(2 * _MIB, 384, 512)], "blk_size"),
        ([(8 * _MIB, 4 * _MIB, 4 * _MIB)], "blk_size"),
        ([(2 * _MIB, 512, 256)], "max_buf_size"),
        ([(2 * _MIB, 256, 2 * _MIB)], "max_buf_size"),
        ([(2 * _MIB, 256, 512), (2 * _MIB, 256, 512)], r"buf_cfg[1]: max_buf_size"),
        ([(2 * _MIB, 256, None)], "max_buf_size"),
        ([(2 * _MIB, "256", 512)], "blk_size"),
        ([(-2 * _MIB, 256, 512)], "total_size"),
    ],
    ids=str,
)
def test_3_3_buffer_class_violations(rows: list[tuple[Any, Any, Any]], text: str) -> None:
    assert text in _refused(_buf_pool(*rows))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"buf_cfg": {}}', '{"buf_cfg": [1]}'])
def test_3_3_malformed(text: str) -> None:
    assert "BufPoolCfg" in _refused({**_V1, "llm.BufPoolCfg": text})


def test_options_are_frozen_and_pickle() -> None:
    got = _parse({**_V2, _LISTEN: "1.2.3.4:5", "llm.MemPoolConfig": '{"memory_size": 65536}'})
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.cluster_id = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(got)) == got


def test_client_patterns_2_1_raw_dictionary() -> None:
    """The option dictionary of the first vllm-ascend connector, written by hand."""
    options = {"llm.SyncKvCacheWaitTime": "5000", "ge.exec.deviceId": "2", _LISTEN: "10.0.0.1:26000"}
    got = _parse(options, LLMRole.PROMPT)
    assert (got.cache_manager, got.device_ids, got.sync_kv_timeout_ms) == (False, (2,), 5000)
    assert (got.listen_ip, got.listen_port) == ("10.0.0.1", 26000)


@pytest.mark.parametrize("key", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"])
@pytest.mark.parametrize("text", ["\udc80", '["\udc80"]'])
def test_2_what_is_said_of_odd_text_can_be_printed(key: str, text: str) -> None:
    _refused({**_V2, key: text}).encode()
