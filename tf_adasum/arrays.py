"""NumPy arrays, and names, as the C API takes them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from tf_adasum import native


class Arrays:
    """Arrays and where they lie."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        self.pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))

    def __len__(self) -> int:
        return len(self.arrays)

    def empty_like(self) -> Arrays:
        return Arrays([np.empty_like(array) for array in self.arrays])


class Tensors(Arrays):
    """Arrays as the C API wants them. Keeps alive what the pointers point to."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(f"expected a list of arrays. Received: {type(arrays).__name__}")
        super().__init__([_plain(array) for array in arrays])
        self._dims = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in self.arrays]
        self.tensors = (native.Tensor * len(self.arrays))(
            *map(self._tensor, self.arrays, self.pointers, self._dims)
        )

    @staticmethod
    def _tensor(array: np.ndarray, data: int | None, dims: ctypes.Array) -> native.Tensor:
        dtype_name, dtype = _dtype(array.dtype)
        return native.Tensor(
            data=data,
            dims=dims,
            item_bytes=array.itemsize,
            dtype_name=dtype_name,
            rank=array.ndim,
            dtype=dtype,
        )


def _plain(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy that is row-major and in this machine's byte order."""
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise TypeError(
            "expected an array of numbers; a reduction takes float16, bfloat16, float32 or "
            f"float64. Received: dtype={array.dtype}"
        )
    native_order = array.dtype.newbyteorder("=")
    # Not ascontiguousarray, which turns a scalar into a vector.
    return np.require(array.astype(native_order, copy=False), requirements="C")


@functools.lru_cache(maxsize=64)  # NumPy makes a dtype's name anew each time, in microseconds
def _dtype(dtype: np.dtype) -> tuple[bytes, int]:
    """Its name for error texts, and its code."""
    name = dtype.name if dtype.names is None else str(dtype.descr)
    return name.encode(), native.DTYPES.get(dtype.name, native.OTHER_DTYPE)


def encode(name: str | None) -> bytes:
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise TypeError(f"`name` must be a string without NUL characters. Received: name={name!r}")
    return (name or "").encode()
