"""What the cache manager checks and asks of the engine: copies between local caches."""

from __future__ import annotations

import pytest

from llm_datadist_ray import (
    Cache,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray._native import NativeStatus
from tests.native.cache_fakes import Error, Fake, cache, check_raises, cpu_cache, desc, native_error

INVALID_ID = 2**64 - 1
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
FAILED = LLMStatusCode.LLM_FAILED
MAYBE_NONE = (AttributeError, TypeError)
BOTH = (Placement.DEVICE, Placement.HOST)


class TestCopyCache:
    """§9.1: destination first."""

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("dst", cache()), TypeError),
            ((cache(), "src"), TypeError),
            ((None, cache()), MAYBE_NONE),
            ((cache(), None), MAYBE_NONE),
            ((cache(blocks=True), cache()), PARAM_INVALID),
            ((cache(), cache(blocks=True)), PARAM_INVALID),
            ((cache(), cache(), "0"), TypeError),
            ((cache(), cache(), -1), ValueError),
            ((cache(), cache(), 2**32), ValueError),
            ((cache(), cache(), 0, None), TypeError),
            ((cache(), cache(), 0, 2**32), ValueError),
            ((cache(), cache(), 0, 0, 0.5), TypeError),
            ((cache(), cache(), 0, 0, -1), ValueError),
            ((cache(), cache(), 0, 0, 2**64), ValueError),
            ((cache(), cache(), 0, 0, 0, None), TypeError),
            ((cache(), cache(), 0, 0, 0, 2**63), ValueError),
            ((cache(), cache(), 0, 0, 0, 0), PARAM_INVALID),
            ((cache(), cache(), 0, 0, 0, -2), PARAM_INVALID),
            ((cache(), cache(), 0, 0, 0, -1, "7"), TypeError),
            ((cache(), cache(), 0, 0, 0, -1, -7), ValueError),
            ((cache(), cache(), 0, 0, 0, -1, 2**64), ValueError),
        ],
    )
    def test_arguments(self, args: tuple, error: Error) -> None:
        fake = Fake()
        check_raises(error, None, lambda: fake.manager.copy_cache(*args))
        assert fake.engine.calls == []

    def test_call(self) -> None:
        fake = Fake()
        fake.manager.copy_cache(cache(cache_id=4), cache(cache_id=5), 1, 2, 3, 4, 2**64 - 1)
        assert fake.engine.calls == [
            (
                "copy_entry",
                {
                    "src_cache_id": 5,
                    "dst_cache_id": 4,
                    "src_batch_index": 2,
                    "dst_batch_index": 1,
                    "offset_bytes": 3,
                    "size_bytes": 4,
                },
            )
        ]
        fake.engine.answers["copy_entry"] = native_error(NativeStatus.NO_CACHE)
        check_raises(NOT_EXIST, "words", lambda: fake.manager.copy_cache(cache(), cache()))


class TestCopyBlocks:
    """§9.2."""

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("cache", {}), TypeError),
            ((None, {}), MAYBE_NONE),
            ((cache(), {}), PARAM_INVALID),
            ((cache(blocks=True), [(0, 1)]), TypeError),
            ((cache(blocks=True), None), MAYBE_NONE),
            ((cache(blocks=True), {"0": [1]}), TypeError),
            ((cache(blocks=True), {0: 1}), TypeError),
            ((cache(blocks=True), {0: (1,)}), TypeError),
            ((cache(blocks=True), {0: ["1"]}), TypeError),
        ],
    )
    def test_arguments(self, args: tuple, error: Error) -> None:
        fake = Fake()
        check_raises(error, None, lambda: fake.manager.copy_blocks(*args))
        assert fake.engine.calls == []

    def test_call(self) -> None:
        fake = Fake()
        fake.manager.copy_blocks(cache(blocks=True), {})
        fake.manager.copy_blocks(cache(blocks=True), {0: []})
        assert fake.engine.calls == []
        fake.manager.copy_blocks(cache(blocks=True), {0: [1, 2], 5: [], 3: [4]})
        assert fake.engine.calls == [("copy_blocks", {"cache_id": 3, "src_blocks": [0, 0, 3], "dst_blocks": [1, 2, 4]})]


class TestSwapBlocks:
    """§9.3."""

    @pytest.mark.parametrize(
        ("args", "error", "match"),
        [
            (("c", cache(blocks=True), {}), TypeError, "src_cache"),
            ((cpu_cache(), "c", {}), TypeError, "dst_cache"),
            ((None, cache(blocks=True), {}), MAYBE_NONE, None),
            ((cpu_cache(), None, {}), MAYBE_NONE, None),
            ((cache(), cpu_cache(), {}), PARAM_INVALID, "src_cache should be a blocks cache"),
            ((cpu_cache(), cache(), {}), PARAM_INVALID, "dst_cache should be a blocks cache"),
            ((cpu_cache(), cache(blocks=True), [(0, 0)]), TypeError, "src_to_dst"),
            ((cpu_cache(), cache(blocks=True), {"0": 0}), TypeError, "src_to_dst keys"),
            ((cpu_cache(), cache(blocks=True), {0: "0"}), TypeError, "src_to_dst values"),
            ((cpu_cache(), cache(blocks=True, shape=[4, 8]), {0: 0}), PARAM_INVALID, "have 16 bytes, .* 8"),
            ((cpu_cache(), cache(blocks=True, tensors=3), {0: 0}), PARAM_INVALID, "2 tensors, dst_cache 3"),
            ((cpu_cache(), cache(blocks=True), {-1: 0}), PARAM_INVALID, r"key \[-1\] is not in \[0, 4\)"),
            ((cpu_cache(), cache(blocks=True), {4: 0}), PARAM_INVALID, r"key \[4\]"),
            ((cpu_cache(), cache(blocks=True), {0: 4}), PARAM_INVALID, r"value \[4\]"),
            ((cpu_cache(), cache(blocks=True), {0: -1}), PARAM_INVALID, r"value \[-1\]"),
            ((cpu_cache(), cpu_cache(), {0: 0}), PARAM_INVALID, "both caches are Placement.HOST"),
            ((cache(blocks=True), cache(blocks=True), {}), PARAM_INVALID, "both caches are Placement.DEVICE"),
        ],
    )
    def test_arguments(self, args: tuple, error: Error, match: str | None) -> None:
        check_raises(error, match, lambda: Fake().manager.swap_blocks(*args))

    def test_a_deallocated_cache_has_no_memory(self) -> None:
        gone = cache(blocks=True)
        gone.mark_deallocated()
        for args in ((cpu_cache(), gone, {0: 0}), (gone, cpu_cache(), {0: 0})):
            check_raises(PARAM_INVALID, "has been deallocated", lambda args=args: Fake().manager.swap_blocks(*args))

    def test_call(self) -> None:
        fake = Fake()
        fake.manager.swap_blocks(cpu_cache(), cache(blocks=True), {3: 1, 0: 2})
        assert fake.engine.calls == [
            (
                "copy_raw_blocks",
                {
                    "src_addresses": [4096, 8192],
                    "dst_addresses": [4096, 8192],
                    "block_bytes": 16,
                    "src_blocks": [3, 0],
                    "dst_blocks": [1, 2],
                },
            )
        ]

    @pytest.mark.parametrize("status", [NativeStatus.INVALID, NativeStatus.CLOSED])
    @pytest.mark.parametrize("blocks", [{}, {0: 0}])
    def test_a_failing_copy_is_failed(self, status: NativeStatus, blocks: dict) -> None:
        fake = Fake()
        fake.engine.answers["copy_raw_blocks"] = native_error(status)
        check_raises(
            FAILED,
            f"{len(blocks)} blocks from .* words",
            lambda: fake.manager.swap_blocks(cpu_cache(), cache(blocks=True), blocks),
        )

    def test_no_blocks_at_all(self) -> None:
        """``update_dim`` can make sense of a description whose batch_size stays 0."""
        none = desc(shape=[0, 16], placement=Placement.HOST)
        none.update_dim(0, 4)
        host = Cache.create_cpu_cache(none, [1, 2])
        for args in ((host, cache(blocks=True), {}), (cache(blocks=True), host, {})):
            check_raises(PARAM_INVALID, "batch_size", lambda args=args: Fake().manager.swap_blocks(*args))
