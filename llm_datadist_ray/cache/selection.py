"""Layer ranges to tensors: which tensors of each side a transfer takes (spec api-cachemanager §5.3, §7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llm_datadist_ray._native import ALL_TENSORS, NativeError, NativeStatus, TensorSpan
from llm_datadist_ray.checks import check_isinstance, check_layer_range, check_uint32, num_layers
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import Cache, KvCache

DEFAULT_TENSORS_PER_LAYER = 2
_MAX_TENSOR = 2**32 - 1
# Beyond any cache: the native core refuses it when its turn to be checked comes.
_NO_TENSOR = TensorSpan(_MAX_TENSOR, 1)


class Selection(NamedTuple):
    """Tensors of each side. What is wrong with it, if anything, is known here first but has its place among the checks
    of the native core (spec §5.4, §7): ``flaw`` says it, and one of the spans is beyond any cache."""

    local: TensorSpan
    remote: TensorSpan
    num_layers: int = 1
    flaw: str | None = None


EVERYTHING = Selection(ALL_TENSORS, ALL_TENSORS)


def check_tensors_per_layer(value: Any) -> None:
    check_uint32("tensor_num_per_layer", value)
    raise_if_false(value > 0, "tensor_num_per_layer should be greater than zero, but got 0")


def check_pull_range(name: str, value: Any) -> range | None:
    """The looser rule of the pull methods: an empty range counts as not given (spec §5.3)."""
    check_isinstance(name, value, range)
    if value is None:
        return None
    raise_if_false(value.step == 1, f"{name} should have step 1, but got {value}")
    raise_if_false(value.start >= 0, f"{name} should start at 0 or above, but got {value}")
    return value if num_layers(value) else None


def pull_selection(dst_cache: Cache | KvCache, kwargs: Mapping[str, Any]) -> Selection:
    """Tensors of a pull into ``dst_cache``, by the keyword extras of the pull methods; every other keyword is ignored
    (spec §5.1). That both sides have as many, and that they exist, is checked by the native core, which knows the
    peer's cache. TypeError, ValueError, LLMException(LLM_PARAM_INVALID) otherwise.
    """
    per_layer = kwargs.get("tensor_num_per_layer", DEFAULT_TENSORS_PER_LAYER)
    check_tensors_per_layer(per_layer)
    src_layers = check_pull_range("src_layer_range", kwargs.get("src_layer_range"))
    dst_layers = check_pull_range("dst_layer_range", kwargs.get("dst_layer_range"))
    if src_layers is None and dst_layers is None:
        return EVERYTHING
    return _selection(dst_layers, src_layers, 1, dst_cache.cache_desc.num_tensors, per_layer)


def push_selection(src_layer_range: Any, dst_layer_range: Any, num_tensors: int, per_layer: int) -> Selection | None:
    """Tensors of a push from a local cache of ``num_tensors``; None when there is nothing to move (spec §7).

    A range that is not given is that of all local layers, and with fewer tensors than a layer has that one is empty.
    """
    check_layer_range("src_layer_range", src_layer_range)
    check_layer_range("dst_layer_range", dst_layer_range)
    all_layers = range(num_tensors // per_layer)
    src_layers = all_layers if src_layer_range is None else src_layer_range
    dst_layers = all_layers if dst_layer_range is None else dst_layer_range
    raise_if_false(
        num_layers(src_layers) == num_layers(dst_layers),
        f"src_layer_range {src_layers} and dst_layer_range {dst_layers} should have equally many layers",
    )
    count = num_layers(src_layers)
    return _selection(src_layers, dst_layers, count, num_tensors, per_layer) if count else None


def explained(error: NativeError, flaw: str | None) -> NativeError:
    """``error`` of a transfer; when the core calls it invalid, which may be because of the ``flaw`` of its selection,
    its text says that, too."""
    if flaw is None or error.native_status != NativeStatus.INVALID:
        return error
    return NativeError(f"{error.args[0]}; also: {flaw}", error.native_status)


def _selection(local: range | None, remote: range | None, count: int, num_tensors: int, per_layer: int) -> Selection:
    local_tensors, remote_tensors = _span(local, per_layer), _span(remote, per_layer)
    flaw = None
    if num_tensors % per_layer:
        flaw = f"the cache has {num_tensors} tensors, which tensor_num_per_layer {per_layer} does not divide"
        local_tensors = _NO_TENSOR
    elif _NO_TENSOR in (local_tensors, remote_tensors):
        flaw = f"layers {local} here and {remote} there, of {per_layer} tensors each, are beyond any cache"
    return Selection(local_tensors, remote_tensors, count, flaw)


def _span(layers: range | None, per_layer: int) -> TensorSpan:
    if layers is None:
        return ALL_TENSORS
    if layers.stop * per_layer > _MAX_TENSOR:
        return _NO_TENSOR
    return TensorSpan(layers.start * per_layer, num_layers(layers) * per_layer)
