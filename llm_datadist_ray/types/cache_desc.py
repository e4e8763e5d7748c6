"""The shape of a cache (spec api-types §5)."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist_ray.checks import check_int32, check_isinstance, check_list_int64, check_uint32
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.types.enums import DataType, Placement

_MAX_SIZE_BYTES = 2**63 - 1


class CacheDesc:
    """``num_tensors`` tensors of one shape, element type and placement (spec api-types §5).

    ``shape`` is kept by reference. ``data_type`` None passes here and fails when a size is needed.
    ``seq_len_dim_index`` and ``kv_tensor_format`` are carried for v1 callers and steer nothing.

    Whether a cache holds batch entries or blocks is no property of its description; the registering or allocating
    method decides, so one object may be used for both.

    Raises TypeError, ValueError (``num_tensors`` not uint32, ``seq_len_dim_index`` not int32, a dimension not int64)
    or LLMException(LLM_PARAM_INVALID) (an index outside the shape).
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_uint32("num_tensors", num_tensors)
        check_isinstance("shape", shape, (list, tuple), int, allow_none=False)
        check_isinstance("data_type", data_type, DataType)
        check_isinstance("placement", placement, Placement, allow_none=False)
        check_isinstance("batch_dim_index", batch_dim_index, int, allow_none=False)
        check_int32("seq_len_dim_index", seq_len_dim_index)
        check_isinstance("kv_tensor_format", kv_tensor_format, str)
        rank = len(shape)
        raise_if_false(
            0 <= batch_dim_index < rank,
            f"batch_dim_index should be in range [0, {rank}) for shape {shape}, but got {batch_dim_index}",
        )
        raise_if_false(
            -1 <= seq_len_dim_index < rank,
            f"seq_len_dim_index should be -1 or in range [0, {rank}) for shape {shape}, but got {seq_len_dim_index}",
        )
        check_list_int64("shape", shape)
        self._num_tensors = num_tensors
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._size: int | None = None

    @property
    def num_tensors(self) -> int:
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """The caller's own list or tuple."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        return self._data_type

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def batch_dim(self) -> int:
        """``batch_dim_index`` as given. The engine always uses dimension 0 (spec api-types §5)."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """``shape[batch_dim_index]`` at construction; :meth:`update_dim` does not change it."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor, computed at the first read. LLMException(LLM_PARAM_INVALID) when the data type is
        unknown, a dimension is not positive or the size does not fit 63 bits."""
        if self._size is None:
            self._size = self._compute_size()
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Assigns into the stored shape (TypeError for a tuple, IndexError outside it); the next ``size`` is new."""
        self._shape[dim_index] = dim_value  # type: ignore[index]
        self._size = None

    def _compute_size(self) -> int:
        if not isinstance(self._data_type, DataType):
            raise LLMException(
                f"cannot compute the tensor size of data_type {self._data_type}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )
        size = self._data_type.item_bytes
        for dim in self._shape:
            raise_if_false(dim > 0, f"every dimension of shape {self._shape} should be greater than zero")
            size *= dim
        raise_if_false(
            size <= _MAX_SIZE_BYTES, f"a tensor of shape {self._shape} has {size} bytes, more than {_MAX_SIZE_BYTES}"
        )
        return size

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim_index}, "
            f"seq_len_dim_index={self._seq_len_dim_index}, kv_tensor_format={self._kv_tensor_format!r})"
        )
