"""What a reduction can be told: its op, its algorithm, the size of its buckets."""

from __future__ import annotations

import enum
import operator
import os

from tf_adasum import native
from tf_adasum.arrays import encode


class Op(str, enum.Enum):
    """How the ranks' tensors become one."""

    ADASUM = "adasum"
    """The adaptive sum of the paper's equation 5, per tensor, over its Algorithm 1's tree."""
    SUM = "sum"
    AVERAGE = "average"

    @classmethod
    def _missing_(cls, value: object) -> Op:
        raise ValueError(
            f"`op` must be one of {', '.join(repr(op.value) for op in cls)}. Received: op={value!r}"
        )


Adasum, Sum, Average = Op.ADASUM, Op.SUM, Op.AVERAGE
_OP_CODES = {Op.ADASUM: 0, Op.SUM: 1, Op.AVERAGE: 2}


class Algorithm(str, enum.Enum):
    """In which order, and by what exchanges, the ranks' tensors become one."""

    RVH = "rvh"
    """The tree of the paper's Algorithm 1 over all ranks."""
    RING = "ring"
    """One rank after the other, `(((0, 1), 2), 3)` (the paper's section 4.2.3)."""
    HIERARCHICAL = "hierarchical"
    """The mean of each host's ranks, then the tree over the hosts."""
    HIERARCHICAL_SUM = "hierarchical_sum"
    """The sum of each host's ranks, then the tree over the hosts."""

    @classmethod
    def _missing_(cls, value: object) -> Algorithm:
        names = ", ".join(repr(algorithm.value) for algorithm in cls)
        raise ValueError(f"`algorithm` must be one of {names}. Received: algorithm={value!r}")


_ALGORITHM_CODES = {algorithm: code for code, algorithm in enumerate(Algorithm)}


def choose_algorithm(algorithm: Algorithm | str | None) -> Algorithm:
    """The algorithm itself, or for None that of the environment: `TF_ADASUM_ALGORITHM`'s, or
    "hierarchical" where `HOROVOD_HIERARCHICAL_ALLREDUCE` is on, or else "rvh".

    Raises:
        ValueError: if that is no algorithm.
    """
    if algorithm is not None:
        return Algorithm(algorithm)
    named = os.environ.get("TF_ADASUM_ALGORITHM")
    if named:
        return Algorithm(named)
    by_horovod = os.environ.get("HOROVOD_HIERARCHICAL_ALLREDUCE", "0")
    return Algorithm.RVH if by_horovod in ("", "0") else Algorithm.HIERARCHICAL


def check_fusion_threshold(fusion_threshold: int | None) -> int:
    """The number of bytes, or -1 for None: the environment's or the default.

    Raises:
        ValueError: if it is no number of bytes.
    """
    if fusion_threshold is None:
        return -1
    try:
        threshold = operator.index(fusion_threshold)
    except TypeError:
        threshold = -1
    if not 0 <= threshold < 2**63 or isinstance(fusion_threshold, bool):
        raise ValueError(
            "`fusion_threshold` must be None or a number of bytes. "
            f"Received: fusion_threshold={fusion_threshold!r}"
        )
    return threshold


def reduce_options(
    op: Op | str,
    name: str | None,
    algorithm: Algorithm | str | None,
    fusion_threshold: int | None,
) -> native.ReduceOptions:
    return native.ReduceOptions(
        op=_OP_CODES[Op(op)],
        algorithm=_ALGORITHM_CODES[choose_algorithm(algorithm)],
        fusion_threshold=check_fusion_threshold(fusion_threshold),
        name=encode(name),
    )
