"""pull_blocks of v1, byte by byte (spec api-kvcachemanager §5)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import BlocksCacheKey
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, raises
from tests.conformance.v1_ends import V1Ends, blocks_key, copy_blocks, one_path, two_devices

pytest_plugins = ["tests.conformance.v1_fixtures"]


@pytest.mark.parametrize(
    ("prompt_blocks", "decoder_blocks"),
    [([0], [0]), ([0, 1, 2], [3, 4, 5]), ([5, 0, 3], [0, 5, 2]), ([2, 2], [0, 1]), (list(range(6)), list(range(6)))],
)
def test_blocks(v1_linked: V1Ends, prompt_blocks: list, decoder_blocks: list) -> None:
    src = v1_linked.prompt.cache("src", blocks=True, key=blocks_key(3))
    dst = v1_linked.decoder.cache("dst", blocks=True)
    for _ in range(2):  # nothing is consumed
        v1_linked.decoder.call("pull_blocks", blocks_key(3), dst, prompt_blocks, decoder_blocks)
    copy_blocks(dst, decoder_blocks, src, prompt_blocks)
    v1_linked.check_only_path_used(v1_linked.decoder)


def test_layers(v1_linked: V1Ends) -> None:
    src = v1_linked.prompt.cache("src", blocks=True, key=blocks_key(), tensors=6)
    dst = v1_linked.decoder.cache("dst", blocks=True)
    layers = {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}
    v1_linked.decoder.call("pull_blocks", blocks_key(), dst, [1], [2], **layers)
    copy_blocks(dst, [2], src, [1], [(0, 4), (1, 5)])


@two_devices
def test_every_device(v1_linked: V1Ends) -> None:
    src = v1_linked.prompt.cache("src", blocks=True, key=blocks_key())
    dst = v1_linked.decoder.cache("dst", blocks=True)
    v1_linked.decoder.call("pull_blocks", blocks_key(), dst, [1, 4], [0, 2])
    copy_blocks(dst, [0, 2], src, [1, 4])


def test_a_mix_can_hold_keyed_blocks(v1_idle: V1Ends) -> None:
    """It may allocate them; who links pulls nothing of it, because it does not listen (spec §2)."""
    v1_idle.prompt.init(role=v1_idle.prompt.role.MIX)
    v1_idle.prompt.cache("blocks", blocks=True, key=blocks_key())
    assert v1_idle.prompt.ports == [0]


@one_path
class TestErrors:
    def test_not_linked(self, v1_unlinked: V1Ends) -> None:
        with raises(NOT_YET_LINK):
            v1_unlinked.decoder.call(
                "pull_blocks", blocks_key(), v1_unlinked.decoder.cache("dst", blocks=True), [0], [0]
            )

    def test_unknown(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", blocks=True, key=blocks_key())
        dst = v1_linked.decoder.cache("dst", blocks=True)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_blocks", blocks_key(1), dst, [0], [0])
        v1_linked.prompt.deallocate(src)  # at once, with its key
        assert v1_linked.prompt.used_bytes() == [0]
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_blocks", blocks_key(), dst, [0], [0])
        v1_linked.decoder.deallocate(dst)
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_blocks", blocks_key(), dst, [0], [0])

    @pytest.mark.parametrize(("prompt_blocks", "decoder_blocks"), [([6], [0]), ([0], [6]), ([0, 2**63], [0, 1])])
    def test_indices(self, v1_linked: V1Ends, prompt_blocks: list, decoder_blocks: list) -> None:
        v1_linked.prompt.cache("src", blocks=True, key=blocks_key())
        dst = v1_linked.decoder.cache("dst", blocks=True)
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_blocks", blocks_key(), dst, prompt_blocks, decoder_blocks)

    def test_block_sizes(self, v1_linked: V1Ends) -> None:
        v1_linked.prompt.cache("src", blocks=True, key=blocks_key(), entry_bytes=48)
        dst = v1_linked.decoder.cache("dst", blocks=True)
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_blocks", blocks_key(), dst, [0], [0])

    def test_layouts(self, v1_linked: V1Ends) -> None:
        v1_linked.prompt.cache("src", blocks=True, key=blocks_key())
        flat = v1_linked.decoder.cache("flat")
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_blocks", blocks_key(), flat, [0], [0])

    def test_own_cluster(self, v1_linked: V1Ends) -> None:
        dst = v1_linked.decoder.cache("dst", blocks=True)
        with raises(PARAM_INVALID):
            v1_linked.decoder.call("pull_blocks", BlocksCacheKey(2), dst, [0], [0])
