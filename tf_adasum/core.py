"""Collectives on NumPy arrays over MPI, and the same code with ranks as threads. Imports no
TensorFlow.

Every rank calls the same functions in the same order. Where ranks differ in the call, its options,
or the number, dtypes or shapes of the arrays, `DisagreementError` is raised on every rank. All
ranks get the same bits.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_adasum import launch, native
from tf_adasum.arrays import Arrays, Tensors, encode
from tf_adasum.errors import DisagreementError, RankLostError, check
from tf_adasum.reductions import Adasum, Algorithm, Average, Op, Sum, reduce_options
from tf_adasum.simulated import SimulatedSync, simulate, simulate_sync

__all__ = [
    "Adasum",
    "Algorithm",
    "Average",
    "DisagreementError",
    "Op",
    "RankLostError",
    "Shrinking",
    "SimulatedSync",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "cross_rank",
    "cross_size",
    "go_on_without_the_dead",
    "grouped_allreduce",
    "init",
    "is_fault_tolerant",
    "is_initialized",
    "local_rank",
    "local_size",
    "partition_place",
    "rank",
    "shrinkings",
    "shutdown",
    "simulate",
    "simulate_sync",
    "size",
]


@dataclasses.dataclass(frozen=True)
class Shrinking:
    """What became of the ranks when the others went on without those that had died."""

    lost: tuple[int, ...]
    """The ranks that were lost, by the numbers that they had."""
    old_rank: int
    old_size: int
    """This process's rank, and the number of ranks, before."""
    new_rank: int
    new_size: int
    """And after: the others keep their order."""


# How long a rank that dies of an exception waits for the others to print theirs, in seconds.
# Short, since they may just as well be waiting for this one.
_GRACE_SECONDS = 1.0
# How long a launcher has for handing on what a rank printed, which MPICH's drops where it ends.
_FORWARDING_SECONDS = 0.2


def init(comm: Any = None) -> None:
    """Joins this process with the others of an MPI communicator.

    Called by every rank. Happens by itself, with all processes, on the first use of anything that
    needs it; a second call without `comm` does nothing. MPI is initialized if it is not yet, and
    then also finalized when the process exits. An uncaught exception on one rank ends all of them.

    Args:
        comm: an `mpi4py.MPI.Intracomm`, which is duplicated; by default all processes.

    Raises:
        TypeError: if `comm` is something else.
        RuntimeError: if tf_adasum is initialized and `comm` is given; if a launcher started several
            processes but MPI sees one; if MPI is finalized, or its thread level is too low.
    """
    library = native.core_library()
    address = _address_of(comm)
    if is_initialized():
        if comm is not None:
            raise RuntimeError(
                "tf_adasum is already initialized, so `comm` would be ignored: call init(comm) "
                "before anything else, or shutdown() first."
            )
        return
    check(library.adasum_init(address))
    _arrange_for_the_end()
    try:
        launch.check_not_alone(library.adasum_job_size())
    except RuntimeError:
        shutdown()
        raise


def shutdown() -> None:
    """Leaves the other ranks. Called by every rank, or all get a DisagreementError.

    Happens by itself when the process exits. `init` may be called again afterwards.
    """
    check(native.core_library().adasum_shutdown())


def is_initialized() -> bool:
    """Whether `init` was called, by the user or implicitly, and `shutdown` was not."""
    return bool(native.core_library().adasum_is_initialized())


def _topology() -> native.Topology:
    init()
    topology = native.Topology()
    check(native.core_library().adasum_topology(ctypes.byref(topology)))
    return topology


def rank() -> int:
    """This process's number, from 0 to size() - 1."""
    return _topology().rank


def size() -> int:
    """The number of processes."""
    return _topology().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return _topology().local_rank


def local_size() -> int:
    """The number of processes of this host."""
    return _topology().local_size


def cross_rank() -> int:
    """This process's number among those that have its local rank, one on each host."""
    return _topology().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return _topology().cross_size


def partition_place() -> tuple[int, int]:
    """How many ranks of each host own variables of a partitioned optimizer, and this one's lane.

    The lane is its place among the host's ranks; those behind the first so many own nothing.
    """
    init()
    place = native.Partition()
    check(native.core_library().adasum_partition(ctypes.byref(place)))
    return place.lanes, place.lane


def go_on_without_the_dead() -> None:
    """From now on the ranks that live go on without those whose processes die.

    A collective then ends alike on all that live, done without the dead; `rank()` and `size()` tell
    the new numbers, `shrinkings()` what happened. Called by every rank before the same collective;
    `AdasumOptimizer(..., elastic=True)` does it.

    Raises:
        RuntimeError: if there are several ranks and MPI cannot do that: Open MPI 5 can where it was
            started by `mpirun --with-ft ulfm`.
    """
    init()
    check(native.core_library().adasum_go_on_without_the_dead())
    global _goes_on
    _goes_on = True


def is_fault_tolerant() -> bool:
    """Whether this MPI lets the others go on when a process dies: `mpirun --with-ft ulfm`."""
    init()
    return bool(native.core_library().adasum_is_fault_tolerant())


def shrinkings() -> list[Shrinking]:
    """What ranks were lost since `init`, in order. No collective: to be looked at at any time."""
    library = native.core_library()
    found = []
    for index in range(library.adasum_shrinkings()):
        each = native.Shrinking()
        check(library.adasum_shrinking(index, ctypes.byref(each), None, 0))
        lost = (ctypes.c_int32 * each.lost_count)()
        check(library.adasum_shrinking(index, ctypes.byref(each), lost, each.lost_count))
        found.append(
            Shrinking(tuple(lost), each.old_rank, each.old_size, each.new_rank, each.new_size)
        )
    return found


def allreduce(
    array: np.ndarray, op: Op | str = Adasum, name: str | None = None, **options: Any
) -> np.ndarray:
    """`grouped_allreduce` of one array."""
    return grouped_allreduce([array], op, name, **options)[0]


def grouped_allreduce(
    arrays: Sequence[np.ndarray],
    op: Op | str = Adasum,
    name: str | None = None,
    *,
    algorithm: Algorithm | str | None = None,
    fusion_threshold: int | None = None,
) -> list[np.ndarray]:
    """Reduces each array by itself over all ranks, in fused exchanges (the paper's 4.4.3).

    NaN or infinity on one rank goes through: an array's Adasum is then NaN in all of its elements,
    on all ranks, a sum or a mean only where the value is. What two ranks' arrays come to is kept
    in their dtype at each level of the tree, so what is out of its range there is infinite.

    Args:
        arrays: float16, bfloat16 (of ml_dtypes), float32 or float64, of any shape and layout.
        op: "adasum", "sum" or "average". Sums of products are accumulated in float64.
        name: shown in errors; must be equal on all ranks.
        algorithm: "rvh" (the default), "ring", "hierarchical" (mean within a host) or
            "hierarchical_sum"; see `Algorithm`. A sum or a mean is the same with all of them, up
            to rounding.
        fusion_threshold: bytes. Arrays are reduced in buckets of at most so many bytes, or of one
            array; two buckets are in memory at a time. By default the environment's
            `TF_ADASUM_FUSION_THRESHOLD` or `HOROVOD_FUSION_THRESHOLD`, or else 4 MiB on one host
            and 16 MiB over several.

    Returns:
        New arrays with the shapes and dtypes of `arrays`, bitwise equal on all ranks.

    Raises:
        DisagreementError: on every rank, if the ranks' calls differ.
        ValueError: if `op`, `algorithm` or a dtype is not one of those above, or
            `fusion_threshold` is no number of bytes.
    """
    init()
    inputs = Tensors(arrays)
    results = inputs.empty_like()
    reduce_into(results, inputs, reduce_options(op, name, algorithm, fusion_threshold))
    return results.arrays


def reduce_into(results: Arrays, inputs: Tensors, options: native.ReduceOptions) -> None:
    """With results that were made before, whose pages have memory already."""
    check(
        native.core_library().adasum_allreduce(
            inputs.tensors, results.pointers, len(inputs), ctypes.byref(options)
        )
    )


def broadcast(array: np.ndarray, root_rank: int = 0, name: str | None = None) -> np.ndarray:
    """A copy of root_rank's array, which has the same shape and dtype (any) on every rank."""
    init()
    inputs = Tensors([array])
    results = inputs.empty_like()
    root = operator.index(root_rank)
    # Out of C's int it is no rank either, which all ranks have to be told together.
    root = root if -(2**31) <= root < 2**31 else -1
    check(
        native.core_library().adasum_broadcast(
            inputs.tensors, results.pointers, 1, root, encode(name), None, None
        )
    )
    return results.arrays[0]


def allgather(array: np.ndarray, name: str | None = None) -> np.ndarray:
    """The ranks' arrays in rank order along the first dimension; they may differ in that alone."""
    init()
    inputs = Tensors([array])
    gathered: list[np.ndarray] = []

    def allocate(rows: int, _context: object) -> int | None:
        source = inputs.arrays[0]
        gathered.append(np.empty((rows, *source.shape[1:]), source.dtype))
        return gathered[0].ctypes.data

    check(
        native.core_library().adasum_allgather(
            inputs.tensors, native.Allocate(allocate), None, encode(name), None
        )
    )
    return gathered[0]


def barrier(name: str | None = None) -> None:
    """Returns when every rank has called it."""
    init()
    check(native.core_library().adasum_barrier(encode(name)))


def _address_of(comm: Any) -> int | None:
    """Where the MPI_Comm of an mpi4py communicator lies."""
    if comm is None:
        return None
    if not type(comm).__module__.startswith("mpi4py"):
        raise TypeError(f"`comm` must be an mpi4py.MPI.Intracomm. Received: {comm!r}")
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"`comm` must be an mpi4py.MPI.Intracomm. Received: {comm!r}")
    running = native.core_library().adasum_mpi_running().decode()
    theirs = MPI.Get_library_version()
    if not theirs.startswith(running):
        raise RuntimeError(
            f"mpi4py uses '{theirs.splitlines()[0]}', but tf_adasum uses '{running}': a "
            "communicator of one means nothing to the other. Install both for the same MPI."
        )
    return MPI._addressof(comm)


_end_is_arranged = False
_goes_on = False


def _arrange_for_the_end() -> None:
    """Makes a clean exit finalize MPI, and an uncaught exception end every rank.

    An exception would otherwise leave the other ranks waiting for this one for ever.
    """
    global _end_is_arranged
    if _end_is_arranged:
        return
    _end_is_arranged = True
    # A forked child inherits both, but is no rank.
    pid = os.getpid()
    atexit.register(_leave, pid)
    sys.excepthook = _ending_all_ranks(sys.excepthook, pid)


def _ending_all_ranks(show: Callable, pid: int) -> Callable:
    def hook(kind: type[BaseException], error: BaseException, where: Any) -> None:
        show(kind, error, where)
        job = native.core_library().adasum_job_size() if os.getpid() == pid else 1
        # Also the ranks that are in no communicator with this one: they may wait for it elsewhere.
        if job > 1 and not hasattr(sys, "ps1"):
            who = f"rank {rank()}" if is_initialized() else "one rank"
            cause = "".join(traceback.format_exception_only(kind, error)).strip()
            if _goes_on:
                _die_alone(f"tf_adasum: {who} ends, those left go on. Its error: {cause}")
            _abort(f"tf_adasum: {who} ends the job. Its error, shown above: {cause}")

    return hook


def _leave(pid: int) -> None:
    if os.getpid() != pid:
        return
    library = native.core_library()
    try:
        shutdown()
    except (ValueError, RuntimeError) as error:
        _abort(f"tf_adasum: this rank is exiting, but {error}")
    library.adasum_finalize()


def _die_alone(message: str) -> None:
    """Ends this process so that the others notice, and go on."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    native.core_library().adasum_die_alone()


def _abort(message: str) -> None:
    library = native.core_library()
    sys.stdout.flush()
    sys.stderr.flush()
    library.adasum_is_ending()
    # What others print meanwhile follows from this. So that the cause is seen last, it comes then.
    time.sleep(_GRACE_SECONDS)
    print(message, file=sys.stderr, flush=True)
    time.sleep(_FORWARDING_SECONDS)
    library.adasum_abort(1)
