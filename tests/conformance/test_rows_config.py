"""Rows of LLMConfig, both lists, and what they leave out (spec api-config §1): defaults, what a setter takes and
refuses, and what is emitted. What an emitted option does is in the rows ``option_*``."""

from __future__ import annotations

import json
from typing import Any

from llm_datadist_ray import LLMConfig, LlmConfig, LLMStatusCode
from tests.conformance.row_checks import options_of, parameters, refused, v1_name, v2_name
from tests.conformance.status import PARAM_INVALID

ALWAYS = {"llm.MemoryUtilization": "0.95"}
Refusals = dict[type[Exception] | LLMStatusCode, list[Any]]


def check_property(
    name: str, default: Any, emitted: list[tuple[Any, dict[str, str]]], refusals: Refusals, *, none: bool = False
) -> None:
    """``emitted``: values and the keys each adds. ``none``: None goes back to unset, else it is a TypeError."""
    config = LLMConfig()
    assert getattr(config, name) == default
    assert config.generate_options() == ALWAYS
    for value, added in emitted:
        config = LLMConfig()
        setattr(config, name, value)
        assert getattr(config, name) == value
        options = config.generate_options()
        assert options == {**ALWAYS, **added}
        assert all(type(text) is str for text in options.values())
    for error, values in refusals.items():
        for value in values:
            config = LLMConfig()
            refused(error, setattr, config, name, value)
            assert getattr(config, name) == default
            assert config.generate_options() == ALWAYS
    config = LLMConfig()
    if not none:
        refused(TypeError, setattr, config, name, None)
        return
    setattr(config, name, emitted[0][0])
    setattr(config, name, None)
    assert getattr(config, name) == default
    assert config.generate_options() == ALWAYS


def check_text(name: str, key: str, *, also_empty: bool) -> None:
    """A text that is not looked at here; the empty one is emitted only where that counts as set."""
    emitted = [("some text", {key: "some text"}), ("", {key: ""} if also_empty else {})]
    check_property(name, "", emitted, {TypeError: [1, {}, b"text"]}, none=True)


def check_flag(name: str, key: str, *, also_false: bool) -> None:
    emitted = [(True, {key: "1"}), (False, {key: "0"} if also_false else {})]
    check_property(name, False, emitted, {TypeError: [1, 0, "1"]}, none=True)


def check_constructor() -> None:
    assert parameters(LLMConfig) == []
    refused(TypeError, LLMConfig, {})
    first, second = LLMConfig(), LLMConfig()
    first.device_id = 3
    first.ge_options["a"] = "b"
    first.generate_options()
    assert (second.device_id, second.ge_options, second.generate_options()) == (None, {}, ALWAYS)
    refused(AttributeError, setattr, first, "options", {})


def check_generate_options() -> None:
    """Spec §1.1: one dict, whose keys stay; a property wins over the same key in ``ge_options``."""
    config = LLMConfig()
    config.ge_options = {"llm.SyncKvCacheWaitTime": "5", "ge.x": "y"}
    config.enable_cache_manager = True
    options = config.generate_options()
    assert options == {**ALWAYS, "llm.SyncKvCacheWaitTime": "5", "ge.x": "y", "llm.EnableCacheManager": "1"}
    options["llm.RdmaServiceLevel"] = "4"  # as a client does (client-patterns §3.2)
    config.enable_cache_manager = None
    config.sync_kv_timeout = 7
    assert config.generate_options() is options
    assert options["llm.SyncKvCacheWaitTime"] == "7"
    assert (options["llm.EnableCacheManager"], options["llm.RdmaServiceLevel"]) == ("1", "4")
    assert config.ge_options["llm.SyncKvCacheWaitTime"] == "5"


def check_device_id() -> None:
    def keys(ids: str, first: str) -> dict[str, str]:
        return {"ge.exec.deviceId": ids, "ge.session_device_id": first}

    emitted = [
        (0, keys("0", "0")),
        (7, keys("7", "7")),
        ([0, 1], keys("0;1", "0")),
        ((2, 1), keys("2;1", "2")),
        (2**31 - 1, keys("2147483647", "2147483647")),
    ]
    refusals: Refusals = {TypeError: ["0", 1.0, ["0"]], PARAM_INVALID: [-1, [0, -1]], ValueError: [2**31, [0, 2**31]]}
    check_property("device_id", None, emitted, refusals)


def check_sync_kv_timeout() -> None:
    key = "llm.SyncKvCacheWaitTime"
    emitted = [(1, {key: "1"}), ("3000", {key: "3000"}), (2**31 - 1, {key: "2147483647"})]
    refusals: Refusals = {TypeError: [1.0, [1]], PARAM_INVALID: [0, -1, "0", "1s", ""], ValueError: [2**31]}
    check_property("sync_kv_timeout", None, emitted, refusals)


def check_ge_options() -> None:
    given = {"ge.a": "1", "llm.b": ""}
    assert options_of(ge_options=given) == {**ALWAYS, **given}
    config = LLMConfig()
    assert config.ge_options == {}
    refused(AttributeError, setattr, config, "ge_options", None)
    for wrong in ("a", {1: "a"}, {"a": 1}, [("a", "b")]):
        refused(TypeError, setattr, config, "ge_options", wrong)
    assert config.generate_options() == ALWAYS


def check_listen_ip_info() -> None:
    check_text("listen_ip_info", "llm.listenIpInfo", also_empty=False)
    several = "10.0.0.1:26000;10.0.0.2:26000"
    assert options_of(listen_ip_info=several)["llm.listenIpInfo"] == several, "parsed by init, not here"


def test_v1_llm_config_constructor() -> None:
    assert v1_name("LLMConfig") is LLMConfig
    check_constructor()


def test_v1_llm_config_generate_options() -> None:
    """``mem_utilization`` is there without being set (spec §1.1)."""
    check_generate_options()
    assert LLMConfig().generate_options() == {"llm.MemoryUtilization": "0.95"}


def test_v1_llm_config_device_id() -> None:
    """A list for several devices."""
    check_device_id()


def test_v1_llm_config_sync_kv_timeout() -> None:
    check_sync_kv_timeout()


def test_v1_llm_config_enable_switch_role() -> None:
    check_flag("enable_switch_role", "llm.EnableSwitchRole", also_false=False)


def test_v1_llm_config_ge_options() -> None:
    """Where a v1 program gives the size of its pool (client-patterns §2.2)."""
    check_ge_options()
    pool = {"ge.flowGraphMemMaxSize": "4194304"}
    assert options_of(ge_options=pool, device_id=0)["ge.flowGraphMemMaxSize"] == "4194304"


def test_v1_llm_config_listen_ip_info() -> None:
    check_listen_ip_info()


def test_v1_llm_config_mem_utilization() -> None:
    """A float, not an int; emitted always."""
    key = "llm.MemoryUtilization"
    for value, text in ((0.0, "0.0"), (0.5, "0.5"), (1.0, "1.0")):
        config = LLMConfig()
        assert config.mem_utilization == 0.95
        config.mem_utilization = value
        assert config.mem_utilization == value
        assert config.generate_options() == {key: text}
    config = LLMConfig()
    for wrong in (1, "0.5", None):
        refused(TypeError, setattr, config, "mem_utilization", wrong)
    for wrong_number in (-0.01, 1.01, float("nan")):
        refused(PARAM_INVALID, setattr, config, "mem_utilization", wrong_number)
    assert config.generate_options() == ALWAYS


def test_v1_llm_config_buf_pool_cfg() -> None:
    check_text("buf_pool_cfg", "llm.BufPoolCfg", also_empty=False)


def test_v2_llm_config_constructor() -> None:
    assert v2_name("LLMConfig") is LLMConfig
    check_constructor()


def test_v2_llm_config_generate_options() -> None:
    """Known also as ``gen_options``, and as property ``options``."""
    check_generate_options()
    config = LLMConfig()
    config.enable_cache_manager = True
    assert config.generate_options() is config.options
    assert config.generate_options() == {**ALWAYS, "llm.EnableCacheManager": "1"}


def test_v2_llm_config_device_id() -> None:
    check_device_id()


def test_v2_llm_config_sync_kv_timeout() -> None:
    check_sync_kv_timeout()


def test_v2_llm_config_ge_options() -> None:
    check_ge_options()


def test_v2_llm_config_listen_ip_info() -> None:
    check_listen_ip_info()


def test_v2_llm_config_enable_cache_manager() -> None:
    check_flag("enable_cache_manager", "llm.EnableCacheManager", also_false=True)


def test_v2_llm_config_mem_pool_cfg() -> None:
    """The JSON is read by ``init``."""
    check_text("mem_pool_cfg", "llm.MemPoolConfig", also_empty=False)


def test_v2_llm_config_host_mem_pool_cfg() -> None:
    check_text("host_mem_pool_cfg", "llm.HostMemPoolConfig", also_empty=False)


def test_v2_llm_config_enable_remote_cache_accessible() -> None:
    check_flag("enable_remote_cache_accessible", "llm.EnableRemoteCacheAccessible", also_false=True)


def check_uint32(name: str, key: str) -> None:
    """Ranges of the documentation are not enforced: 100 is taken for both (spec §1.2, "Doc≠code")."""
    emitted = [(0, {key: "0"}), (100, {key: "100"}), (2**32 - 1, {key: "4294967295"})]
    check_property(name, None, emitted, {TypeError: ["100", 1.0], ValueError: [-1, 2**32]})


def test_v2_llm_config_rdma_traffic_class() -> None:
    check_uint32("rdma_traffic_class", "llm.RdmaTrafficClass")


def test_v2_llm_config_rdma_service_level() -> None:
    check_uint32("rdma_service_level", "llm.RdmaServiceLevel")


def test_v2_llm_config_local_comm_res() -> None:
    """Emitted once set, even to the empty text, which means something."""
    check_text("local_comm_res", "llm.LocalCommRes", also_empty=True)


def test_v2_llm_config_link_total_time() -> None:
    key = "llm.LinkTotalTime"
    emitted = [(1080, {key: "1080"}), (0, {key: "0"}), (2**32 - 1, {key: "4294967295"})]
    check_property("link_total_time", 0, emitted, {TypeError: ["1", 1.0], PARAM_INVALID: [-1, 2**32]})


def test_v2_llm_config_link_retry_count() -> None:
    key = "llm.LinkRetryCount"
    emitted = [(80, {key: "80"}), (1, {key: "1"}), (100, {key: "100"})]
    check_property("link_retry_count", 1, emitted, {TypeError: ["1", 1.0], PARAM_INVALID: [0, 101, -1]})


def test_v2_llm_config_transfer_backend() -> None:
    """Any text here; ``init`` takes only "hixl"."""
    check_text("transfer_backend", "llm.TransferBackend", also_empty=True)


def test_extra_llm_config_alias() -> None:
    assert LlmConfig is LLMConfig is v1_name("LlmConfig") is v2_name("LlmConfig")


def test_extra_gen_options() -> None:
    config = LLMConfig()
    config.device_id = 1
    options = config.gen_options()
    assert options == {**ALWAYS, "ge.exec.deviceId": "1", "ge.session_device_id": "1"}
    assert options is config.generate_options()


def test_extra_options() -> None:
    """The dict that ``generate_options`` fills; before that it has nothing."""
    config = LLMConfig()
    config.device_id = 1
    assert config.options == {}
    assert config.generate_options() is config.options
    assert config.options["ge.exec.deviceId"] == "1"


def test_extra_cluster_info() -> None:
    """JSON, parsed at once; IP texts of ``listen_ip_info`` become integers (spec §1.2)."""
    config = LLMConfig()
    assert config.cluster_info == ""
    config.cluster_info = '{"cluster_id": 1, "listen_ip_info": [{"ip": "1.2.3.4", "port": 5}]}'
    expected = {"cluster_id": 1, "listen_ip_info": [{"ip": 0x04030201, "port": 5}]}
    assert json.loads(config.generate_options()["llm.ClusterInfo"]) == expected
    refused(json.JSONDecodeError, setattr, config, "cluster_info", "{")
    refused(RuntimeError, setattr, config, "cluster_info", '{"listen_ip_info": [{"ip": "nowhere"}]}')
    refused(TypeError, setattr, config, "cluster_info", {})
    refused(TypeError, setattr, config, "cluster_info", None)


def test_extra_output_max_size() -> None:
    key = "llm.OutputMaxSize"
    check_property("output_max_size", None, [(7, {key: "7"}), (0, {key: "0"})], {TypeError: ["7", 1.0]}, none=True)


def test_extra_deploy_res_path() -> None:
    check_text("deploy_res_path", "llm.deployResPath", also_empty=False)


def test_extra_global_resource_config() -> None:
    check_text("global_resource_config", "llm.GlobalResourceConfig", also_empty=True)
