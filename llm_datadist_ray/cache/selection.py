"""Layer ranges to tensors: which tensors of each side a transfer takes (spec api-cachemanager §5.3, §7)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray._native import ALL_TENSORS, TensorSpan
from llm_datadist_ray.checks import check_isinstance, check_layer_range, check_uint32
from llm_datadist_ray.errors import raise_if_false

DEFAULT_TENSORS_PER_LAYER = 2
_MAX_TENSOR = 2**32 - 1

Selection = tuple[TensorSpan, TensorSpan]
"""(local, remote)"""


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
    return value if len(value) else None


def pull_selection(src_layers: range | None, dst_layers: range | None, num_tensors: int, per_layer: int) -> Selection:
    """Tensors of a pull into a local cache of ``num_tensors``. That both sides have as many, and that they exist, is
    checked by the native core, which knows the peer's cache."""
    if src_layers is None and dst_layers is None:
        return ALL_TENSORS, ALL_TENSORS
    _check_divisible(num_tensors, per_layer)
    return _span("dst_layer_range", dst_layers, per_layer), _span("src_layer_range", src_layers, per_layer)


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
        len(src_layers) == len(dst_layers),
        f"src_layer_range {src_layers} and dst_layer_range {dst_layers} should have equally many layers",
    )
    if not len(src_layers):
        return None
    _check_divisible(num_tensors, per_layer)
    return _span("src_layer_range", src_layers, per_layer), _span("dst_layer_range", dst_layers, per_layer)


def _check_divisible(num_tensors: int, per_layer: int) -> None:
    raise_if_false(
        num_tensors % per_layer == 0,
        f"the cache has {num_tensors} tensors, which tensor_num_per_layer {per_layer} does not divide",
    )


def _span(name: str, layers: range | None, per_layer: int) -> TensorSpan:
    if layers is None:
        return ALL_TENSORS
    raise_if_false(
        layers.stop * per_layer <= _MAX_TENSOR,
        f"{name} {layers} with {per_layer} tensors in a layer is beyond any cache",
    )
    return TensorSpan(layers.start * per_layer, len(layers) * per_layer)
