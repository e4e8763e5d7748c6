"""Arguments on their way to C and back, over a recording library with the real structs."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.unit.fake_native import FakeLib, fake_native


class Native:
    def __init__(self, module: Any, lib: FakeLib, ffi: Any) -> None:
        self.module, self.lib, self.ffi = module, lib, ffi
        self.ended: list[str] = []
        lib.answers["ldr_engine_create"] = self._create
        lib.answers["ldr_engine_shutdown"] = lambda engine: self.ended.append("engine")
        lib.answers["ldr_engine_destroy"] = lambda engine: self.ended.append("handle")
        lib.answers["ldr_paths_parse"] = lambda text, mask_p: mask_p.__setitem__(0, 0b11110) or 0

    def _create(self, params: Any, engine_p: Any) -> int:
        self.params = {name: getattr(params, name) for name, _ in self.ffi.typeof("ldr_engine_params_t").fields}
        self.secret = bytes(self.ffi.buffer(params.secret, params.secret_bytes)) if params.secret else None
        engine_p[0] = self.ffi.cast("ldr_engine_t *", 0x1000)
        return 0

    def engine(self, **kwargs: Any) -> Any:
        return self.module.NativeEngine(cluster_id=1, remote_access=True, **kwargs)

    def transfer(self, **kwargs: Any) -> Any:
        module = self.module
        fields = {
            "direction": module.Direction.PULL,
            "cluster_id": 2,
            "local_cache_id": 3,
            "move": module.Move.BLOCKS,
            "remote_by": module.RemoteBy.BLOCKS_KEY,
            **kwargs,
        }
        return module.Transfer(**fields)


@pytest.fixture
def native() -> Iterator[Native]:
    with fake_native() as (module, lib, ffi):
        yield Native(module, lib, ffi)


def test_engine_parameters(native: Native) -> None:
    with native.engine(
        secret=b"\x00\xffs", insecure=True, allow_ptracer=False, heartbeat_interval_s=0.25, layout_digest=9
    ):
        assert native.params["struct_size"] == native.ffi.sizeof("ldr_engine_params_t")
        assert native.params["flags"] == 1 | 2 | 4
        assert native.params["listen_ip"] == native.ffi.NULL
        assert native.params["heartbeat_interval_ns"] == 250_000_000
        assert native.params["layout_digest"] == 9
        assert native.secret == b"\x00\xffs"
    with native.engine():
        assert native.params["flags"] == 1
        assert native.secret is None


def test_close_is_idempotent_and_calls_after_it_fail(native: Native) -> None:
    engine = native.engine()
    engine.close()
    engine.close()
    assert native.ended == ["engine"]
    with pytest.raises(native.module.NativeError) as caught:
        engine.info()
    assert caught.value.native_status == native.module.NativeStatus.CLOSED


def test_a_forgotten_engine_warns_and_is_closed(native: Native) -> None:
    with pytest.warns(ResourceWarning, match="cluster 1"):
        native.engine()
        gc.collect()
    assert native.ended == ["engine", "handle"]


def test_an_engine_that_did_not_start(native: Native) -> None:
    native.lib.answers["ldr_engine_create"] = lambda *args: -84
    with pytest.raises(native.module.NativeError, match="refused after 3 ms") as caught:
        native.engine()
    assert caught.value.native_status == native.module.NativeStatus.BIND


def test_no_descriptor_for_the_handle(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no engine either."""
    created = []
    native.lib.answers["ldr_engine_create"] = lambda *args: created.append(args) or native._create(*args)

    def no_eventfd(*args: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.eventfd", no_eventfd)
    with pytest.raises(OSError, match="Too many open files"):
        native.engine()
    assert not created


def test_close_ends_calls_and_does_not_wait_for_them(native: Native) -> None:
    """A transfer that only the engine's end can end: the native core waits for it."""
    inside, ended = threading.Event(), threading.Event()

    def transfer(*args: Any) -> int:
        inside.set()
        assert ended.wait(10)
        return -83

    native.lib.answers["ldr_transfer"] = transfer
    native.lib.answers["ldr_engine_shutdown"] = lambda engine: ended.set()
    engine = native.engine()
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(engine.transfer, native.transfer())
        assert inside.wait(10)
        engine.close()
        with pytest.raises(native.module.NativeError):
            pull.result()


@pytest.mark.parametrize(
    ("blocks", "item_bytes"),
    [
        ([3, 1, 2], 8),
        ((3, 1, 2), 8),
        (np.array([3, 1, 2], np.int32), 4),
        (np.array([3, 1, 2], np.int64), 8),
        (np.array([3, 9, 1, 9, 2], np.int64)[::2], 8),
    ],
)
def test_block_lists(native: Native, blocks: Any, item_bytes: int) -> None:
    seen = {}

    def transfer(engine: Any, params: Any, result: Any) -> int:
        for name in ("src_blocks", "dst_blocks"):
            found = getattr(params, name)
            dtype = {4: np.int32, 8: np.int64}.get(found.item_bytes, np.int8)
            raw = native.ffi.buffer(found.indices, found.count * found.item_bytes) if found.count else b""
            seen[name] = (found.item_bytes, np.frombuffer(raw, dtype).tolist())
        result.bytes, result.latency_ns, result.path = 12, 3_000, 2
        return 0

    native.lib.answers["ldr_transfer"] = transfer
    with native.engine() as engine:
        result = engine.transfer(native.transfer(src_blocks=blocks, dst_blocks=()))
    assert seen == {"src_blocks": (item_bytes, [3, 1, 2]), "dst_blocks": (0, [])}
    assert result == (12, 3e-6, native.module.Path.CMA)


def test_arrays_are_passed_on_as_they_are(native: Native) -> None:
    blocks = np.arange(5, dtype=np.int32)
    addresses = []

    def transfer(engine: Any, params: Any, result: Any) -> int:
        addresses.append(int(native.ffi.cast("uintptr_t", params.src_blocks.indices)))
        return 0

    native.lib.answers["ldr_transfer"] = transfer
    with native.engine() as engine:
        engine.transfer(native.transfer(src_blocks=blocks))
    assert addresses == [blocks.ctypes.data]


@pytest.mark.parametrize(
    "blocks",
    [[-1], [2**64], ["0"], [0.5], [None], {0}, "0", range(3), np.array([0.0]), np.array([[0]]), np.array([0], "u4")],
)
def test_block_lists_of_wrong_types(native: Native, blocks: Any) -> None:
    with native.engine() as engine, pytest.raises(TypeError, match="dst_blocks"):
        engine.transfer(native.transfer(dst_blocks=blocks))


def test_transfer_fields(native: Native) -> None:
    seen = {}

    def submit(engine: Any, params: Any, user_tag: int, op_id_p: Any) -> int:
        seen.update({name: getattr(params, name) for name, _ in native.ffi.typeof("ldr_transfer_params_t").fields})
        op_id_p[0] = user_tag + 1
        return 0

    native.lib.answers["ldr_transfer_submit"] = submit
    module = native.module
    transfer = native.transfer(
        direction=module.Direction.PUSH,
        cluster_id=2**64 - 1,
        move=module.Move.ENTRY,
        remote_by=module.RemoteBy.CACHE_ID,
        remote_cache_id=-5,
        remote_batch_index=6,
        size_bytes=7,
        local_tensors=module.TensorSpan(8, 9),
        remote_tensors=module.TensorSpan(10, 11),
        timeout_s=1.5,
        local_offset_bytes=12,
        remote_offset_bytes=13,
        dst_block_bytes=14,
        keep_key=True,
    )
    with native.engine() as engine:
        assert engine.submit(transfer, user_tag=41) == 42
    del seen["src_blocks"], seen["dst_blocks"]
    assert seen == {
        "struct_size": native.ffi.sizeof("ldr_transfer_params_t"),
        "direction": 1,
        "cluster_id": 2**64 - 1,
        "remote_by": 0,
        "remote_batch_index": 6,
        "remote_cache_id": -5,
        "remote_key_id": 0,
        "remote_model_id": 0,
        "local_cache_id": 3,
        "local_batch_index": 0,
        "move": 0,
        "size_bytes": 7,
        "local_first_tensor": 8,
        "local_num_tensors": 9,
        "remote_first_tensor": 10,
        "remote_num_tensors": 11,
        "timeout_ns": 1_500_000_000,
        "local_offset_bytes": 12,
        "remote_offset_bytes": 13,
        "dst_block_bytes": 14,
        "flags": 1,
        "reserved2": 0,
    }


def test_no_timeout_is_negative(native: Native) -> None:
    seen = []
    native.lib.answers["ldr_link_close"] = lambda *args: seen.append(args[1:]) or 0
    with native.engine() as engine:
        engine.unlink(5, timeout_s=None)
        engine.unlink(5, force=True, ip="10.0.0.1", port=9, timeout_s=-3.0)
    assert seen == [(5, False, native.ffi.NULL, 0, -1), (5, True, b"10.0.0.1", 9, 0)]


def test_links_grow_beyond_the_first_guess(native: Native) -> None:
    def link_list(engine: Any, infos: Any, capacity: int, count_p: Any) -> int:
        for index in range(min(capacity, 40)):
            infos[index].cluster_id, infos[index].state, infos[index].path_set = index, 1, 0b10010
            infos[index].peer_address = b"127.0.0.1:26000"
        count_p[0] = 40
        return 0

    native.lib.answers["ldr_link_list"] = link_list
    with native.engine() as engine:
        links = engine.links()
    assert [link.cluster_id for link in links] == list(range(40))
    assert links[0].paths == (native.module.Path.SHM, native.module.Path.TCP)
    assert links[0].peer_address == "127.0.0.1:26000"


def test_register_cache(native: Native) -> None:
    seen = {}

    def register(engine: Any, params: Any, cache_id_p: Any) -> int:
        seen["addresses"] = list(params.addresses[0 : params.num_tensors])
        seen["keys"] = [(key.kind, key.batch_index, key.id, key.model_id) for key in params.keys[0 : params.num_keys]]
        cache_id_p[0] = 4
        return 0

    native.lib.answers["ldr_cache_register"] = register
    module = native.module
    arguments: dict[str, Any] = {
        "kind": module.CacheKind.CONTIGUOUS,
        "placement": 1,
        "remote_accessible": True,
        "num_entries": 2,
        "tensor_bytes": 64,
    }
    keys = [module.NativeKey(module.KeyKind.PREFIX, 2**64 - 2, 1, 0), module.NativeKey(module.KeyKind.REQUEST, 5, 6, 1)]
    with native.engine() as engine:
        assert engine.register_cache(addresses=[2**64 - 1, 1], keys=keys, **arguments) == 4
        assert seen == {"addresses": [2**64 - 1, 1], "keys": [(1, 0, 2**64 - 2, 1), (0, 1, 5, 6)]}
        for addresses in ([2**64], [-1], ["1"]):
            with pytest.raises(TypeError):
                engine.register_cache(addresses=addresses, **arguments)
