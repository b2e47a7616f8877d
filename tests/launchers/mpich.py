"""The core built for MPICH, beside the one that all other tests are of: MPICH comes as a wheel."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from ranks import Ended, run

from tf_adasum import launch

ROOT = Path(__file__).resolve().parents[2]


class UnavailableError(RuntimeError):
    """It cannot be had here; the text says why."""


def run_with(package: Path, command: list[str], timeout: float = 60, **environ: str) -> Ended:
    """Runs a command whose Python programs find this package, and not the one of other tests."""
    path = os.pathsep.join([str(package), launch.environment()["PYTHONPATH"]])
    # `python -m` looks into the working folder first.
    return run(command, timeout, package, PYTHONPATH=path, **environ)


@functools.cache
def folder() -> Path:
    """Where `bin/mpiexec` is. Installs the wheel if it is not there yet.

    Raises:
        UnavailableError: if pip cannot get it.
    """
    place = ROOT / "build" / "mpich"
    if not (place / "bin" / "mpicc").exists():
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place)
        pip = [sys.executable, "-m", "pip", "--python", str(place), "install", "--no-compile"]
        done = subprocess.run([*pip, "mpich"], capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            shutil.rmtree(place)
            raise UnavailableError(f"pip cannot install the package mpich:\n{done.stderr}")
    return place


@functools.cache
def package() -> Path:
    """A folder with the package `tf_adasum`, its core built for MPICH, without TensorFlow's ops."""
    mpicc = folder() / "bin" / "mpicc"
    # CMake does not take a tree whose sources were elsewhere.
    tree = ROOT / "build" / f"mpich-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
    settings = {
        "ADASUM_BUILD_TF": "OFF",
        "CMAKE_BUILD_TYPE": "None",  # it is built in a third of the time that a fast one takes
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "MPI_C_COMPILER": str(mpicc),
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    _call([_tool("cmake"), "-G", "Ninja", *defines, "-S", str(ROOT / "ops"), "-B", str(tree)])
    _call([_tool("cmake"), "--build", str(tree), "--target", "adasum_core"])

    place = tree / "package"
    shutil.rmtree(place, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "_lib")
    shutil.copytree(ROOT / "tf_adasum", place / "tf_adasum", ignore=ignored)
    libraries = place / "tf_adasum" / "_lib"
    libraries.mkdir()
    shutil.copy2(tree / "lib" / "libadasum_core.so", libraries)
    info = json.loads((tree / "build_info.json").read_text())
    info |= {"version": "0", "tensorflow": "none", "mpi": "MPICH", "mpi_version": "5"}
    (libraries / "build_info.json").write_text(json.dumps(info))
    return place


def _tool(name: str) -> str:
    # That of the environment first: PATH may have an old one.
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise UnavailableError(f"{name} was not found")
    return path


def _call(command: list[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
