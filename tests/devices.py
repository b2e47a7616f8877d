"""Tensors on the emulated device, whose memory nothing but its own kernels and copies can touch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from tf_adasum import core, native

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
    options = core._options(op, None, algorithm, fusion_threshold)
    options.device = ctypes.pointer(EMULATED)
    return core._simulate(per_rank, hosts, options)
