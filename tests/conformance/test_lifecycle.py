"""init and finalize (spec api-datadist §1, §2), in this process: no peer is needed, and no path."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.datadist import _shutdown_handler
from llm_datadist_ray.kv_cache import KvCacheManager
from tests.conformance.collective import free_port, local_table
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
    "link_states": (),
    "on_link_change": (print,),
}

POOL_BYTES = 4 << 20


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
    for name in ("cache_manager", "kv_cache_manager", "native_engine", "events"):
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


class Cycle:
    """One object's life with a pool, a listener, a linked peer and (v2) a collective link, as often as wanted."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.dist = LLMDataDist(LLMRole.PROMPT, 1)
        self.peer = NativeEngine(cluster_id=2, remote_access=False)
        port = free_port()
        listen = f"127.0.0.1:{port}"
        pool = json.dumps({"memory_size": POOL_BYTES})
        self.port = port
        self.rank_table = local_table(2)
        self.options = (
            {**V1, "llm.listenIpInfo": listen}
            if interface == "v1"
            else options(mem_pool_cfg=pool, listen_ip_info=listen)
        )

    def run(self) -> None:
        self.dist.init(self.options)
        manager = self.dist.kv_cache_manager if self.interface == "v1" else self.dist.cache_manager
        keys = [CacheKey(1, req_id=7)]
        cache = manager.allocate_cache(CacheDesc(2, [4, 4096], DataType.DT_INT8), keys)
        assert cache.cache_id == 1
        link = self.peer.link(ip="127.0.0.1", port=self.port, timeout_s=10.0)
        assert (link.cluster_id, link.is_ready) == (1, True)
        if self.interface == "v2":
            changes = []
            self.dist.on_link_change(changes.append)
            assert [state.cluster_id for state in self.dist.link_states()] == [2]
            assert self.dist.link("in progress", {1: 0, 3: 1}, self.rank_table) == 1
        self.dist.finalize()
        self.peer.unlink(1, force=True, timeout_s=10.0)

    def close(self) -> None:
        self.dist.finalize()
        self.peer.close()


@pytest.mark.parametrize("interface", ["v1", "v2"])
def test_200_lives_leave_nothing(interface: str) -> None:
    """Descriptors, threads, mappings as before, and resident memory within 1 %."""
    cycle = Cycle(interface)
    try:
        for _ in range(20):
            cycle.run()
        gc.collect()
        counts, resident = ProcessCounts.of(), resident_bytes()
        for _ in range(180):
            cycle.run()
        gc.collect()
        assert not settled_counts(counts).exceed(counts)
        assert resident_bytes() <= resident * 1.01
    finally:
        cycle.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


V1 = {"ge.exec.deviceId": "0", "ge.flowGraphMemMaxSize": str(POOL_BYTES)}

WRONG_MODE = [
    # spec §1: LE in the interface that a member does not belong to, whatever the arguments
    ("v1", "cache_manager", None),
    ("v1", "link", (1, None, None)),
    ("v1", "unlink", ("x",)),
    ("v1", "query_register_mem_status", ("x",)),
    ("v1", "native_engine", None),
    ("v1", "events", None),
    ("v1", "link_states", ()),
    ("v1", "on_link_change", (print,)),
    ("v2", "kv_cache_manager", None),
    ("v2", "check_link_status", ("x",)),
]


@pytest.mark.parametrize(("interface", "member", "args"), WRONG_MODE)
def test_wrong_mode(interface: str, member: str, args: tuple[Any, ...] | None) -> None:
    dist = LLMDataDist(LLMRole.DECODER, 1)
    dist.init(V1 if interface == "v1" else options())
    try:
        with raises(PARAM_INVALID, f"{member} belongs to the v[12] interface"):
            found = getattr(dist, member)
            if args is not None:
                found(*args)
    finally:
        dist.finalize()


def test_each_interface_has_its_manager() -> None:
    dist = LLMDataDist(LLMRole.DECODER, 1)
    for given, name, kind in ((V1, "kv_cache_manager", KvCacheManager), (options(), "cache_manager", CacheManager)):
        dist.init(given)
        assert isinstance(getattr(dist, name), kind)
        dist.finalize()
        with pytest.raises(RuntimeError, match=name):
            getattr(dist, name)


def test_local_comm_res_implies_the_manager(dist: LLMDataDist) -> None:
    config = LLMConfig()
    config.local_comm_res = ""
    dist.init(config.generate_options())
    assert dist.native_engine.remote_access
    assert register(dist) == 1


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


@pytest.mark.parametrize("interface", ["v1", "v2"])
def test_types_of_switch_role_and_force(dist: LLMDataDist, interface: str) -> None:
    dist.init(
        {**V1, "llm.listenIpInfo": "127.0.0.1:0", "llm.EnableSwitchRole": "1"} if interface == "v1" else options()
    )
    for role, switch_options in ((1, None), (None, None), (LLMRole.MIX, []), (LLMRole.MIX, {"llm.listenIpInfo": 1})):
        with pytest.raises(TypeError):
            dist.switch_role(role, switch_options)  # type: ignore[arg-type]
    for force in (1, None):
        with pytest.raises(TypeError, match="force"):
            dist.unlink_clusters([], 1000, force)  # type: ignore[arg-type]


@pytest.mark.parametrize("interface", ["v1", "v2"])
def test_pools_come_before_the_listener(dist: LLMDataDist, interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody reaches an engine which then fails. A pool that fails names the option that it comes from."""
    ports = []
    create_pool = NativeEngine.create_pool

    def watch(engine: NativeEngine, **params: Any) -> None:
        ports.append(engine.info().listen_port)
        create_pool(engine, **params)

    monkeypatch.setattr(NativeEngine, "create_pool", watch)

    def given(pool_bytes: int) -> dict[str, str]:
        if interface == "v1":
            return {**V1, "ge.flowGraphMemMaxSize": str(pool_bytes), "llm.listenIpInfo": "127.0.0.1:0"}
        return options(mem_pool_cfg=json.dumps({"memory_size": pool_bytes}), listen_ip_info="127.0.0.1:0")

    key = "ge.flowGraphMemMaxSize" if interface == "v1" else "llm.MemPoolConfig"
    with raises(LLMStatusCode.LLM_OUT_OF_MEMORY, f"^{key}: create pool: "):
        dist.init(given(1 << 44))
    dist.init(given(POOL_BYTES))
    assert ports == [0, 0]


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


@pytest.mark.parametrize("interface", ["v1", "v2"])
def test_several_clusters_at_exit(interface: str) -> None:
    """An application that unlinks in an exit handler of its own, when no pool can start threads any more."""
    given = repr(V1) if interface == "v1" else "{'llm.EnableCacheManager': '1'}"
    program = (
        "import atexit\n"
        "from llm_datadist_ray import LLMClusterInfo, LLMDataDist, LLMRole\n"
        f"dist = LLMDataDist(LLMRole.DECODER, 1); dist.init({given})\n"
        "infos = [LLMClusterInfo() for _ in range(3)]\n"
        "for index, info in enumerate(infos):\n"
        "    info.remote_cluster_id = 7 + index\n"
        "    info.append_local_ip_info('127.0.0.1', 0); info.append_remote_ip_info('127.0.0.1', 1)\n"
        "def at_exit():\n"
        "    overall, codes = dist.unlink_clusters(infos, force=True)\n"
        "    print(overall.name, *(code.name for code in codes))\n"
        "atexit.register(at_exit)\n"
    )
    each = "LLM_NOT_YET_LINK" if interface == "v1" else "LLM_SUCCESS"
    assert run(program) == f"LLM_SUCCESS {each} {each} {each}\n"


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
