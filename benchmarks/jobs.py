"""Running programs as MPI jobs that end in time, and building those that are compiled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import report

from tf_adasum import launch

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


class JobError(RuntimeError):
    """A job failed or did not end in time; the text holds what it printed last."""


def build(target: str) -> Path:
    """Compiles a target of ops/CMakeLists.txt, in the folder that the last build left.

    Raises:
        FileNotFoundError: if there is no such folder, or no CMake.
        JobError: if it does not compile.
    """
    caches = (report.ROOT / "build").glob("cmake-*/CMakeCache.txt")
    tree = max((cache.parent for cache in caches), key=lambda t: t.stat().st_mtime, default=None)
    if tree is None:
        raise FileNotFoundError("nothing is built in this checkout yet: run `make build` first")
    cmake = shutil.which("cmake", path=sysconfig.get_path("scripts")) or shutil.which("cmake")
    if cmake is None:
        raise FileNotFoundError("CMake was not found: pip install cmake")
    made = subprocess.run(
        [cmake, "--build", str(tree), "--target", target], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise JobError(f"{target} does not compile:\n{made.stdout[-2000:]}{made.stderr[-2000:]}")
    return tree / target


def run(
    command: Sequence[str],
    seconds: float,
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
    environ: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs a command that prints a JSON object on a line for each of its results.

    Args:
        command: such as `launch.mpirun_command(2)` and a program.
        seconds: after these it is ended.
        on_result: called with each result as it comes.
        environ: added to `launch.environment()`.

    Raises:
        JobError: if it does not end in time, or with another exit code than 0.
    """
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**launch.environment(), **_QUIET, **(environ or {})},
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), _end(process)))
        timer.start()
        rest: list[str] = []
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    results.append(json.loads(line))
                    on_result(results[-1])
                else:
                    rest.append(line)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
        if late.is_set() or code != 0:
            errors.seek(0)
            said = "".join([*rest, errors.read()])[-3000:]
            why = f"did not end within {seconds} s" if late.is_set() else f"exit code {code}"
            raise JobError(f"{why}: {' '.join(map(str, command))}\n{said}")
    return results


def _end(process: subprocess.Popen) -> None:
    """Asks a launcher to end its ranks, and ends it if it does not."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
