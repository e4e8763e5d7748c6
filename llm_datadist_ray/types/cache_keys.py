"""How a peer's cache is named (spec api-types §6). Keys compare by identity: none defines equality or hashing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_datadist_ray.checks import check_int64, check_isinstance, check_uint32, check_uint64
from llm_datadist_ray.errors import raise_if_false

INVALID_ID = 2**64 - 1
"""The value of ``req_id`` or ``prefix_id`` that means "none" (spec api-types §6.1)."""

_CLUSTER_NAMES = ("cluster_id", "prompt_cluster_id")


class CacheKey:
    """A batch entry named by request or prefix: ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64-1)``.

    ``prompt_cluster_id`` is accepted for ``cluster_id``, which wins when both are given; a positional value wins over
    a keyword. All values are uint64 (TypeError / ValueError); too many, unknown or missing ones are
    LLMException(LLM_PARAM_INVALID) (spec api-types §6.1).

    The cluster is ignored when a key is bound to a cache and names the peer when one pulls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = _bind("CacheKey", ("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)
        raise_if_false("req_id" in values, "CacheKey: req_id is required")
        self._cluster_id: int = values[_cluster_name(values)]
        self._req_id: int = values["req_id"]
        self._model_id: int = values.get("model_id", 0)
        self._prefix_id: int = values.get("prefix_id", INVALID_ID)
        for name in ("cluster_id", "req_id", "model_id", "prefix_id"):
            check_uint64(name, getattr(self, name))

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same value as ``cluster_id``."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        return self._req_id

    @property
    def model_id(self) -> int:
        return self._model_id

    @property
    def prefix_id(self) -> int:
        return self._prefix_id

    @property
    def is_prefix_key(self) -> bool:
        """Identity is (prefix_id, model_id); else it is (req_id, model_id). The two live in separate tables."""
        return self._prefix_id != INVALID_ID

    @property
    def is_placeholder(self) -> bool:
        """Neither id is valid: on allocation it keeps its batch position and binds nothing."""
        return self._req_id == INVALID_ID and self._prefix_id == INVALID_ID

    @property
    def is_pullable(self) -> bool:
        """Exactly one of ``req_id`` and ``prefix_id`` is valid, which pulling demands."""
        return (self._req_id != INVALID_ID) != (self._prefix_id != INVALID_ID)

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, prefix_id={self._prefix_id}, "
            f"model_id={self._model_id})"
        )


class CacheKeyByIdAndIndex:
    """Batch entry ``batch_index`` (uint32) of the cache that peer ``cluster_id`` (uint64) knows as ``cache_id``.

    ``cache_id`` is an int64. Raises TypeError / ValueError (spec api-types §6.2).
    """

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def batch_index(self) -> int:
        return self._batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )


class BlocksCacheKey:
    """The blocks cache of a model at a peer: ``BlocksCacheKey(cluster_id, model_id=0)``.

    Arguments work as those of :class:`CacheKey`, but the values are only checked to be ints or None (TypeError). One
    blocks cache per ``model_id`` can be addressed in a process (spec api-types §6.3).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = _bind("BlocksCacheKey", ("cluster_id", "model_id"), args, kwargs)
        self._cluster_name = _cluster_name(values)
        self._cluster_id: int = values[self._cluster_name]
        self._model_id: int = values.get("model_id", 0)
        check_isinstance(self._cluster_name, self._cluster_id, int)
        check_isinstance("model_id", self._model_id, int)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same value as ``cluster_id``."""
        return self._cluster_id

    @property
    def model_id(self) -> int:
        return self._model_id

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._cluster_name}={self._cluster_id}, model_id={self._model_id})"


def _bind(owner: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, positional ones over keywords; the cluster id is there under one of its two names."""
    given = len(args) + len(kwargs)
    raise_if_false(given <= len(names), f"{owner} takes at most {len(names)} arguments, but got {given}")
    unknown = [name for name in kwargs if name not in names and name not in _CLUSTER_NAMES]
    raise_if_false(not unknown, f"{owner}: Unsupported arguments {unknown}, known are {[*names, _CLUSTER_NAMES[1]]}")
    values = {**kwargs, **dict(zip(names, args, strict=False))}
    raise_if_false(any(name in values for name in _CLUSTER_NAMES), f"{owner}: cluster_id is required")
    return values


def _cluster_name(values: Mapping[str, Any]) -> str:
    return next(name for name in _CLUSTER_NAMES if name in values)
