"""Collectives of ranks that are threads of this process; they need no MPI launcher."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_adasum import native
from tf_adasum.arrays import Tensors
from tf_adasum.errors import check
from tf_adasum.reductions import Adasum, Algorithm, Op, reduce_options


def simulate(
    per_rank: Sequence[Sequence[np.ndarray]],
    op: Op | str = Adasum,
    algorithm: Algorithm | str | None = None,
    *,
    fusion_threshold: int | None = None,
    hosts: Sequence[int] | None = None,
) -> list[list[np.ndarray]]:
    """`grouped_allreduce` with ranks that are threads of this process; needs no MPI launcher.

    Args:
        per_rank: for each rank its arrays, `[rank][tensor]`.
        op: as in `grouped_allreduce`.
        algorithm: likewise.
        fusion_threshold: likewise.
        hosts: for each rank the number of the host that it is to be on; by default all are on one.

    Returns:
        Each rank's result, `[rank][tensor]`, bit for bit what that many processes would get.

    Raises:
        DisagreementError: if the ranks' arrays differ in number, dtype or shape.
        ValueError: if there is no rank, or `op`, `algorithm` or a dtype is not known, or `hosts`
            is not one number a rank.
    """
    return simulate_with(per_rank, hosts, reduce_options(op, None, algorithm, fusion_threshold))


def simulate_with(
    per_rank: Sequence[Sequence[np.ndarray]],
    hosts: Sequence[int] | None,
    options: native.ReduceOptions,
) -> list[list[np.ndarray]]:
    per_rank = [list(arrays) for arrays in per_rank]
    if hosts is not None and len(hosts) != len(per_rank):
        raise ValueError(
            f"`hosts` must have one number for each of {len(per_rank)} ranks. Received: {hosts!r}"
        )
    inputs = Tensors([array for arrays in per_rank for array in arrays])
    results = inputs.empty_like()
    counts = (ctypes.c_int64 * len(per_rank))(*(len(arrays) for arrays in per_rank))
    host_of = None if hosts is None else (ctypes.c_int32 * len(per_rank))(*hosts)
    check(
        native.core_library().adasum_simulate(
            len(per_rank),
            host_of,
            inputs.tensors,
            results.pointers,
            counts,
            ctypes.byref(options),
        )
    )
    rest = iter(results.arrays)
    return [[next(rest) for _ in arrays] for arrays in per_rank]


@dataclasses.dataclass(frozen=True)
class SimulatedSync:
    """What became of a simulated sync."""

    values: list[list[np.ndarray]]
    """`[rank][tensor]`: start + what all changes come to; bitwise equal on all ranks."""
    states: list[list[np.ndarray]]
    """`[rank][tensor]`: the ranks' mean; as they were where a rank was skipped."""
    residuals: list[list[np.ndarray]] | None
    """`[rank][tensor]`: what rounding dropped, for the next sync."""
    orthogonality: list[float]
    """Of each tensor (the paper's section 3.6); NaN with one rank, or another op than Adasum."""
    skips_in_a_row: list[int]
    """For each rank how often in a row its change was not finite, for the next sync."""
    wire_scale: tuple[int, int]
    """For the next sync."""
    sent_bytes: int
    """By all ranks together, in messages; those of one host send hardly any."""


def simulate_sync(
    per_rank: Sequence[Sequence[np.ndarray]],
    starts: Sequence[np.ndarray],
    op: Op | str = Adasum,
    algorithm: Algorithm | str | None = None,
    *,
    states: Sequence[Sequence[np.ndarray]] | None = None,
    wire_dtype: str | None = None,
    wire_scale: tuple[int, int] = (0, 0),
    residuals: Sequence[Sequence[np.ndarray]] | None = None,
    skips_in_a_row: Sequence[int] | None = None,
    fusion_threshold: int | None = None,
    hosts: Sequence[int] | None = None,
) -> SimulatedSync:
    """The sync of `AdasumOptimizer`, with ranks that are threads of this process.

    Nothing of what is given is written to. A rank's change that is not finite counts as zero, the
    third time in a row it is an error.

    Args:
        per_rank: `[rank][tensor]`, each rank's weights at the end of its window.
        starts: the weights that all ranks had at its beginning.
        op, algorithm, fusion_threshold, hosts: as in `simulate`.
        states: `[rank][tensor]`, what is averaged over the ranks; nothing by default.
        wire_dtype: None, "float16" or "bfloat16": float32 changes are sent as that.
        wire_scale: exponent of the power of two that changes are multiplied by, and how many syncs
            have gone well with it: what the last sync returned. `AdasumOptimizer` starts with
            (10, 0) for float16, and (0, 0) for bfloat16.
        residuals: `[rank][tensor]`, float32, what the last sync returned, and zeros at first; None
            keeps nothing.
        skips_in_a_row: for each rank, what the last sync returned; by default zeros.

    Raises:
        DisagreementError: if the ranks' arrays differ in number, dtype or shape.
        ValueError: if an option is not one of those above, there is no rank, or a change is not
            finite for the third time in a row.
    """
    ranks = len(per_rank)
    if wire_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(
            "`wire_dtype` must be None, 'float16' or 'bfloat16'. Received: "
            f"wire_dtype={wire_dtype!r}"
        )
    for what, given in (
        ("states", states),
        ("residuals", residuals),
        ("skips_in_a_row", skips_in_a_row),
        ("hosts", hosts),
    ):
        if given is not None and len(given) != ranks:
            raise ValueError(
                f"`{what}` must have one element for each of {ranks} ranks. Received: {len(given)}"
            )
    begun = Tensors(list(starts))
    values = [Tensors(list(arrays)) for arrays in per_rank]
    for arrays in values:
        if [a.shape for a in arrays.arrays] != [a.shape for a in begun.arrays] or [
            a.dtype for a in arrays.arrays
        ] != [a.dtype for a in begun.arrays]:
            raise ValueError("Each rank's arrays must have the shapes and dtypes of `starts`.")
    averaged = [Tensors(list(arrays)) for arrays in (states or [[]] * ranks)]
    new_values = [arrays.empty_like() for arrays in values]
    new_states = [arrays.empty_like() for arrays in averaged]
    kept = None
    if residuals is not None:
        kept = [Tensors([np.array(a, np.float32) for a in arrays]) for arrays in residuals]
        for arrays in kept:
            if [a.shape for a in arrays.arrays] != [a.shape for a in begun.arrays]:
                raise ValueError("Each rank's `residuals` must have the shapes of `starts`.")
    skips = list(skips_in_a_row or [0] * ranks)
    reduce = reduce_options(op, None, algorithm, fusion_threshold)
    tensors = (native.SyncTensors * ranks)(
        *(
            native.SyncTensors(
                count=len(values[rank]),
                values=values[rank].tensors,
                starts=begun.pointers,
                new_values=new_values[rank].pointers,
                state_count=len(averaged[rank]),
                states=averaged[rank].tensors,
                new_states=new_states[rank].pointers,
            )
            for rank in range(ranks)
        )
    )
    options = (native.SyncOptions * ranks)(
        *(
            native.SyncOptions(
                reduce=reduce,
                pending=1,
                skips_in_a_row=skips[rank],
                flight=-1,
                wire_dtype=0 if wire_dtype is None else native.DTYPES[wire_dtype],
                wire_exponent=wire_scale[0],
                wire_good_syncs=wire_scale[1],
                residuals=None if kept is None else kept[rank].pointers,
            )
            for rank in range(ranks)
        )
    )
    results = (native.SyncResult * ranks)()
    orthogonality = (ctypes.c_double * len(begun))()
    sent = ctypes.c_int64()
    host_of = None if hosts is None else (ctypes.c_int32 * ranks)(*hosts)
    check(
        native.core_library().adasum_simulate_sync(
            ranks, host_of, tensors, options, results, orthogonality, ctypes.byref(sent)
        )
    )
    return SimulatedSync(
        values=[arrays.arrays for arrays in new_values],
        states=[arrays.arrays for arrays in new_states],
        residuals=None if kept is None else [arrays.arrays for arrays in kept],
        orthogonality=list(orthogonality),
        skips_in_a_row=[s + 1 if r.skipped else 0 for s, r in zip(skips, results, strict=True)],
        wire_scale=(results[0].wire_exponent, results[0].wire_good_syncs),
        sent_bytes=sent.value,
    )
