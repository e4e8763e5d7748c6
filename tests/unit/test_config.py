"""LLMConfig (spec api-config §1)."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from llm_datadist_ray.config import LLMConfig, LlmConfig
from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import LLMRole

_ALWAYS = {"llm.MemoryUtilization": "0.95"}

_GETTER_DEFAULTS: dict[str, Any] = {
    "device_id": None,
    "sync_kv_timeout": None,
    "ge_options": {},
    "listen_ip_info": "",
    "deploy_res_path": "",
    "enable_switch_role": False,
    "mem_utilization": 0.95,
    "buf_pool_cfg": "",
    "cluster_info": "",
    "output_max_size": None,
    "enable_cache_manager": False,
    "enable_remote_cache_accessible": False,
    "mem_pool_cfg": "",
    "host_mem_pool_cfg": "",
    "rdma_traffic_class": None,
    "rdma_service_level": None,
    "local_comm_res": "",
    "link_total_time": 0,
    "link_retry_count": 1,
    "transfer_backend": "",
    "global_resource_config": "",
}

_ACCEPTS_NONE = {
    "listen_ip_info",
    "deploy_res_path",
    "enable_switch_role",
    "buf_pool_cfg",
    "output_max_size",
    "enable_cache_manager",
    "enable_remote_cache_accessible",
    "mem_pool_cfg",
    "host_mem_pool_cfg",
    "local_comm_res",
    "transfer_backend",
    "global_resource_config",
}

# property, value, the keys it adds
_EMITS: list[tuple[str, Any, dict[str, str]]] = [
    ("device_id", 0, {"ge.exec.deviceId": "0", "ge.session_device_id": "0"}),
    ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    ("device_id", [0, 1], {"ge.exec.deviceId": "0;1", "ge.session_device_id": "0"}),
    ("device_id", (2, 1), {"ge.exec.deviceId": "2;1", "ge.session_device_id": "2"}),
    ("device_id", 2**31 - 1, {"ge.exec.deviceId": "2147483647", "ge.session_device_id": "2147483647"}),
    ("sync_kv_timeout", 1, {"llm.SyncKvCacheWaitTime": "1"}),
    ("sync_kv_timeout", "3000", {"llm.SyncKvCacheWaitTime": "3000"}),
    ("ge_options", {"ge.a": "1", "llm.b": ""}, {"ge.a": "1", "llm.b": ""}),
    ("ge_options", {}, {}),
    ("listen_ip_info", "1.2.3.4:26000", {"llm.listenIpInfo": "1.2.3.4:26000"}),
    ("listen_ip_info", "not parsed here", {"llm.listenIpInfo": "not parsed here"}),
    ("listen_ip_info", "", {}),
    ("deploy_res_path", "p", {"llm.deployResPath": "p"}),
    ("deploy_res_path", "", {}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("mem_utilization", 0.0, {"llm.MemoryUtilization": "0.0"}),
    ("mem_utilization", 0.5, {"llm.MemoryUtilization": "0.5"}),
    ("mem_utilization", 1.0, {"llm.MemoryUtilization": "1.0"}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    ("buf_pool_cfg", "", {}),
    ("output_max_size", 0, {"llm.OutputMaxSize": "0"}),
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("enable_remote_cache_accessible", False, {"llm.EnableRemoteCacheAccessible": "0"}),
    ("mem_pool_cfg", '{"memory_size": 1}', {"llm.MemPoolConfig": '{"memory_size": 1}'}),
    ("mem_pool_cfg", "", {}),
    ("host_mem_pool_cfg", "x", {"llm.HostMemPoolConfig": "x"}),
    ("host_mem_pool_cfg", "", {}),
    ("rdma_traffic_class", 100, {"llm.RdmaTrafficClass": "100"}),
    ("rdma_traffic_class", 0, {"llm.RdmaTrafficClass": "0"}),
    ("rdma_service_level", 100, {"llm.RdmaServiceLevel": "100"}),
    ("rdma_service_level", 2**32 - 1, {"llm.RdmaServiceLevel": "4294967295"}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("local_comm_res", "{}", {"llm.LocalCommRes": "{}"}),
    ("link_total_time", 0, {"llm.LinkTotalTime": "0"}),
    ("link_total_time", 2**32 - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 1, {"llm.LinkRetryCount": "1"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("transfer_backend", "", {"llm.TransferBackend": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "", {"llm.GlobalResourceConfig": ""}),
    ("global_resource_config", "{}", {"llm.GlobalResourceConfig": "{}"}),
]

_VIOLATIONS: list[tuple[str, Any, type[Exception]]] = [
    ("device_id", "0", TypeError),
    ("device_id", ["0"], TypeError),
    ("device_id", 1.0, TypeError),
    ("device_id", -1, LLMException),
    ("device_id", [0, -1], LLMException),
    ("device_id", [], LLMException),
    ("device_id", 2**31, ValueError),
    ("device_id", (0, 2**31), ValueError),
    ("sync_kv_timeout", 1.0, TypeError),
    ("sync_kv_timeout", 0, LLMException),
    ("sync_kv_timeout", -1, LLMException),
    ("sync_kv_timeout", "0", LLMException),
    ("sync_kv_timeout", "-1", LLMException),
    ("sync_kv_timeout", "1s", LLMException),
    ("sync_kv_timeout", "", LLMException),
    ("sync_kv_timeout", "²", LLMException),
    ("sync_kv_timeout", 2**31, ValueError),
    ("sync_kv_timeout", "2147483648", ValueError),
    ("ge_options", None, AttributeError),
    ("ge_options", "a", TypeError),
    ("ge_options", {1: "a"}, TypeError),
    ("ge_options", {"a": 1}, TypeError),
    ("listen_ip_info", 1, TypeError),
    ("deploy_res_path", 1, TypeError),
    ("enable_switch_role", 1, TypeError),
    ("enable_switch_role", "1", TypeError),
    ("mem_utilization", 1, TypeError),
    ("mem_utilization", "0.5", TypeError),
    ("mem_utilization", -0.1, LLMException),
    ("mem_utilization", 1.01, LLMException),
    ("mem_utilization", float("nan"), LLMException),
    ("buf_pool_cfg", {}, TypeError),
    ("cluster_info", {}, TypeError),
    ("cluster_info", "{", json.JSONDecodeError),
    ("cluster_info", "[]", LLMException),
    ("cluster_info", '{"listen_ip_info": [{"ip": "::1"}]}', RuntimeError),
    ("cluster_info", '{"listen_ip_info": ["x"]}', TypeError),
    ("output_max_size", "1", TypeError),
    ("enable_cache_manager", 1, TypeError),
    ("enable_remote_cache_accessible", "1", TypeError),
    ("mem_pool_cfg", {}, TypeError),
    ("host_mem_pool_cfg", 1, TypeError),
    ("rdma_traffic_class", "100", TypeError),
    ("rdma_traffic_class", -1, ValueError),
    ("rdma_service_level", 2**32, ValueError),
    ("local_comm_res", 1, TypeError),
    ("link_total_time", "1", TypeError),
    ("link_total_time", -1, LLMException),
    ("link_total_time", 2**32, LLMException),
    ("link_retry_count", 1.0, TypeError),
    ("link_retry_count", 0, LLMException),
    ("link_retry_count", 101, LLMException),
    ("transfer_backend", 1, TypeError),
    ("global_resource_config", 1, TypeError),
]


def test_1_alias() -> None:
    assert LlmConfig is LLMConfig


@pytest.mark.parametrize("name", _GETTER_DEFAULTS, ids=lambda name: f"1.2-{name}")
def test_getter_default(name: str) -> None:
    assert getattr(LLMConfig(), name) == _GETTER_DEFAULTS[name]


def test_1_1_nothing_set_emits_only_memory_utilization() -> None:
    assert LLMConfig().generate_options() == _ALWAYS


@pytest.mark.parametrize(("name", "value", "added"), _EMITS, ids=lambda value: str(value)[:40])
def test_1_2_emitted(name: str, value: Any, added: dict[str, str]) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options() == {**_ALWAYS, **added}
    assert all(type(text) is str for text in config.options.values())


@pytest.mark.parametrize(("name", "value", "error"), _VIOLATIONS, ids=lambda value: str(value)[:40])
def test_1_2_violation_leaves_the_setting_alone(name: str, value: Any, error: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(error) as caught:
        setattr(config, name, value)
    assert type(caught.value) is error
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert getattr(config, name) == _GETTER_DEFAULTS[name]
    assert config.generate_options() == _ALWAYS


@pytest.mark.parametrize("name", sorted(set(_GETTER_DEFAULTS) - {"ge_options"}), ids=lambda name: f"1.2-{name}")
def test_none(name: str) -> None:
    config = LLMConfig()
    if name in _ACCEPTS_NONE:
        value = next(value for emitted, value, added in _EMITS if emitted == name and added)
        setattr(config, name, value)
        setattr(config, name, None)
        assert getattr(config, name) == _GETTER_DEFAULTS[name]
        assert config.generate_options() == _ALWAYS
    else:
        with pytest.raises(TypeError):
            setattr(config, name, None)


def test_1_2_cluster_info_addresses_become_integers() -> None:
    config = LLMConfig()
    config.cluster_info = '{"cluster_id": 1, "listen_ip_info": [{"ip": "1.2.3.4", "port": 5}, {"ip": 6, "port": 7}]}'
    expected = {"cluster_id": 1, "listen_ip_info": [{"ip": 0x04030201, "port": 5}, {"ip": 6, "port": 7}]}
    assert json.loads(config.generate_options()["llm.ClusterInfo"]) == expected
    assert json.loads(config.cluster_info) == expected


def test_1_1_same_object_whose_keys_accumulate() -> None:
    config = LLMConfig()
    config.local_comm_res = ""
    options = config.generate_options()
    options["llm.RdmaServiceLevel"] = "4"
    config.local_comm_res = None
    config.device_id = 1
    assert config.gen_options() is options is config.options
    assert options == {
        **_ALWAYS,
        "llm.LocalCommRes": "",
        "llm.RdmaServiceLevel": "4",
        "ge.exec.deviceId": "1",
        "ge.session_device_id": "1",
    }


def test_1_1_property_wins_over_ge_options() -> None:
    config = LLMConfig()
    config.ge_options = {"llm.SyncKvCacheWaitTime": "5", "llm.MemoryUtilization": "0.1", "ge.x": "y"}
    config.sync_kv_timeout = 7
    assert config.generate_options() == {**_ALWAYS, "llm.SyncKvCacheWaitTime": "7", "ge.x": "y"}
    assert config.ge_options["llm.SyncKvCacheWaitTime"] == "5"


def test_configs_share_nothing() -> None:
    first, second = LLMConfig(), LLMConfig()
    first.device_id = 3
    first.ge_options["a"] = "b"
    first.generate_options()
    assert (second.device_id, second.ge_options, second.generate_options()) == (None, {}, _ALWAYS)


def test_options_is_read_only_and_config_pickles() -> None:
    config = LLMConfig()
    config.listen_ip_info = "1.2.3.4:5"
    with pytest.raises(AttributeError):
        config.options = {}  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)).generate_options() == config.generate_options()


def test_what_a_config_emits_is_what_engine_options_reads() -> None:
    """Both sides of the dictionary agree on keys and units (spec api-config §1.2 against §2)."""
    config = LLMConfig()
    config.device_id = 3
    config.sync_kv_timeout = 5000
    config.listen_ip_info = "127.0.0.1:26000"
    config.mem_pool_cfg = '{"memory_size": 1048576}'
    config.host_mem_pool_cfg = '{"memory_size": 2097152, "page_shift": 12}'
    config.local_comm_res = ""
    config.transfer_backend = "hixl"
    config.global_resource_config = "{}"
    config.link_total_time = 1080
    config.link_retry_count = 80
    config.rdma_traffic_class = 132
    config.rdma_service_level = 4
    got = EngineOptions.parse(config.generate_options(), role=LLMRole.MIX, cluster_id=9)
    assert got.mem_pool is not None and got.host_mem_pool is not None
    assert (got.role, got.cluster_id, got.cache_manager, got.remote_accessible) == (LLMRole.MIX, 9, True, True)
    assert (got.device_ids, got.sync_kv_timeout_ms, got.listen_ip, got.listen_port) == ((3,), 5000, "127.0.0.1", 26000)
    assert (got.mem_pool.memory_size, got.host_mem_pool.num_pages) == (1048576, 512)
    assert (got.local_comm_res, got.transfer_backend, got.global_resource_config) == ("", "hixl", "{}")
    assert (got.link_total_time_s, got.link_retry_count) == (1080, 80)
    assert (got.rdma_traffic_class, got.rdma_service_level) == (132, 4)
