"""Tensors on the emulated device, whose memory nothing but its own kernels and copies can touch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from tf_adasum import core, native
from tf_adasum.arrays import Tensors
from tf_adasum.errors import check
from tf_adasum.reductions import reduce_options
from tf_adasum.simulated import simulate_with

EMULATED = native.Device(memory=2)


def simulate(
    per_rank: Sequence[Sequence[np.ndarray]],
    op: str = "adasum",
    algorithm: str | None = None,
    *,
    fusion_threshold: int | None = None,
    hosts: Sequence[int] | None = None,
) -> list[list[np.ndarray]]:
    """`core.simulate` with all tensors on the device."""
    options = _options(op, None, algorithm, fusion_threshold)
    return simulate_with(per_rank, hosts, options)


class OnDevice:
    """Copies of arrays on the device, as long as this lives."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._tensors = Tensors(list(arrays))
        self.memory = (ctypes.c_void_p * len(arrays))()
        for i, array in enumerate(self._tensors.arrays):
            place = ctypes.byref(self.memory, i * ctypes.sizeof(ctypes.c_void_p))
            place = ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))
            _call("adasum_device_allocate", max(array.nbytes, 1), place)
            _call("adasum_device_copy", self.memory[i], array.ctypes.data, array.nbytes, 1)
            self._tensors.tensors[i].data = self.memory[i]

    @property
    def tensors(self) -> ctypes.Array:
        return self._tensors.tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def arrays(self) -> list[np.ndarray]:
        """What is there now."""
        copies = [np.empty_like(array) for array in self._tensors.arrays]
        for copy, memory in zip(copies, self.memory, strict=True):
            _call("adasum_device_copy", copy.ctypes.data, memory, copy.nbytes, 0)
        return copies

    def __del__(self):
        for memory in self.memory:
            _call("adasum_device_free", memory)


def allreduce(
    arrays: Sequence[np.ndarray],
    op: str = "adasum",
    algorithm: str | None = None,
    *,
    name: str | None = None,
    fusion_threshold: int | None = None,
) -> list[np.ndarray]:
    """`core.grouped_allreduce` with the arrays on the device, in place there."""
    core.init()
    there = OnDevice(arrays)
    options = _options(op, name, algorithm, fusion_threshold)
    library = native.core_library()
    check(library.adasum_allreduce(there.tensors, there.memory, len(there), ctypes.byref(options)))
    return there.arrays()


def broadcast(array: np.ndarray, root: int) -> np.ndarray:
    core.init()
    there = OnDevice([array])
    device = ctypes.byref(EMULATED)
    check(
        native.core_library().adasum_broadcast(
            there.tensors, there.memory, 1, root, None, None, device
        )
    )
    return there.arrays()[0]


def allgather(array: np.ndarray) -> np.ndarray:
    core.init()
    there = OnDevice([array])
    gathered: list[OnDevice] = []

    def allocate(rows: int, _context: object) -> int | None:
        gathered.append(OnDevice([np.empty((rows, *array.shape[1:]), array.dtype)]))
        return gathered[0].memory[0]

    device = ctypes.byref(EMULATED)
    check(
        native.core_library().adasum_allgather(
            there.tensors, native.Allocate(allocate), None, None, device
        )
    )
    return gathered[0].arrays()[0]


def _options(
    op: str, name: str | None, algorithm: str | None, fusion_threshold: int | None
) -> native.ReduceOptions:
    options = reduce_options(op, name, algorithm, fusion_threshold)
    options.device = ctypes.pointer(EMULATED)
    return options


def _call(function: str, *arguments: object) -> None:
    check(getattr(native.core_library(), function)(ctypes.byref(EMULATED), *arguments))
