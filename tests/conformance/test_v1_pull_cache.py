"""pull_cache of v1, byte by byte, and what it consumes (spec api-kvcachemanager §4)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, raises
from tests.conformance.v1_ends import (
    INVALID_ID,
    V1Ends,
    blocks_key,
    copy_entry,
    one_path,
    prefix_key,
    request_key,
    two_devices,
)

pytest_plugins = ["tests.conformance.v1_fixtures"]


class TestBytes:
    @pytest.mark.parametrize("size", [-1, 1, 95, 96])
    @pytest.mark.parametrize(("dst_batch", "src_batch"), [(0, 0), (5, 2)])
    def test_size_and_batch(self, v1_linked: V1Ends, size: int, dst_batch: int, src_batch: int) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", src.key(src_batch), dst, dst_batch, size)
        copy_entry(dst, dst_batch, src, src_batch, size=96 if size == -1 else size)
        v1_linked.check_only_path_used(v1_linked.decoder)

    @pytest.mark.parametrize(
        ("ranges", "pairs"),
        [
            ({"src_layer_range": range(2), "dst_layer_range": range(2)}, None),
            ({"src_layer_range": range(1), "dst_layer_range": range(1, 2)}, [(2, 0), (3, 1)]),
            ({"src_layer_range": range(3, 4), "dst_layer_range": range(1), "tensor_num_per_layer": 1}, [(0, 3)]),
            ({"src_layer_range": range(2, 2), "nonsense": "ignored"}, None),
        ],
    )
    def test_layers(self, v1_linked: V1Ends, ranges: dict, pairs: list | None) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", src.key(1), dst, 4, **ranges)
        copy_entry(dst, 4, src, 1, pairs=pairs)

    @pytest.mark.parametrize(
        ("src_offset", "dst_offset", "size", "moved"),
        [
            (0, 0, -1, 96),
            (32, 0, 64, 64),
            (None, 40, -1, 56),
            (32, 40, -1, 56),
            (40, 95, -1, 1),
            (1, None, 5, 5),
            (95, 0, 1, 1),
        ],
    )
    def test_offsets(
        self, v1_linked: V1Ends, src_offset: int | None, dst_offset: int | None, size: int, moved: int
    ) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        offsets = {"src_cache_offset": src_offset, "dst_cache_offset": dst_offset}
        v1_linked.decoder.call("pull_cache", src.key(2), dst, 3, size, **offsets)
        copy_entry(dst, 3, src, 2, size=moved, src_offset=src_offset or 0, dst_offset=dst_offset or 0)

    def test_entries_of_different_sizes(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src", entry_bytes=200), v1_linked.decoder.cache("dst", entry_bytes=64)
        v1_linked.decoder.call("pull_cache", src.key(3), dst, 1)
        copy_entry(dst, 1, src, 3)
        v1_linked.decoder.call("pull_cache", src.key(3), dst, 2, src_cache_offset=136)
        copy_entry(dst, 2, src, 3, src_offset=136)

    def test_large_entries(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", tensors=2, entries=2, entry_bytes=3_000_001)
        dst = v1_linked.decoder.cache("dst", tensors=2, entries=2, entry_bytes=3_000_001)
        v1_linked.decoder.call("pull_cache", src.key(1), dst)
        copy_entry(dst, 0, src, 1)

    @two_devices
    def test_every_device(self, v1_linked: V1Ends) -> None:
        """Device i pulls from device i, and no byte goes astray."""
        src = v1_linked.prompt.cache("src", key=[request_key(5), request_key(6)])
        dst = v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", request_key(6), dst, 2)
        copy_entry(dst, 2, src, 1)
        v1_linked.decoder.call("pull_cache", src.key(3), dst, 0, 50, dst_cache_offset=7)
        copy_entry(dst, 0, src, 3, size=50, dst_offset=7)
        v1_linked.check_only_path_used(v1_linked.decoder)


class TestKeys:
    """What a successful pull consumes: the second pull of a key is the proof."""

    def test_request_key(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", key=[request_key(7), request_key(7, 1)])
        dst = v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", request_key(7, 1), dst, 0)
        copy_entry(dst, 0, src, 1)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(7, 1), dst, 1)
        v1_linked.decoder.call("pull_cache", request_key(7), dst, 1)
        copy_entry(dst, 1, src, 0)

    def test_by_id_the_key_of_the_entry(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", key=[request_key(7), request_key(8)])
        dst = v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", src.key(1), dst, 0)
        copy_entry(dst, 0, src, 1)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(8), dst, 1)
        v1_linked.decoder.call("pull_cache", src.key(1), dst, 1)  # the id is still there
        copy_entry(dst, 1, src, 1)
        v1_linked.decoder.call("pull_cache", request_key(7), dst, 2)
        copy_entry(dst, 2, src, 0)

    @pytest.mark.parametrize("by", ["key", "id"])
    def test_prefix_key_is_not_consumed(self, v1_linked: V1Ends, by: str) -> None:
        src = v1_linked.prompt.cache("src", key=[prefix_key(9), request_key(9)])
        dst = v1_linked.decoder.cache("dst")
        for batch in range(2):
            v1_linked.decoder.call("pull_cache", prefix_key(9) if by == "key" else src.key(0), dst, batch)
            copy_entry(dst, batch, src, 0)
        v1_linked.decoder.call("pull_cache", prefix_key(9), dst, 2)
        copy_entry(dst, 2, src, 0)
        v1_linked.decoder.call("pull_cache", request_key(9), dst, 3)
        copy_entry(dst, 3, src, 1)

    @pytest.mark.parametrize("offsets", [{"src_cache_offset": 0}, {"dst_cache_offset": 0}, {"src_cache_offset": 16}])
    @pytest.mark.parametrize("by", ["key", "id"])
    def test_offsets_keep_the_key(self, v1_linked: V1Ends, by: str, offsets: dict) -> None:
        src = v1_linked.prompt.cache("src", key=[request_key(7)])
        dst = v1_linked.decoder.cache("dst")
        for batch in range(2):
            v1_linked.decoder.call(
                "pull_cache", request_key(7) if by == "key" else src.key(), dst, batch, 80, **offsets
            )
            copy_entry(dst, batch, src, 0, size=80, src_offset=offsets.get("src_cache_offset", 0))
        v1_linked.decoder.call("pull_cache", request_key(7), dst, 2)
        copy_entry(dst, 2, src, 0)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(7), dst)

    def test_layer_after_layer(self, v1_linked: V1Ends) -> None:
        """Consumed when every tensor has been pulled, by whatever pull; a layer twice is no two layers."""
        src = v1_linked.prompt.cache("src", key=[request_key(7), request_key(8)])
        dst = v1_linked.decoder.cache("dst")
        for layer, batch in ((0, 0), (0, 1), (1, 0)):
            layers = {"src_layer_range": range(layer, layer + 1), "dst_layer_range": range(layer, layer + 1)}
            v1_linked.decoder.call("pull_cache", request_key(7), dst, batch, **layers)
            copy_entry(dst, batch, src, 0, pairs=[(2 * layer, 2 * layer), (2 * layer + 1, 2 * layer + 1)])
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(7), dst)
        v1_linked.decoder.call("pull_cache", request_key(8), dst, 5)  # sets are per key
        copy_entry(dst, 5, src, 1)

    def test_a_failed_pull_consumes_nothing(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", key=[request_key(7)], entry_bytes=50)
        dst = v1_linked.decoder.cache("dst")
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_cache", request_key(7), dst)
        v1_linked.decoder.call("pull_cache", request_key(7), dst, 0, 50)
        copy_entry(dst, 0, src, 0, size=50)

    @two_devices
    def test_on_every_device(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", key=[request_key(7)])
        dst = v1_linked.decoder.cache("dst")
        v1_linked.decoder.call("pull_cache", request_key(7), dst)
        copy_entry(dst, 0, src, 0)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(7), dst)


class TestDeferredRelease:
    """vllm-ascend, second generation (client-patterns §2.2): the key alone keeps the data until it was pulled."""

    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    def test_pull_frees(self, v1_linked: V1Ends) -> None:
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        idle = prompt.used_bytes()
        dst = decoder.cache("dst")
        for request in range(3):
            src = prompt.cache("src", key=[request_key(request, 1)], entries=1)
            prompt.deallocate(src)
            assert prompt.used_bytes() > idle
            decoder.call("pull_cache", request_key(request, 1), dst, request)
            copy_entry(dst, request, src, 0)
            assert prompt.used_bytes() == idle

    def test_by_id_as_well(self, v1_linked: V1Ends) -> None:
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        src, dst = prompt.cache("src", key=[request_key(1), request_key(2)]), decoder.cache("dst")
        prompt.deallocate(src)
        decoder.call("pull_cache", src.key(3), dst)  # an entry without a key
        copy_entry(dst, 0, src, 3)
        decoder.call("pull_cache", src.key(0), dst, 1)
        copy_entry(dst, 1, src, 0)
        prompt.call("remove_cache_key", request_key(2))
        assert prompt.used_bytes() == [0]
        with raises(KV_CACHE_NOT_EXIST):
            decoder.call("pull_cache", src.key(3), dst)


@one_path
class TestErrors:
    def test_not_linked(self, v1_unlinked: V1Ends) -> None:
        src, dst = v1_unlinked.prompt.cache("src"), v1_unlinked.decoder.cache("dst")
        with raises(NOT_YET_LINK):
            v1_unlinked.decoder.call("pull_cache", src.key(), dst)

    def test_own_cluster(self, v1_linked: V1Ends) -> None:
        dst = v1_linked.decoder.cache("dst")
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_cache", dst.key(), dst)

    @pytest.mark.parametrize(
        "key",
        [
            request_key(9),
            prefix_key(7),
            CacheKeyByIdAndIndex(1, 2, 0),
            CacheKeyByIdAndIndex(1, 0, 0),
            CacheKeyByIdAndIndex(1, -1, 0),
            CacheKeyByIdAndIndex(1, 1, 6),
        ],
        ids=["request", "prefix", "id", "id 0", "negative id", "batch index"],
    )
    def test_unknown_at_the_prompt(self, v1_linked: V1Ends, key: object) -> None:
        v1_linked.prompt.cache("src", key=[request_key(7)])
        dst = v1_linked.decoder.cache("dst")
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", key, dst)

    def test_local_cache_was_deallocated(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.decoder.deallocate(dst)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", src.key(), dst)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((6,), {}),
            ((0, 97), {}),
            ((0, 96), {"dst_cache_offset": 1}),
            ((0, 96), {"src_cache_offset": 1}),
            ((0, -1), {"src_cache_offset": 1}),
            ((0, -1), {"dst_cache_offset": 96}),
            ((0, -1), {"src_cache_offset": 96, "dst_cache_offset": 95}),
            ((0, 1), {"dst_cache_offset": 2**64 - 1}),
            ((0, 1), {"src_cache_offset": 2**64 - 1}),
            ((0, -1), {"src_layer_range": range(3)}),
            ((0, -1), {"dst_layer_range": range(2, 3)}),
            ((0, -1), {"src_layer_range": range(1)}),
            ((0, -1), {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 3}),
        ],
    )
    def test_ranges(self, v1_linked: V1Ends, args: tuple, kwargs: dict) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_cache", src.key(), dst, *args, **kwargs)

    def test_layouts(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst", blocks=True)
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_cache", src.key(), dst)
        blocks = v1_linked.prompt.cache("blocks", blocks=True, key=blocks_key())
        flat = v1_linked.decoder.cache("flat")
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_cache", blocks.key(), flat)

    def test_keys_beyond_the_entries_name_nothing(self, v1_linked: V1Ends) -> None:
        none = request_key(INVALID_ID)
        src = v1_linked.prompt.cache("src", entries=2, key=[none, request_key(1), none, request_key(2)])
        dst = v1_linked.decoder.cache("dst")
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", request_key(2), dst)
        v1_linked.decoder.call("pull_cache", request_key(1), dst)
        copy_entry(dst, 0, src, 1)
