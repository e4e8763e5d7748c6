"""V1Runtime: pools, life, roles (spec api-kvcachemanager §1, api-datadist §6.2)."""

from __future__ import annotations

from typing import cast

import pytest

from llm_datadist_ray._native import NativeEngine, NativeError, NativeStatus
from llm_datadist_ray.errors import LLMStatusCode
from llm_datadist_ray.kv_cache import V1Runtime
from llm_datadist_ray.kv_cache.devices import available_memory_bytes, pool_bytes
from llm_datadist_ray.types import LLMRole, Placement
from tests.conformance.status import EXIST_LINK, FAILED, FEATURE_NOT_ENABLED, PARAM_INVALID, raises
from tests.native.fake_engine import FakeEngine, link_info
from tests.native.kv_cache_process import FakeProcess, v1_options

DECODER, PROMPT, MIX = LLMRole.DECODER, LLMRole.PROMPT, LLMRole.MIX
CAN_SWITCH = {"llm__EnableSwitchRole": "1"}
LISTEN = "127.0.0.1:26001"


class TestPools:
    def test_one_per_device(self) -> None:
        process = FakeProcess(PROMPT, 2, ge__flowGraphMemMaxSize=str(10 << 20), llm__MemoryUtilization="0.5")
        pool = {"placement": Placement.DEVICE, "size_bytes": 5 << 20, "page_shift": 16, "is_lazy": False}
        assert [engine.pools for engine in process.engines] == [[pool], [pool]]

    @pytest.mark.parametrize(("size", "utilization"), [(1 << 20, "0.0"), (0, "1.0"), ((1 << 16) - 1, "1.0")])
    def test_no_page(self, size: int, utilization: str) -> None:
        with raises(PARAM_INVALID, "has no page"):
            FakeProcess(PROMPT, ge__flowGraphMemMaxSize=str(size), llm__MemoryUtilization=utilization)

    def test_without_a_size(self) -> None:
        """Half of what is available, shared by the devices, and lazily."""
        options = v1_options(DECODER, 2)
        options = type(options)(
            role=DECODER, cluster_id=1, cache_manager=False, device_ids=(0, 1), mem_utilization=0.5, kv_pool_bytes=None
        )
        before = available_memory_bytes()
        size = pool_bytes(options)
        after = available_memory_bytes()
        assert 0.9 * min(before, after) < size * 8 < 1.1 * max(before, after)
        engines = [FakeEngine(), FakeEngine()]
        V1Runtime(options, lambda index: cast(NativeEngine, engines[index]))
        assert engines[1].pools[0]["is_lazy"]


class TestLife:
    def test_a_failing_device_takes_the_others_with_it(self) -> None:
        made = [FakeEngine(), FakeEngine()]

        def make_engine(index: int) -> NativeEngine:
            if index == 2:
                raise NativeError("cannot listen", NativeStatus.BIND)
            return cast(NativeEngine, made[index])

        with raises(FAILED):
            V1Runtime(v1_options(PROMPT, 3), make_engine)
        assert [engine.is_open for engine in made] == [False, False]

    def test_a_failing_pool_too(self) -> None:
        engines = [FakeEngine(), FakeEngine()]
        engines[1].fail["create_pool"] = NativeStatus.NO_MEMORY
        with raises(LLMStatusCode.LLM_OUT_OF_MEMORY, "^ge.flowGraphMemMaxSize: create_pool failed"):
            V1Runtime(v1_options(PROMPT, 2), lambda index: cast(NativeEngine, engines[index]))
        assert [engine.is_open for engine in engines] == [False, False]

    @pytest.mark.parametrize("role", [PROMPT, DECODER, MIX])
    def test_nobody_reaches_it_before_it_has_its_pool(self, role: LLMRole) -> None:
        process = FakeProcess(role, 2)
        expected = ["create_pool", "listen"] if role == PROMPT else ["create_pool"]
        assert [engine.names_called() for engine in process.engines] == [expected, expected]
        addresses = [engine.listening for engine in process.engines]
        assert addresses == ([("127.0.0.1", 26000), ("127.0.0.1", 26001)] if role == PROMPT else [None, None])

    def test_it_cannot_listen(self) -> None:
        engines = [FakeEngine(), FakeEngine()]
        engines[1].fail["listen"] = NativeStatus.BIND
        with raises(FAILED):
            V1Runtime(v1_options(PROMPT, 2), lambda index: cast(NativeEngine, engines[index]))
        assert [engine.is_open for engine in engines] == [False, False]

    def test_close_ends_every_device(self) -> None:
        process = FakeProcess(PROMPT, 2)
        process.runtime.close()
        assert [engine.is_open for engine in process.engines] == [False, False]


class TestSwitchRole:
    def test_there_and_back(self) -> None:
        process = FakeProcess(MIX, **CAN_SWITCH)
        process.runtime.switch_role(PROMPT, LISTEN)
        assert process.engine.listening == ("127.0.0.1", 26001)
        assert process.manager.role is PROMPT
        process.runtime.switch_role(DECODER, LISTEN)
        assert process.engine.listening == (None, 0)
        assert process.runtime.role is DECODER

    @pytest.mark.parametrize(
        ("process", "role", "listen_info", "code"),
        [
            ((PROMPT, 1, CAN_SWITCH), PROMPT, LISTEN, PARAM_INVALID),
            ((DECODER, 1, CAN_SWITCH), PROMPT, None, PARAM_INVALID),
            ((DECODER, 1, CAN_SWITCH), PROMPT, "127.0.0.1", PARAM_INVALID),
            ((DECODER, 1, CAN_SWITCH), PROMPT, "127.0.0.1:http", PARAM_INVALID),
            ((DECODER, 1, {}), DECODER, None, PARAM_INVALID),
            ((DECODER, 1, {}), PROMPT, None, PARAM_INVALID),
            ((DECODER, 1, {}), MIX, None, FEATURE_NOT_ENABLED),
            ((DECODER, 2, CAN_SWITCH), MIX, None, FEATURE_NOT_ENABLED),
        ],
    )
    def test_refused(self, process: tuple, role: LLMRole, listen_info: str | None, code: LLMStatusCode) -> None:
        fake = FakeProcess(process[0], process[1], **process[2])
        fake.engine.linked[2] = link_info(2)
        listening = fake.engine.listening
        with raises(code):
            fake.runtime.switch_role(role, listen_info)
        assert fake.runtime.role is process[0]
        assert fake.engine.listening == listening

    def test_links_stand_in_the_way_but_broken_ones(self) -> None:
        process = FakeProcess(DECODER, **CAN_SWITCH)
        process.engine.linked[2] = link_info(2)
        with raises(EXIST_LINK):
            process.runtime.switch_role(MIX)
        process.engine.linked[2] = link_info(2, is_ready=False)
        process.runtime.switch_role(MIX)

    def test_it_cannot_listen(self) -> None:
        process = FakeProcess(DECODER, **CAN_SWITCH)
        process.engine.fail["listen"] = NativeStatus.BIND
        with raises(FAILED):
            process.runtime.switch_role(PROMPT, LISTEN)
        assert process.runtime.role is DECODER
