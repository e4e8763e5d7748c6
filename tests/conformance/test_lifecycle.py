"""init and finalize (spec api-datadist §1, §2), in this process: no peer is needed, and no path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from llm_datadist_ray.datadist import _shutdown_handler
from tests.conformance.status import FAILED, FEATURE_NOT_ENABLED, PARAM_INVALID, raises
from tests.process_counts import ProcessCounts, settled_counts

BEFORE_INIT = {
    "link_clusters": ([],),
    "unlink_clusters": ([],),
    "link": ("name", {1: 0, 2: 1}, "{}"),
    "unlink": (1,),
    "query_register_mem_status": (1,),
    "check_link_status": (1,),
    "switch_role": (LLMRole.MIX,),
}


@pytest.fixture
def dist() -> Iterator[LLMDataDist]:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    yield dist
    dist.finalize()
    assert LLMDataDist.llm_engine_instance is None


def options(**config: Any) -> dict[str, str]:
    llm_config = LLMConfig()
    llm_config.enable_cache_manager = True
    for name, value in config.items():
        setattr(llm_config, name, value)
    return llm_config.generate_options()


def register(dist: LLMDataDist) -> int:
    memory = np.zeros(64, np.uint8)
    return dist.cache_manager.register_cache(CacheDesc(1, [4, 16], DataType.DT_INT8), [memory.ctypes.data]).cache_id


def test_before_init(dist: LLMDataDist) -> None:
    assert dist.cluster_id == 1
    for method, args in BEFORE_INIT.items():
        with pytest.raises(RuntimeError, match=f"{method}.*init"):
            getattr(dist, method)(*args)
    for name in ("cache_manager", "kv_cache_manager"):
        with pytest.raises(RuntimeError, match=f"{name}.*init"):
            getattr(dist, name)
    dist.finalize()


def test_init_twice_is_one_init(dist: LLMDataDist) -> None:
    dist.init(options())
    engine = dist.native_engine
    dist.init({"nonsense": "ignored"})
    assert dist.native_engine is engine
    assert LLMDataDist.llm_engine_instance is dist


def test_one_live_instance(dist: LLMDataDist) -> None:
    dist.init(options())
    other = LLMDataDist(LLMRole.DECODER, 2)
    with raises(FAILED):
        other.init(options())
    dist.finalize()
    other.init(options())
    other.finalize()


def test_cycles_on_one_object(dist: LLMDataDist) -> None:
    """Ids start again at 1, and nothing is left of the cycle before."""
    same_options = options(listen_ip_info="127.0.0.1:0")
    counts = None
    for _ in range(6):
        dist.init(same_options)
        assert [register(dist), register(dist)] == [1, 2]
        dist.finalize()
        dist.finalize()
        if counts is None:
            counts = ProcessCounts.of()
    assert settled_counts(counts) == counts


def test_options_are_not_modified(dist: LLMDataDist) -> None:
    given = options(local_comm_res="", listen_ip_info="127.0.0.1:0")
    copy = dict(given)
    dist.init(given)
    assert given == copy


def test_wrong_mode(dist: LLMDataDist) -> None:
    dist.init(options())
    with raises(PARAM_INVALID):
        _ = dist.kv_cache_manager
    with raises(PARAM_INVALID):
        dist.check_link_status(2)


def test_local_comm_res_implies_the_manager(dist: LLMDataDist) -> None:
    config = LLMConfig()
    config.local_comm_res = ""
    dist.init(config.generate_options())
    assert dist.native_engine.remote_access
    assert register(dist) == 1


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({}, "v1"),
        (options(mem_pool_cfg='{"memory_size": 1048576}'), "llm.MemPoolConfig"),
        (options(host_mem_pool_cfg='{"memory_size": 1048576}'), "llm.HostMemPoolConfig"),
        (
            options(transfer_backend="hixl", listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True),
            "hixl",
        ),
    ],
)
def test_what_is_not_there_says_so(dist: LLMDataDist, given: dict[str, str], feature: str) -> None:
    with raises(FEATURE_NOT_ENABLED, feature):
        dist.init({"ge.exec.deviceId": "0", "llm.listenIpInfo": "127.0.0.1:0", **given})
    assert LLMDataDist.llm_engine_instance is None


def test_methods_that_are_not_there_say_so(dist: LLMDataDist) -> None:
    dist.init(options())
    for method in ("link", "unlink", "query_register_mem_status"):
        with raises(FEATURE_NOT_ENABLED, method):
            getattr(dist, method)(*BEFORE_INIT[method])
    desc = CacheDesc(2, [4, 16], DataType.DT_INT8)
    for method in ("allocate_cache", "allocate_blocks_cache", "swap_blocks", "copy_cache", "transfer_cache_async"):
        with raises(FEATURE_NOT_ENABLED, method):
            getattr(dist.cache_manager, method)(desc)


def test_unknown_path(dist: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LDR_PATHS", "shm,pigeon")
    with raises(PARAM_INVALID, "pigeon"):
        dist.init(options())
    monkeypatch.setenv("LDR_PATHS", "hixl")
    with raises(FEATURE_NOT_ENABLED, "libcann_hixl.so"):
        dist.init(options())
    monkeypatch.setenv("LDR_PATHS", "tcp")
    dist.init(options())
    assert [str(path) for path in dist.native_engine.info().paths] == ["tcp"]


def test_bad_options(dist: LLMDataDist) -> None:
    with pytest.raises(TypeError):
        dist.init([])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        dist.init(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        dist.init({**options(), "llm.listenIpInfo": 1})  # type: ignore[dict-item]
    with raises(PARAM_INVALID):
        dist.init(options(listen_ip_info="nowhere:0"))
    with socket.create_server(("127.0.0.1", 0)) as other, raises(FAILED):
        dist.init(options(listen_ip_info=f"127.0.0.1:{other.getsockname()[1]}"))
    dist.init(options())


def test_role_none_fails_at_init() -> None:
    with pytest.raises(TypeError):
        LLMDataDist(None, 1).init(options())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        LLMDataDist(1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        LLMDataDist(LLMRole.MIX, 2**64)


@pytest.mark.logs("exactly one remote IP entry")
def test_link_arguments(dist: LLMDataDist) -> None:
    """Spec §4.1: checked before anything is attempted."""
    dist.init(options())
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    with raises(PARAM_INVALID, "local_ip_info_list is empty"):
        dist.link_clusters([info])
    assert dist.unlink_clusters([info], force=True)[0] == 0
    info.append_local_ip_info("127.0.0.1", 0)
    for bad_timeout, error in ((0, "LE"), (-1, "LE"), (2**31, ValueError), ("1", TypeError), (None, TypeError)):
        for method in (dist.link_clusters, dist.unlink_clusters):
            if error == "LE":
                with raises(PARAM_INVALID):
                    method([info], bad_timeout)
            else:
                with pytest.raises(error):
                    method([info], bad_timeout)
    for clusters in (info, [1], None):
        with pytest.raises(TypeError):
            dist.link_clusters(clusters)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        dist.unlink_clusters([info], 1000, 1)  # type: ignore[arg-type]
    nameless = LLMClusterInfo()
    nameless.append_local_ip_info("127.0.0.1", 0)
    with pytest.raises(TypeError):
        dist.link_clusters([nameless])
    # Attempted, and each cluster's own failure: no or two remote addresses, two local ones, no address at all.
    for addresses in (([1], []), ([1], [1, 2]), ([1, 2], [1]), ([1], [None])):
        info = LLMClusterInfo()
        info.remote_cluster_id = 2
        for ip in addresses[0]:
            info.append_local_ip_info(ip, 0)
        for ip in addresses[1]:
            info.append_remote_ip_info(ip, 1)  # type: ignore[arg-type]
        assert dist.link_clusters([info]) == (PARAM_INVALID, [PARAM_INVALID])


def test_shutdown_handler(dist: LLMDataDist) -> None:
    dist.init(options())
    _shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None
    _shutdown_handler()


INIT = (
    "from llm_datadist_ray import LLMConfig, LLMDataDist, LLMRole\n"
    "config = LLMConfig(); config.enable_cache_manager = True; config.listen_ip_info = '127.0.0.1:0'\n"
    "dist = LLMDataDist(LLMRole.PROMPT, 1); dist.init(config.generate_options())\n"
)


def run(program: str, **env: str) -> str:
    """What a fresh interpreter prints; it succeeds, and says nothing on standard error."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_exit_without_finalize_is_clean() -> None:
    """The exit hook finalizes: no ResourceWarning, no crash."""
    assert run(INIT) == ""


def test_log() -> None:
    """``LLM_DATADIST`` writes to stdout, errors unless the environment asks for more (spec api-types §1)."""
    info = LLMClusterInfo.__name__
    fail = (
        f"from llm_datadist_ray import {info}\n"
        f"info = {info}(); info.remote_cluster_id = 7; info.append_local_ip_info('127.0.0.1', 0)\n"
        "dist.unlink_clusters([info], force=True); dist.link_clusters([info]); dist.finalize()\n"
    )
    lines = {level: run(INIT + fail, ASCEND_GLOBAL_LOG_LEVEL=level).splitlines() for level in ("", "3", "2", "1")}
    for level, names in (("", ["ERROR"]), ("3", ["ERROR"]), ("2", ["WARNING", "ERROR"])):
        assert [line.split("]")[0][1:] for line in lines[level]] == names
    assert "LLM_DATADIST" in lines["3"][0]
    assert "link with cluster 7 failed: exactly one remote IP entry" in lines["3"][0]
    assert "cluster 7 is not linked" in lines["2"][0]
    assert "cluster 1 is initialised" in lines["1"][0]
    assert "cluster 1 is finalized" in lines["1"][-1]


def test_log_is_the_applications_too() -> None:
    """Its level and handlers are left alone, records reach the root logger, and importing again adds nothing."""
    program = (
        "import importlib, logging\n"
        "logging.getLogger('LLM_DATADIST').setLevel(logging.WARNING)\n"
        "import llm_datadist_ray.log; importlib.reload(llm_datadist_ray.log)\n"
        "logger = logging.getLogger('LLM_DATADIST')\n"
        "print(logger.level, len(logger.handlers), logger.propagate, logging.getLogger().handlers)\n"
    )
    assert run(program, ASCEND_GLOBAL_LOG_LEVEL="0") == "30 1 True []\n"


def test_star_import() -> None:
    """Spec api-types §1, "Do"."""
    assert run("from llm_datadist_ray import *\nprint(LLMDataDist.__name__, Cache.__name__)") == "LLMDataDist Cache\n"
