"""The core's C++ under the compiler's sanitizers: ranks as threads, and its C API with any
arguments. The programs are in tests/core; each prints the seed that makes it do the same again."""

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from ranks import Ended, run

ROOT = Path(__file__).resolve().parents[2]
ADDRESS, THREAD = "address,undefined", "thread"
REPORTS = ("Sanitizer", "runtime error:")
# How long a program may take beyond what it is told to: one case, on a busy machine.
GRACE = 120


def _tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    assert path, f"{name} was not found"
    return path


@functools.cache
def _build(sanitizers: str) -> Path:
    """The folder of the programs, built anew where a source has changed."""
    compiler = os.environ.get("CXX", "c++")
    linked = subprocess.run(
        [*compiler.split(), f"-fsanitize={sanitizers}", "-x", "c++", "-", "-o", os.devnull],
        input="int main() {}",
        capture_output=True,
        text=True,
    )
    if linked.returncode != 0:
        pytest.skip(f"{compiler} has no -fsanitize={sanitizers}: {linked.stderr}")
    mpicc = _tool("mpicc")
    digest = hashlib.sha256(repr((ROOT, compiler, mpicc)).encode()).hexdigest()[:8]
    tree = ROOT / "build" / f"sanitize-{sanitizers.replace(',', '-')}-{digest}"
    if not (tree / "build.ninja").exists():
        settings = {
            "ADASUM_BUILD_TF": "OFF",
            "ADASUM_SANITIZE": sanitizers,
            "CMAKE_MAKE_PROGRAM": _tool("ninja"),
            "MPI_C_COMPILER": mpicc,
        }
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        _call([_tool("cmake"), "-G", "Ninja", *defines, "-S", str(ROOT / "ops"), "-B", str(tree)])
    # The thread sanitizer does not go together with MPI.
    programs = ["core_ranks", "core_fuzz"] if sanitizers == ADDRESS else ["core_ranks"]
    _call([_tool("cmake"), "--build", str(tree), "--target", *programs])
    return tree


def _call(command: list[str]) -> None:
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout


def _run(command: list[str], seconds: float, leaks: bool = True, **environ: str) -> None:
    def attempt(*before: str, leaks: bool = leaks) -> Ended:
        options = {
            "ASAN_OPTIONS": f"detect_stack_use_after_return=1:detect_leaks={int(leaks)}",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        return run([*before, *command], seconds + GRACE, **options, **environ)

    ended = attempt()
    if "memory mapping" in ended.output:
        # The kernel has put something where the sanitizer keeps its own.
        ended = attempt("setarch", "-R")
    if "LeakSanitizer has encountered a fatal error" in ended.output:
        # It looks at the program as a debugger does, which is not allowed everywhere.
        ended = attempt(leaks=False)
    reports = [report for report in REPORTS if report in ended.output]
    assert ended.code == 0 and not reports, f"exit code {ended.code}\n{ended.output}"


@pytest.mark.parametrize("simd", ["plain", "avx2", ""])
def test_ranks_touch_only_their_memory(simd):
    seconds = 4
    program = _build(ADDRESS) / "core_ranks"
    _run([str(program), str(seconds), "1"], seconds, TF_ADASUM_SIMD=simd)


def test_ranks_do_not_race():
    seconds = 8
    program = _build(THREAD) / "core_ranks"
    _run([str(program), str(seconds), "1"], seconds)


def test_c_api_takes_any_arguments():
    seconds = 60
    program = _build(ADDRESS) / "core_fuzz"
    # MPI leaves some of its memory to the end of the process.
    _run([str(program), str(seconds), "1"], seconds, leaks=False)
