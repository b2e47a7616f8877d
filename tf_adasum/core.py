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
import enum
import functools
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_adasum import launch, native


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


class DisagreementError(ValueError):
    """The ranks pass different things to one collective; raised on every rank, naming them."""


class RankLostError(RuntimeError):
    """The process of a rank has died; raised on those that live, where MPI is fault tolerant."""


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
    _check(library.adasum_init(address))
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
    _check(native.core_library().adasum_shutdown())


def is_initialized() -> bool:
    """Whether `init` was called, by the user or implicitly, and `shutdown` was not."""
    return bool(native.core_library().adasum_is_initialized())


def _topology() -> native.Topology:
    init()
    topology = native.Topology()
    _check(native.core_library().adasum_topology(ctypes.byref(topology)))
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
    _check(native.core_library().adasum_partition(ctypes.byref(place)))
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
    _check(native.core_library().adasum_go_on_without_the_dead())
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
        _check(library.adasum_shrinking(index, ctypes.byref(each), None, 0))
        lost = (ctypes.c_int32 * each.lost_count)()
        _check(library.adasum_shrinking(index, ctypes.byref(each), lost, each.lost_count))
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
    inputs = _Tensors(arrays)
    results = inputs.empty_like()
    _reduce_into(results, inputs, _options(op, name, algorithm, fusion_threshold))
    return results.arrays


def _reduce_into(results: _Arrays, inputs: _Tensors, options: native.ReduceOptions) -> None:
    """With results that were made before, whose pages have memory already."""
    _check(
        native.core_library().adasum_allreduce(
            inputs.tensors, results.pointers, len(inputs), ctypes.byref(options)
        )
    )


def broadcast(array: np.ndarray, root_rank: int = 0, name: str | None = None) -> np.ndarray:
    """A copy of root_rank's array, which has the same shape and dtype (any) on every rank."""
    init()
    inputs = _Tensors([array])
    results = inputs.empty_like()
    root = operator.index(root_rank)
    # Out of C's int it is no rank either, which all ranks have to be told together.
    root = root if -(2**31) <= root < 2**31 else -1
    _check(
        native.core_library().adasum_broadcast(
            inputs.tensors, results.pointers, 1, root, _encode(name), None, None
        )
    )
    return results.arrays[0]


def allgather(array: np.ndarray, name: str | None = None) -> np.ndarray:
    """The ranks' arrays in rank order along the first dimension; they may differ in that alone."""
    init()
    inputs = _Tensors([array])
    gathered: list[np.ndarray] = []

    def allocate(rows: int, _context: object) -> int | None:
        source = inputs.arrays[0]
        gathered.append(np.empty((rows, *source.shape[1:]), source.dtype))
        return gathered[0].ctypes.data

    _check(
        native.core_library().adasum_allgather(
            inputs.tensors, native.Allocate(allocate), None, _encode(name), None
        )
    )
    return gathered[0]


def barrier(name: str | None = None) -> None:
    """Returns when every rank has called it."""
    init()
    _check(native.core_library().adasum_barrier(_encode(name)))


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
    return _simulate(per_rank, hosts, _options(op, None, algorithm, fusion_threshold))


def _simulate(
    per_rank: Sequence[Sequence[np.ndarray]],
    hosts: Sequence[int] | None,
    options: native.ReduceOptions,
) -> list[list[np.ndarray]]:
    per_rank = [list(arrays) for arrays in per_rank]
    if hosts is not None and len(hosts) != len(per_rank):
        raise ValueError(
            f"`hosts` must have one number for each of {len(per_rank)} ranks. Received: {hosts!r}"
        )
    inputs = _Tensors([array for arrays in per_rank for array in arrays])
    results = inputs.empty_like()
    counts = (ctypes.c_int64 * len(per_rank))(*(len(arrays) for arrays in per_rank))
    host_of = None if hosts is None else (ctypes.c_int32 * len(per_rank))(*hosts)
    _check(
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
    begun = _Tensors(list(starts))
    values = [_Tensors(list(arrays)) for arrays in per_rank]
    for arrays in values:
        if [a.shape for a in arrays.arrays] != [a.shape for a in begun.arrays] or [
            a.dtype for a in arrays.arrays
        ] != [a.dtype for a in begun.arrays]:
            raise ValueError("Each rank's arrays must have the shapes and dtypes of `starts`.")
    averaged = [_Tensors(list(arrays)) for arrays in (states or [[]] * ranks)]
    new_values = [arrays.empty_like() for arrays in values]
    new_states = [arrays.empty_like() for arrays in averaged]
    kept = None
    if residuals is not None:
        kept = [_Tensors([np.array(a, np.float32) for a in arrays]) for arrays in residuals]
        for arrays in kept:
            if [a.shape for a in arrays.arrays] != [a.shape for a in begun.arrays]:
                raise ValueError("Each rank's `residuals` must have the shapes of `starts`.")
    skips = list(skips_in_a_row or [0] * ranks)
    reduce = _options(op, None, algorithm, fusion_threshold)
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
    _check(
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


def _options(
    op: Op | str,
    name: str | None,
    algorithm: Algorithm | str | None,
    fusion_threshold: int | None,
) -> native.ReduceOptions:
    return native.ReduceOptions(
        op=_OP_CODES[Op(op)],
        algorithm=_ALGORITHM_CODES[choose_algorithm(algorithm)],
        fusion_threshold=check_fusion_threshold(fusion_threshold),
        name=_encode(name),
    )


class _Arrays:
    """Arrays and where they lie."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        self.pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))

    def __len__(self) -> int:
        return len(self.arrays)

    def empty_like(self) -> _Arrays:
        return _Arrays([np.empty_like(array) for array in self.arrays])


class _Tensors(_Arrays):
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


def _encode(name: str | None) -> bytes:
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise TypeError(f"`name` must be a string without NUL characters. Received: name={name!r}")
    return (name or "").encode()


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


def _check(status: int) -> None:
    if status == 0:
        return
    message = native.core_library().adasum_last_error().decode(errors="replace")
    if status == native.DISAGREEMENT:
        raise DisagreementError(message)
    if status == native.INVALID_ARGUMENT:
        raise ValueError(message)
    if status == native.RANK_LOST:
        raise RankLostError(message)
    raise RuntimeError(message)


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
