"""Registration and the arguments of the transfer methods (spec api-cachemanager §3, §5.2, §7), in this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from llm_datadist_ray.cache import CacheManager
from tests.conformance.status import PARAM_INVALID, raises

INVALID_ID = 2**64 - 1
DESC = CacheDesc(2, [4, 16], DataType.DT_INT8)
ADDRS = [1 << 40, 1 << 41]


def manager(remote_access: bool) -> Iterator[CacheManager]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = remote_access
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init(config.generate_options())
    yield dist.cache_manager
    dist.finalize()


@pytest.fixture
def two_sided() -> Iterator[CacheManager]:
    yield from manager(remote_access=False)


@pytest.fixture
def remote_access() -> Iterator[CacheManager]:
    yield from manager(remote_access=True)


class TestRegister:
    def test_results(self, two_sided: CacheManager) -> None:
        contiguous = two_sided.register_cache(DESC, ADDRS, [CacheKey(1, 0), CacheKey(1, INVALID_ID)])
        paged = two_sided.register_blocks_cache(DESC, ADDRS, BlocksCacheKey(1, 7))
        again = two_sided.register_cache(DESC, ADDRS)
        assert [cache.cache_id for cache in (contiguous, paged, again)] == [1, 2, 3]
        assert [cache.is_blocks_cache for cache in (contiguous, paged, again)] == [False, True, False]
        assert contiguous.cache_desc is DESC
        assert contiguous.tensor_addrs == ADDRS

    def test_fake_addresses_are_never_touched(self, remote_access: CacheManager) -> None:
        one = CacheDesc(1, [4, 16], DataType.DT_INT8)
        assert [remote_access.register_cache(one, [1]).cache_id for _ in range(3)] == [1, 2, 3]
        remote_access.unregister_cache(1)
        remote_access.unregister_cache(1)
        remote_access.unregister_cache(12345)
        assert remote_access.register_cache(one, [1]).cache_id == 4

    @pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
    def test_arguments(self, two_sided: CacheManager, method: str) -> None:
        register = getattr(two_sided, method)
        for args in ((1, ADDRS), (DESC, tuple(ADDRS)), (DESC, ["1", "2"]), (DESC, None), (DESC, ADDRS, [1])):
            with pytest.raises(TypeError):
                register(*args)
        with pytest.raises((AttributeError, TypeError)):
            register(None, ADDRS)
        with pytest.raises(TypeError):
            register(DESC, ADDRS, remote_accessible=1)
        for address in (-1, 2**64):
            with pytest.raises(TypeError):
                register(DESC, [1, address])
        for addrs in ([], [1], [1, 2, 3], [1, 0]):
            with raises(PARAM_INVALID):
                register(DESC, addrs)
        for shape in ([4, 0], [0, 4], [4, -1], [1] * 32):
            with raises(PARAM_INVALID):
                register(CacheDesc(2, shape, DataType.DT_INT8), ADDRS)
        assert register(CacheDesc(2, [1] * 31, DataType.DT_INT8), ADDRS).cache_id >= 1

    def test_keys(self, two_sided: CacheManager) -> None:
        with raises(PARAM_INVALID):
            two_sided.register_cache(DESC, ADDRS, [CacheKey(1, number) for number in range(5)])
        with pytest.raises(TypeError):
            two_sided.register_cache(DESC, ADDRS, CacheKey(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            two_sided.register_cache(DESC, ADDRS, [BlocksCacheKey(1)])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            two_sided.register_blocks_cache(DESC, ADDRS, CacheKey(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            two_sided.register_cache(DESC, ADDRS, [CacheKey(1, number) for number in range(5)], "yes")  # type: ignore[arg-type]
        two_sided.register_cache(DESC, ADDRS, [CacheKey(1, INVALID_ID)] * 4)
        two_sided.register_cache(DESC, ADDRS, (CacheKey(1, 1), CacheKey(1, 1)))

    def test_after_link(self, two_sided: CacheManager) -> None:
        two_sided.set_is_call_linked()
        with raises(PARAM_INVALID):
            two_sided.register_cache(DESC, ADDRS, remote_accessible=True)
        two_sided.register_cache(DESC, ADDRS)
        two_sided.register_blocks_cache(DESC, ADDRS, remote_accessible=False)

    @pytest.mark.parametrize(("bad", "error"), [("1", TypeError), (None, TypeError), (2**63, ValueError)])
    def test_unregister_arguments(self, two_sided: CacheManager, bad: object, error: type[Exception]) -> None:
        with pytest.raises(error):
            two_sided.unregister_cache(bad)  # type: ignore[arg-type]

    def test_table_too_large(self, remote_access: CacheManager) -> None:
        """Spec §3.4: the table that a peer copies has at most 1 MiB in remote-access mode."""
        big = CacheDesc(60_000, [4, 16], DataType.DT_INT8)
        remote_access.register_blocks_cache(big, [1] * 60_000)
        with raises(PARAM_INVALID):
            for _ in range(3):
                remote_access.register_blocks_cache(big, [1] * 60_000)

    def test_table_is_not_limited_in_two_sided_mode(self, two_sided: CacheManager) -> None:
        big = CacheDesc(60_000, [4, 16], DataType.DT_INT8)
        for _ in range(4):
            two_sided.register_blocks_cache(big, [1] * 60_000)

    def test_a_desc_serves_both_kinds(self, two_sided: CacheManager) -> None:
        """The flag is not in the user's object (spec api-types §5)."""
        assert two_sided.register_blocks_cache(DESC, ADDRS).is_blocks_cache
        assert not two_sided.register_cache(DESC, ADDRS).is_blocks_cache

    def test_host_memory(self, remote_access: CacheManager) -> None:
        desc = CacheDesc(2, (4, 16), DataType.DT_INT8, placement=Placement.HOST)
        assert remote_access.register_cache(desc, ADDRS, (), True).cache_id == 1


class TestPullArguments:
    @pytest.fixture
    def cache(self, two_sided: CacheManager) -> Cache:
        return two_sided.register_cache(DESC, ADDRS)

    @pytest.fixture
    def paged(self, two_sided: CacheManager) -> Cache:
        return two_sided.register_blocks_cache(DESC, ADDRS)

    def test_cache_key_rule(self, two_sided: CacheManager, cache: Cache, paged: Cache) -> None:
        for key in (CacheKey(2, 1, 0, 1), CacheKey(2, INVALID_ID)):
            with raises(PARAM_INVALID, "exactly one"):
                CacheManager.check_cache_key(key)
            with raises(PARAM_INVALID, "exactly one"):
                two_sided.pull_cache(key, cache)
            with raises(PARAM_INVALID, "exactly one"):
                two_sided.pull_blocks(key, paged, [], [0])
        CacheManager.check_cache_key(CacheKey(2, 1))
        CacheManager.check_cache_key(CacheKey(2, INVALID_ID, 0, 1))

    def test_pull_cache(self, two_sided: CacheManager, cache: Cache, paged: Cache) -> None:
        key = CacheKeyByIdAndIndex(2, 1)
        for args in (
            (BlocksCacheKey(2), cache),
            ("key", cache),
            (key, "cache"),
            (key, cache, "0"),
            (key, cache, 0, "1"),
        ):
            with pytest.raises(TypeError):
                two_sided.pull_cache(*args)
        for args in ((key, cache, -1), (key, cache, 2**32), (key, cache, 0, 2**63)):
            with pytest.raises(ValueError):
                two_sided.pull_cache(*args)
        for args in ((key, paged), (key, cache, 0, 0), (key, cache, 0, -2)):
            with raises(PARAM_INVALID):
                two_sided.pull_cache(*args)
        for args in ((None, cache), (key, None)):
            with pytest.raises((AttributeError, TypeError)):
                two_sided.pull_cache(*args)

    def test_pull_blocks(self, two_sided: CacheManager, cache: Cache, paged: Cache) -> None:
        key, by_id = BlocksCacheKey(2), CacheKeyByIdAndIndex(2, 1)
        for args in (
            ("key", paged, [0], [0]),
            (key, "cache", [0], [0]),
            (key, paged, None, [0]),
            (key, paged, [0], None),
            (key, paged, {0}, [0]),
            (key, paged, "0", [0]),
            (key, paged, [0.5], [0]),
            (key, paged, ["0"], [0]),
            (key, paged, [0], [None]),
            (key, paged, [-1], [0]),
            (key, paged, [0], [-1]),
            (key, paged, [2**64], [0]),
            (key, paged, np.array([0], np.uint8), [0]),
            (key, paged, np.array([[0]], np.int64), [0]),
            (key, paged, np.array([0.0]), [0]),
            (BlocksCacheKey(None), paged, [0], [0]),
            (BlocksCacheKey(-1), paged, [0], [0]),
            (BlocksCacheKey(2, 2**64), paged, [0], [0]),
        ):
            with pytest.raises(TypeError):
                two_sided.pull_blocks(*args)
        for args in (
            (key, cache, [0], [0]),
            (key, paged, [0], []),
            (key, paged, [0], np.array([], np.int32)),
            (key, paged, [], [0]),
            (key, paged, (), [0]),
            (key, paged),
            (by_id, paged, [0], [0]),
            (CacheKey(2, 1), paged, [0], [0]),
        ):
            with raises(PARAM_INVALID):
                two_sided.pull_blocks(*args)
        for args in ((None, paged, [0], [0]), (key, None, [0], [0])):
            with pytest.raises((AttributeError, TypeError)):
                two_sided.pull_blocks(*args)

    @pytest.mark.parametrize(
        ("kwargs", "error"),
        [
            ({"tensor_num_per_layer": "2"}, TypeError),
            ({"tensor_num_per_layer": None}, TypeError),
            ({"tensor_num_per_layer": -1}, ValueError),
            ({"tensor_num_per_layer": 2**32}, ValueError),
            ({"tensor_num_per_layer": 0}, "LE"),
            ({"src_layer_range": [0, 1]}, TypeError),
            ({"dst_layer_range": 1}, TypeError),
            ({"src_layer_range": range(0, 2, 2)}, "LE"),
            ({"dst_layer_range": range(1, 0, -1)}, "LE"),
            ({"dst_layer_range": range(-1, 1)}, "LE"),
        ],
    )
    def test_keywords(
        self, two_sided: CacheManager, cache: Cache, paged: Cache, kwargs: dict, error: type[Exception] | str
    ) -> None:
        for method, args in (
            (two_sided.pull_cache, (CacheKeyByIdAndIndex(2, 1), cache)),
            (two_sided.pull_blocks, (BlocksCacheKey(2), paged, [0], [0])),
        ):
            if error == "LE":
                with raises(PARAM_INVALID):
                    method(*args, **kwargs)  # type: ignore[operator]
            else:
                with pytest.raises(error):  # type: ignore[call-overload]
                    method(*args, **kwargs)  # type: ignore[operator]

    def test_remote_access_mode_pulls_entries_by_id_only(self, remote_access: CacheManager) -> None:
        cache = remote_access.register_cache(DESC, ADDRS)
        with pytest.raises(TypeError):
            remote_access.pull_cache(CacheKey(2, 1), cache)


class TestPushArguments:
    @pytest.fixture
    def cache(self, remote_access: CacheManager) -> Cache:
        return remote_access.register_cache(DESC, ADDRS)

    @pytest.fixture
    def paged(self, remote_access: CacheManager) -> Cache:
        return remote_access.register_blocks_cache(DESC, ADDRS)

    def test_push_cache(self, remote_access: CacheManager, cache: Cache, paged: Cache) -> None:
        key = CacheKeyByIdAndIndex(2, 1)
        for args in (
            (None, cache),
            (CacheKey(2, 1), cache),
            (BlocksCacheKey(2), cache),
            (key, None),
            (key, "cache"),
            (key, cache, "0"),
            (key, cache, 0, [0, 1]),
            (key, cache, 0, None, 1),
            (key, cache, 0, None, None, "1"),
            (key, cache, 0, None, None, -1, None),
            (CacheKeyByIdAndIndex(2, -1), cache),
        ):
            with pytest.raises(TypeError):
                remote_access.push_cache(*args)
        for args in ((key, cache, -1), (key, cache, 0, None, None, 2**63), (key, cache, 0, None, None, -1, -1)):
            with pytest.raises(ValueError):
                remote_access.push_cache(*args)
        for args in (
            (key, paged),
            (key, cache, 0, range(1), range(2)),
            (key, cache, 0, range(2)),
            (key, cache, 0, range(0)),
            (key, cache, 0, range(0, 2, 2)),
            (key, cache, 0, range(-1, 1)),
            (key, cache, 0, range(2**64)),
            (key, cache, 0, None, None, 16),
            (key, cache, 0, None, None, 0),
            (key, cache, 0, None, None, -1, 0),
            (key, cache, 0, range(1), None, -1, 3),
        ):
            with raises(PARAM_INVALID):
                remote_access.push_cache(*args)

    def test_push_blocks(self, remote_access: CacheManager, cache: Cache, paged: Cache) -> None:
        key = BlocksCacheKey(2)
        for args in (
            (CacheKeyByIdAndIndex(2, 1), paged, [0], [0]),
            (key, "cache", [0], [0]),
            (key, paged, "0", [0]),
            (key, paged, [0], None),
            (key, paged, [-1], [0]),
            (key, paged, [0.5], [0]),
            (key, paged, [0], [0], [0]),
        ):
            with pytest.raises(TypeError):
                remote_access.push_blocks(*args)
        for args in (
            (key, cache, [0], [0]),
            (key, paged, [0], []),
            (key, paged, [0]),
            (key, paged, [0], [0], range(1), range(2)),
        ):
            with raises(PARAM_INVALID):
                remote_access.push_blocks(*args)
        for args in ((None, paged, [0], [0]), (key, None, [0], [0])):
            with pytest.raises((AttributeError, TypeError)):
                remote_access.push_blocks(*args)
