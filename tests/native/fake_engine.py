"""A native engine that only keeps books, for what Python does above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llm_datadist_ray._native import LinkInfo, LinkState, NativeError, NativeStatus


def link_info(cluster_id: int, address: str = "127.0.0.1:1", *, is_ready: bool = True) -> LinkInfo:
    return LinkInfo(
        cluster_id=cluster_id,
        incarnation=cluster_id,
        epoch=1,
        state=LinkState.READY if is_ready else LinkState.BROKEN,
        paths=(),
        peer_pid=0,
        is_same_host=True,
        last_heard_s=0.0,
        peer_address=address,
        bytes_pulled={},
        bytes_pushed={},
    )


class FakeEngine:
    """``fail[method]`` is the status that a method fails with from now on, ``before[method]`` is called first. Linking
    with port ``p`` finds cluster ``p``."""

    def __init__(self, cluster_id: int = 1) -> None:
        self.cluster_id = cluster_id
        self.is_open = True
        self.calls: list[tuple[str, Any]] = []
        self.fail: dict[str, NativeStatus] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.linked: dict[int, LinkInfo] = {}
        self.caches: dict[int, Any] = {}
        self.pools: list[dict[str, Any]] = []
        self.listening: tuple[str | None, int] | None = None
        self._last_id = 0

    def _enter(self, method: str, arguments: Any) -> None:
        self.calls.append((method, arguments))
        if method in self.before:
            self.before[method]()
        if method in self.fail:
            raise NativeError(f"{method} failed as it was told", self.fail[method])

    def names_called(self) -> list[str]:
        return [name for name, _ in self.calls]

    def calls_of(self, method: str) -> list[Any]:
        return [arguments for name, arguments in self.calls if name == method]

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_open = False

    def listen(self, ip: str | None, port: int = 0) -> None:
        self._enter("listen", (ip, port))
        self.listening = ip, port

    def create_pool(self, **params: Any) -> None:
        self._enter("create_pool", params)
        self.pools.append(params)

    # Caches

    def allocate_cache(self, *, num_tensors: int, **params: Any) -> tuple[int, list[int]]:
        self._enter("allocate_cache", params)
        self._last_id += 1
        self.caches[self._last_id] = params
        return self._last_id, [1000 * self._last_id + tensor for tensor in range(num_tensors)]

    def register_cache(self, *, addresses: Sequence[int], **params: Any) -> int:
        self._enter("register_cache", params)
        self._last_id += 1
        self.caches[self._last_id] = params
        return self._last_id

    def unregister_cache(self, cache_id: int) -> None:
        self._enter("unregister_cache", cache_id)
        self.caches.pop(cache_id, None)

    def deallocate_cache(self, cache_id: int) -> None:
        self._enter("deallocate_cache", cache_id)
        if self.caches.pop(cache_id, None) is None:
            raise NativeError(f"no cache {cache_id}", NativeStatus.NO_CACHE)

    def remove_cache_key(self, key: Any) -> None:
        self._enter("remove_cache_key", key)

    def copy_entry(self, **params: Any) -> None:
        self._enter("copy_entry", params)

    def copy_blocks(self, **params: Any) -> None:
        self._enter("copy_blocks", params)

    def transfer(self, transfer: Any) -> None:
        self._enter("transfer", transfer)

    # Links

    def link(self, *, ip: str, port: int, timeout_s: float | None) -> LinkInfo:
        self._enter("link", (ip, port))
        if port in self.linked and self.linked[port].is_ready:
            raise NativeError(f"cluster {port} is linked", NativeStatus.ALREADY_LINKED)
        self.linked[port] = link_info(port, f"{ip}:{port}")
        return self.linked[port]

    def unlink(self, cluster_id: int, *, force: bool = False, timeout_s: float | None) -> None:
        self._enter("unlink", (cluster_id, force))
        self.linked.pop(cluster_id, None)

    def links(self) -> list[LinkInfo]:
        return list(self.linked.values())

    def probe_link(self, cluster_id: int, timeout_s: float | None) -> None:
        self._enter("probe_link", (cluster_id, timeout_s))
        if cluster_id not in self.linked:
            raise NativeError(f"no link to {cluster_id}", NativeStatus.NOT_LINKED)
