"""A few bytes that outlive an actor's process: Ray's own key-value store (its API for that is not public)."""

from __future__ import annotations

from ray.experimental import internal_kv

_KV_NAMESPACE = b"llm_datadist_ray"


class StateStore:
    """One value under one key. They live as long as the Ray cluster, or until deleted. Each call takes about 1 ms."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def load(self) -> bytes | None:
        return internal_kv._internal_kv_get(self._key, namespace=_KV_NAMESPACE)

    def save(self, value: bytes) -> None:
        internal_kv._internal_kv_put(self._key, value, overwrite=True, namespace=_KV_NAMESPACE)

    def delete(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=_KV_NAMESPACE)
