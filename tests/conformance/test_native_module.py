"""The compiled module by itself: engines, events, shared memory, forks. Two engines in this process are enough."""

from __future__ import annotations

import gc
import os
import pickle
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llm_datadist_ray import LLMStatusCode
from llm_datadist_ray._native import (
    DATA_PATHS,
    CacheKind,
    Direction,
    EventKind,
    KeyKind,
    Move,
    NativeEngine,
    NativeError,
    NativeKey,
    NativeStatus,
    RemoteBy,
    Transfer,
    alloc_shared,
    parse_paths,
)
from tests.process_counts import ProcessCounts, settled_counts

BLOCKS, BLOCK_BYTES = 64, 4096


def raises_native(status: NativeStatus) -> object:
    return pytest.raises(NativeError, check=lambda error: error.native_status == status)


@dataclass
class Linked:
    """A source with one blocks cache (id 1) that listens, and a sink with another one, linked to it."""

    source: NativeEngine
    sink: NativeEngine
    source_memory: np.ndarray
    sink_memory: np.ndarray


@pytest.fixture
def linked() -> Iterator[Linked]:
    with (
        NativeEngine(cluster_id=2, remote_access=True, listen_ip="127.0.0.1") as source,
        NativeEngine(cluster_id=1, remote_access=True) as sink,
    ):
        memories = alloc_shared(BLOCKS * BLOCK_BYTES), alloc_shared(BLOCKS * BLOCK_BYTES)
        memories[0][:] = np.arange(BLOCKS * BLOCK_BYTES) % 251
        for engine, memory in zip((source, sink), memories, strict=True):
            cache_id = engine.register_cache(
                kind=CacheKind.BLOCKS,
                placement=1,
                remote_accessible=True,
                num_entries=BLOCKS,
                tensor_bytes=BLOCKS * BLOCK_BYTES,
                addresses=[memory.ctypes.data],
                keys=[NativeKey(KeyKind.BLOCKS, 0, 0)],
            )
            assert cache_id == 1
        sink.link(ip="127.0.0.1", port=source.info().listen_port, timeout_s=5.0)
        yield Linked(source, sink, *memories)


def pull(blocks: list[int], timeout_s: float | None = 10.0) -> Transfer:
    return Transfer(
        direction=Direction.PULL,
        cluster_id=2,
        local_cache_id=1,
        move=Move.BLOCKS,
        remote_by=RemoteBy.BLOCKS_KEY,
        src_blocks=blocks,
        dst_blocks=blocks,
        timeout_s=timeout_s,
    )


class TestEngines:
    def test_two_in_one_process(self, linked: Linked) -> None:
        source, sink = linked.source, linked.sink
        result = sink.transfer(pull([3, 4, 9]))
        assert result.num_bytes == 3 * BLOCK_BYTES
        assert result.path in sink.link_info(2).paths
        expected = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        expected[[3, 4, 9]] = linked.source_memory.reshape(BLOCKS, BLOCK_BYTES)[[3, 4, 9]]
        assert (linked.sink_memory.reshape(BLOCKS, BLOCK_BYTES) == expected).all()
        info = sink.info()
        assert sum(info.bytes_pulled.values()) == 3 * BLOCK_BYTES
        assert (info.cluster_id, info.num_links, info.num_caches, info.num_ops_in_flight) == (1, 1, 1, 0)
        assert source.link_info(1).incarnation == info.incarnation

    def test_submit_gives_one_event(self, linked: Linked) -> None:
        sink = linked.sink
        op_ids = [sink.submit(pull([block]), user_tag=100 + block) for block in range(10)]
        assert len(set(op_ids)) == 10
        events = []
        while len(events) < 10:
            found = [event for event in sink.poll(3, 10.0) if event.kind == EventKind.OP]
            assert len(found) <= 3
            events += found
        assert [(event.id, event.user_tag) for event in sorted(events)] == list(
            zip(op_ids, range(100, 110), strict=True)
        )
        assert all(event.is_ok and event.num_bytes == BLOCK_BYTES for event in events)
        assert [event for event in sink.poll(timeout_s=0.05) if event.kind == EventKind.OP] == []
        for call in (sink.cancel, sink.progress):
            with raises_native(NativeStatus.NOT_FOUND):
                call(op_ids[0])

    def test_submit_that_fails_at_once_gives_none(self, linked: Linked) -> None:
        sink = linked.sink
        sink.poll()
        with raises_native(NativeStatus.INVALID):
            sink.submit(pull([BLOCKS]))
        assert sink.poll(timeout_s=0.05) == []

    def test_link_events(self, linked: Linked) -> None:
        source, sink = linked.source, linked.sink
        up = sink.poll(timeout_s=5.0)
        assert [(event.kind, event.id, event.user_tag) for event in up] == [
            (EventKind.LINK_UP, 2, source.info().incarnation)
        ]
        source.close()
        down = sink.poll(timeout_s=5.0)
        assert [(event.kind, event.id) for event in down] == [(EventKind.LINK_DOWN, 2)]
        with raises_native(NativeStatus.NOT_LINKED):
            sink.transfer(pull([0]))

    def test_the_event_fd_is_readable_while_events_wait(self, linked: Linked) -> None:
        sink = linked.sink
        assert select.select([sink.event_fd], [], [], 5.0)[0]
        sink.poll()
        assert not select.select([sink.event_fd], [], [], 0)[0]

    def test_close_ends_a_waiting_poll(self) -> None:
        engine = NativeEngine(cluster_id=1, remote_access=False)
        caught: list[NativeError] = []

        def wait() -> None:
            try:
                engine.poll(timeout_s=None)
            except NativeError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        engine.close()
        thread.join(10)
        assert [error.native_status for error in caught] == [NativeStatus.CLOSED]

    def test_poll_timeout(self) -> None:
        with NativeEngine(cluster_id=1, remote_access=False) as engine:
            start = time.monotonic()
            assert engine.poll(timeout_s=0.2) == []
            assert 0.15 < time.monotonic() - start < 2

    def test_nothing_is_left(self) -> None:
        before = None
        for _ in range(5):
            with NativeEngine(cluster_id=1, remote_access=True, listen_ip="127.0.0.1") as engine:
                engine.link(ip="127.0.0.1", port=engine.info().listen_port, timeout_s=5.0)
            if before is None:
                before = ProcessCounts.of()
        assert settled_counts(before) == before

    def test_a_port_in_use(self) -> None:
        with NativeEngine(cluster_id=1, remote_access=True, listen_ip="127.0.0.1") as engine:
            port = engine.info().listen_port
            with raises_native(NativeStatus.BIND):
                NativeEngine(cluster_id=2, remote_access=True, listen_ip="127.0.0.1", listen_port=port)

    def test_unknown_path(self) -> None:
        with pytest.raises(NativeError, match="pigeon"):
            NativeEngine(cluster_id=1, remote_access=True, paths="shm,pigeon")

    def test_no_common_path(self) -> None:
        with (
            NativeEngine(cluster_id=1, remote_access=True, listen_ip="127.0.0.1", paths="tcp") as tcp,
            NativeEngine(cluster_id=2, remote_access=True, paths="shm") as shm,
            raises_native(NativeStatus.LINK_FAILED),
        ):
            shm.link(ip="127.0.0.1", port=tcp.info().listen_port, timeout_s=5.0)

    @pytest.mark.parametrize("digests", [(1, 2), (1, 1), (0, 2), (1, 0)])
    def test_layouts_of_members_must_agree(self, digests: tuple[int, int]) -> None:
        with (
            NativeEngine(
                cluster_id=1, remote_access=True, listen_ip="127.0.0.1", layout_digest=digests[0], layout_text="llama"
            ) as one,
            NativeEngine(cluster_id=2, remote_access=True, layout_digest=digests[1], layout_text="qwen") as other,
        ):
            port = one.info().listen_port
            if 0 in digests or digests[0] == digests[1]:
                other.link(ip="127.0.0.1", port=port, timeout_s=5.0)
            else:
                with pytest.raises(NativeError, match="llama") as caught:
                    other.link(ip="127.0.0.1", port=port, timeout_s=5.0)
                assert caught.value.native_status == NativeStatus.LAYOUT


class TestFork:
    def test_a_child_finds_its_engines_dead(self, linked: Linked) -> None:
        """LDR_ERR_FORKED for every call; closing is harmless; the parent does not notice."""
        sink = linked.sink
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:  # no pytest machinery may run in here
            statuses = []
            for call in (sink.info, sink.links, lambda: sink.transfer(pull([0])), sink.poll):
                try:
                    call()
                    statuses.append(0)
                except NativeError as error:
                    statuses.append(int(error.native_status))
            sink.close()
            os.write(write_end, pickle.dumps(statuses))
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            statuses = pickle.loads(pipe.read())
        assert os.waitpid(pid, 0)[1] == 0
        assert statuses == [NativeStatus.FORKED] * 4
        sink.transfer(pull([1]))
        assert sink.link_info(2).is_ready


class TestSharedMemory:
    def test_is_zeroed_writable_and_aligned(self) -> None:
        memory = alloc_shared(10_000)
        assert (memory.dtype, memory.shape, memory.flags.writeable) == (np.uint8, (10_000,), True)
        assert not memory.any()
        assert memory.ctypes.data % 4096 == 0
        memory[:] = 7

    def test_lives_as_long_as_a_view(self) -> None:
        view = alloc_shared(1 << 20)[100:200].view(np.int32)
        address = f"{view.ctypes.data // 4096 * 4096:x}-"
        gc.collect()
        view[:] = 5
        assert view.sum() == 5 * len(view)
        assert address in Path("/proc/self/maps").read_text()
        del view
        gc.collect()
        assert address not in Path("/proc/self/maps").read_text()

    def test_nothing_is_left(self) -> None:
        before = None
        for _ in range(5):
            alloc_shared(3 << 20)[:] = 1
            gc.collect()
            if before is None:
                before = ProcessCounts.of()
        assert ProcessCounts.of() == before

    def test_sizes(self) -> None:
        with pytest.raises(ValueError):
            alloc_shared(-1)
        with pytest.raises(NativeError):
            alloc_shared(0)
        with pytest.raises(NativeError):
            alloc_shared(1 << 60)


def test_paths() -> None:
    assert parse_paths(None) == parse_paths("") == DATA_PATHS
    assert parse_paths("tcp,shm") == (DATA_PATHS[0], DATA_PATHS[3])
    for text, name, hint in (("pigeon", "pigeon", ""), ("shm, tcpp", "tcpp", " .did you mean 'tcp'..")):
        expected = f"'{name}' in '{text}' is no data path{hint}; known are shm, cma, unix, tcp"
        with pytest.raises(NativeError, match=expected) as caught:
            parse_paths(text)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("is_there", [False, True])
def test_the_hixl_path(is_there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Design section 3: not in this version, and the text names the library and where it was looked for."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/lib:/else/lib")
    if is_there:
        (tmp_path / "lib64").mkdir()
        (tmp_path / "lib64" / "libcann_hixl.so").touch()
    with pytest.raises(NativeError, match="not supported by this version") as caught:
        parse_paths("tcp,hixl")
    assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    where = f"in {tmp_path}/lib64" if is_there else "not there"
    for part in ("libcann_hixl.so", where, str(tmp_path), "/usr/local/Ascend/cann", "/somewhere/lib:/else/lib"):
        assert part in str(caught.value)


def test_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(NativeError("peer 7 is gone", NativeStatus.LINK_BROKEN)))
    assert str(error).startswith("peer 7 is gone")
    assert (error.native_status, error.status_code) == (NativeStatus.LINK_BROKEN, LLMStatusCode.LLM_FAILED)
