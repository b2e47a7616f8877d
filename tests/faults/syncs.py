"""The core's sync of weights on NumPy arrays, which otherwise only the TensorFlow ops call."""

from __future__ import annotations

import ctypes

import numpy as np

from tf_adasum import core, native


class _SyncTensors(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("values", ctypes.POINTER(native.Tensor)),
        ("starts", ctypes.POINTER(ctypes.c_void_p)),
        ("new_values", ctypes.POINTER(ctypes.c_void_p)),
        ("new_starts", ctypes.POINTER(ctypes.c_void_p)),
        ("state_count", ctypes.c_int64),
        ("states", ctypes.POINTER(native.Tensor)),
        ("new_states", ctypes.POINTER(ctypes.c_void_p)),
    ]


class _SyncOptions(ctypes.Structure):
    _fields_ = [
        ("reduce", native.ReduceOptions),
        ("pending", ctypes.c_int32),
        ("flush", ctypes.c_int32),
        ("raise_nonfinite", ctypes.c_int32),
        ("skips_in_a_row", ctypes.c_int64),
        ("flight", ctypes.c_int64),
    ]


class _SyncResult(ctypes.Structure):
    _fields_ = [
        ("syncs", ctypes.c_int64),
        ("skipped", ctypes.c_int32),
        ("identical", ctypes.c_int32),
    ]


def sync(
    values: list[np.ndarray],
    starts: list[np.ndarray],
    algorithm: str,
    threshold: int | None,
    name: str,
    flush: bool = False,
) -> tuple[list[np.ndarray], int]:
    """The weights after it, and how many reductions were done: 0 where all went back."""
    library = native.core_library()
    own, begin = core._Tensors(values), core._Tensors(starts)
    new_values, new_starts = own.empty_like(), own.empty_like()
    tensors = _SyncTensors(
        len(own), own.tensors, begin.pointers, new_values.pointers, new_starts.pointers
    )
    reduce = core._options("adasum", name, algorithm, threshold)
    options = _SyncOptions(reduce=reduce, pending=1, flush=flush, flight=-1)
    result = _SyncResult()
    core._check(
        library.adasum_sync(
            ctypes.byref(tensors), ctypes.byref(options), ctypes.byref(result), None
        )
    )
    for value, start in zip(new_values.arrays, new_starts.arrays, strict=True):
        assert value.tobytes() == start.tobytes(), "values and starts differ after a sync"
    return new_values.arrays, result.syncs
