"""transfer_cache_async of v1, byte by byte (spec api-kvcachemanager §7)."""

from __future__ import annotations

import signal

import pytest

from llm_datadist_ray import TransferConfig
from tests.conformance import v1_side
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, SUCCESS
from tests.conformance.v1_ends import V1Cache, V1Ends, copy_blocks, copy_entry, one_path
from tests.conformance.v1_status import WAIT_PROCESS_TIMEOUT

pytest_plugins = ["tests.conformance.v1_fixtures"]


def config(dst: V1Cache, *, tensors: range | None = None, layers: range | None = None, batch: int = 0, dst_batch: int = 0) -> TransferConfig:  # fmt: skip # noqa: E501
    """To entry ``dst_batch`` of the given tensors of ``dst``."""
    addrs = dst.end.run(v1_side.addresses, dst.name)[0]
    offset = dst_batch * dst.entry_bytes
    chosen = range(dst.num_tensors) if tensors is None else tensors
    return TransferConfig(dst.end.cluster_id, [addrs[tensor] + offset for tensor in chosen], layers, batch)


def push(ends: V1Ends, src: V1Cache, configs: list, *args: object, layers: int = 2) -> tuple:
    ends.prompt.run(v1_side.start_push, "task", src.name, configs, *args)
    ends.prompt.run(v1_side.tell, "task", dict.fromkeys(range(layers), True))
    return ends.prompt.run(v1_side.outcome, "task")


class TestBytes:
    @pytest.mark.parametrize(("batch", "dst_batch"), [(0, 0), (5, 2)])
    def test_entries(self, v1_linked: V1Ends, batch: int, dst_batch: int) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        assert push(v1_linked, src, [config(dst, batch=batch, dst_batch=dst_batch)]) == (SUCCESS, [SUCCESS])
        copy_entry(dst, dst_batch, src, batch)
        v1_linked.check_only_path_used(v1_linked.prompt)

    def test_layers_come_when_they_are_ready(self, v1_linked: V1Ends) -> None:
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        src, dst = prompt.cache("src", tensors=6), decoder.cache("dst", tensors=6)
        prompt.run(v1_side.start_push, "task", "src", [config(dst)])
        assert prompt.run(v1_side.outcome, "task", 0) == (WAIT_PROCESS_TIMEOUT, [WAIT_PROCESS_TIMEOUT])
        decoder.check_memory()
        prompt.run(v1_side.tell, "task", {0: True, 1: True})
        prompt.run(v1_side.wait_asked, "task", 3)
        copy_entry(dst, 0, src, 0, pairs=[(tensor, tensor) for tensor in range(4)])
        decoder.check_memory()
        prompt.run(v1_side.tell, "task", {2: True})
        assert prompt.run(v1_side.outcome, "task") == (SUCCESS, [SUCCESS])
        copy_entry(dst, 0, src, 0)
        assert prompt.run(v1_side.asked, "task") == [0, 1, 2]

    def test_a_range_goes_to_other_tensors(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        result = push(v1_linked, src, [config(dst, tensors=range(2), layers=range(1, 2), dst_batch=3)])
        assert result == (SUCCESS, [SUCCESS])
        copy_entry(dst, 3, src, 0, pairs=[(0, 2), (1, 3)])

    @pytest.mark.parametrize("size", [None, 0, 96])
    def test_blocks(self, v1_linked: V1Ends, size: int | None) -> None:
        src = v1_linked.prompt.cache("src", blocks=True)
        dst = v1_linked.decoder.cache("dst", blocks=True)
        assert push(v1_linked, src, [config(dst)], [5, 0, 1], [0, 3, 4], size) == (SUCCESS, [SUCCESS])
        copy_blocks(dst, [0, 3, 4], src, [5, 0, 1])

    def test_a_blocks_cache_without_lists(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", blocks=True)
        dst = v1_linked.decoder.cache("dst", blocks=True)
        assert push(v1_linked, src, [config(dst)]) == (SUCCESS, [SUCCESS])
        copy_blocks(dst, [0], src, [0])

    def test_large_layers(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", tensors=2, entries=2, entry_bytes=3_000_001)
        dst = v1_linked.decoder.cache("dst", tensors=2, entries=2, entry_bytes=3_000_001)
        assert push(v1_linked, src, [config(dst, batch=1)], layers=1) == (SUCCESS, [SUCCESS])
        copy_entry(dst, 0, src, 1)


@one_path
class TestFailures:
    def test_not_linked(self, v1_unlinked: V1Ends) -> None:
        src, dst = v1_unlinked.prompt.cache("src"), v1_unlinked.decoder.cache("dst")
        assert push(v1_unlinked, src, [config(dst)]) == (NOT_YET_LINK, [NOT_YET_LINK])

    @pytest.mark.parametrize("shift", [-1, 5 * 96 + 1, 1 << 40])
    def test_addresses_outside_any_cache(self, v1_linked: V1Ends, shift: int) -> None:
        """The receiver checks; not even the page behind the tensor is anybody's."""
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        wrong = config(dst)
        wrong.dst_addrs = [wrong.dst_addrs[0] + shift, *wrong.dst_addrs[1:]]
        assert push(v1_linked, src, [wrong]) == (PARAM_INVALID, [PARAM_INVALID])

    def test_a_cache_that_was_deallocated(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        target = config(dst)
        v1_linked.decoder.deallocate(dst)
        assert push(v1_linked, src, [target]) == (PARAM_INVALID, [PARAM_INVALID])

    def test_blocks_beyond_the_destination(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", blocks=True)
        dst = v1_linked.decoder.cache("dst", blocks=True)
        assert push(v1_linked, src, [config(dst)], [0], [6]) == (PARAM_INVALID, [PARAM_INVALID])
        assert push(v1_linked, src, [config(dst)], [6], [0]) == (PARAM_INVALID, [PARAM_INVALID])

    def test_block_sizes(self, v1_linked: V1Ends) -> None:
        src = v1_linked.prompt.cache("src", blocks=True)
        dst = v1_linked.decoder.cache("dst", blocks=True)
        assert push(v1_linked, src, [config(dst)], [0], [0], 48) == (PARAM_INVALID, [PARAM_INVALID])

    def test_blocks_of_a_contiguous_cache(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst", blocks=True)
        assert push(v1_linked, src, [config(dst)], [0], [0]) == (PARAM_INVALID, [PARAM_INVALID])

    def test_no_such_entry(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        assert push(v1_linked, src, [config(dst, batch=6)]) == (PARAM_INVALID, [PARAM_INVALID])
        blocks = v1_linked.prompt.cache("blocks", blocks=True)
        assert push(v1_linked, blocks, [config(dst, batch=1)]) == (PARAM_INVALID, [PARAM_INVALID])

    def test_the_source_was_deallocated(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.prompt.deallocate(src)
        assert push(v1_linked, src, [config(dst)]) == (KV_CACHE_NOT_EXIST, [KV_CACHE_NOT_EXIST])

    def test_the_synchronizer_says_no(self, v1_linked: V1Ends) -> None:
        """What was moved stays; a config that has not begun has no result (client-patterns §4). All go to one cluster,
        whose results are one."""
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.prompt.run(v1_side.start_push, "task", "src", [config(dst)])
        v1_linked.prompt.run(v1_side.tell, "task", {0: True, 1: False})
        assert v1_linked.prompt.run(v1_side.outcome, "task") == (PARAM_INVALID, [PARAM_INVALID])
        copy_entry(dst, 0, src, 0, pairs=[(0, 0), (1, 1)])

    def test_time_out_of_a_layer(self, v1_idle: V1Ends) -> None:
        v1_idle.init(llm__SyncKvCacheWaitTime="300")
        v1_idle.link()
        src, dst = v1_idle.prompt.cache("src"), v1_idle.decoder.cache("dst")
        target = config(dst)
        v1_idle.decoder.process.signal(signal.SIGSTOP)
        try:
            result = push(v1_idle, src, [target])
        finally:
            v1_idle.decoder.process.signal(signal.SIGCONT)
        assert result == (WAIT_PROCESS_TIMEOUT, [WAIT_PROCESS_TIMEOUT])

    def test_finalize_ends_it(self, v1_linked: V1Ends) -> None:
        prompt = v1_linked.prompt
        src, dst = prompt.cache("src"), v1_linked.decoder.cache("dst")
        prompt.run(v1_side.start_push, "task", "src", [config(dst)])
        prompt.process.finalize()
        prompt.forget(src)
        prompt.run(v1_side.tell, "task", {0: True, 1: True})
        assert prompt.run(v1_side.outcome, "task") == (FAILED, [FAILED])

    def test_the_source_is_kept_alive(self, v1_linked: V1Ends) -> None:
        prompt = v1_linked.prompt
        src, dst = prompt.cache("src"), v1_linked.decoder.cache("dst")
        prompt.run(v1_side.start_push, "task", "src", [config(dst)])
        prompt.run(v1_side.drop, "src")
        prompt.forget(src)
        assert prompt.used_bytes() != [0]
        prompt.run(v1_side.tell, "task", {0: True, 1: True})
        assert prompt.run(v1_side.outcome, "task") == (SUCCESS, [SUCCESS])
        copy_entry(dst, 0, src, 0)
