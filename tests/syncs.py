"""What of ops/core/c_api.h only the TensorFlow ops call otherwise: syncs, and calls in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tf_adasum import core, native
from tf_adasum.arrays import Tensors, encode
from tf_adasum.errors import check
from tf_adasum.reductions import reduce_options


@dataclass
class Synced:
    """What `sync` tells beside the new values."""

    syncs: int
    skipped: bool
    orthogonality: list[float]
    wire_scale: tuple[int, int]
    """For the next one: exponent and good syncs."""


def sync(
    values: Sequence[np.ndarray],
    starts: Sequence[np.ndarray],
    algorithm: str = "rvh",
    *,
    name: str | None = None,
    with_starts: bool = False,
    flush: bool = False,
    fusion_threshold: int | None = None,
    raise_nonfinite: bool = False,
    skips_in_a_row: int = 0,
    wire_dtype: str | None = None,
    wire_scale: tuple[int, int] = (0, 0),
    residuals: Sequence[np.ndarray] | None = None,
    device: native.Device | None = None,
) -> Synced:
    """Replaces `values`, and `starts` if asked, by `starts` + what all ranks' changes come to."""
    core.init()
    own, begun = Tensors(values), Tensors(starts)
    none = Tensors([])
    new_starts = begun.pointers if with_starts else None
    given = (len(own), own.tensors, begun.pointers)
    tensors = native.SyncTensors(*given, own.pointers, new_starts, 0, none.tensors, none.pointers)
    reduce = reduce_options("adasum", name, algorithm, fusion_threshold)
    if device is not None:
        reduce.device = ctypes.pointer(device)
    wire = 0 if wire_dtype is None else native.DTYPES[wire_dtype]
    kept = None if residuals is None else Tensors(residuals).pointers
    options = native.SyncOptions(
        reduce, 1, flush, raise_nonfinite, skips_in_a_row, -1, wire, *wire_scale, residuals=kept
    )
    result, orthogonality = native.SyncResult(), (ctypes.c_double * len(own))()
    check(
        native.core_library().adasum_sync(
            ctypes.byref(tensors), ctypes.byref(options), ctypes.byref(result), orthogonality
        )
    )
    scale = (result.wire_exponent, result.wire_good_syncs)
    return Synced(result.syncs, bool(result.skipped), list(orthogonality), scale)


def broadcast_in_place(arrays: Sequence[np.ndarray], root: int, name: str | None = None) -> None:
    """Replaces `arrays` by root's."""
    core.init()
    own = Tensors(arrays)
    check(
        native.core_library().adasum_broadcast(
            own.tensors, own.pointers, len(own), root, encode(name), None, None
        )
    )
