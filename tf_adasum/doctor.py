"""`python -m tf_adasum doctor`: what was built, and what is here."""

from __future__ import annotations

import argparse
import os

from . import native


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum doctor",
        description="Says what tf_adasum was built with. Ends with 1 where it cannot be used.",
    )
    parser.parse_args(argv)
    try:
        info = native.build_info()
        library = native.core_library()
    except ImportError as error:
        print(f"tf_adasum cannot be used: {error}")
        return 1
    rows = {
        "tf_adasum": info["version"],
        "built for TensorFlow": info["tensorflow"],
        "compiler": info["compiler"],
        "MPI built for": f"{info['mpi']} {info['mpi_version']}",
        "MPI here": library.adasum_mpi_running().decode(),
        "CPU kernels": library.adasum_simd().decode(),
        "XLA": "yes" if info.get("xla") else "no: jit_compile=True is an error",
        "CUDA": _cuda(info, library),
    }
    if native.has_cuda():
        rows["tensors on GPUs go"] = _way(library)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
    return 0


def _cuda(info: dict, library: object) -> str:
    if not native.has_cuda():
        return "no: built without nvcc, so tensors on GPUs are refused"
    gpus = library.adasum_cuda_devices()
    return f"built with {info['cuda']}; GPUs here: {gpus if gpus > 0 else 'none'}"


def _way(library: object) -> str:
    wanted = os.environ.get("TF_ADASUM_DEVICE_TRANSPORT") or "auto"
    problem = library.adasum_nccl_problem().decode()
    if library.adasum_mpi_reads_cuda():
        able = "by this MPI, which is CUDA-aware"
    elif not problem:
        able = "by NCCL, where each rank has a GPU of its own; this MPI is not CUDA-aware"
    else:
        able = f"through memory of the hosts: this MPI is not CUDA-aware, and NCCL: {problem}"
    return f"{able} (TF_ADASUM_DEVICE_TRANSPORT={wanted})"
