"""Running test bodies on several MPI ranks: under a time limit, with nothing left behind.

    @on_ranks(3)
    def test_something():
        assert core.size() == 3      # this body runs on each of 3 ranks

An assertion that fails on any rank fails the test, with that rank's traceback.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tf_adasum import launch

# TensorFlow's notices would bury what a failed rank says.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


@dataclass
class Ended:
    """A job that came to its end: exit code, all that its ranks printed, and how long it took."""

    code: int
    output: str
    seconds: float


def run(command: list[str], timeout: float, **environ: str) -> Ended:
    """Runs a command with `launch.environment()` and ends all of its processes after `timeout` s.

    Raises:
        TimeoutError: with what was printed until then.
    """
    started = time.monotonic()
    environment = {**launch.environment(), **_QUIET, **environ}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            output.seek(0)
            raise TimeoutError(
                f"{command} did not end within {timeout} s:\n{output.read()}"
            ) from None
        output.seek(0)
        return Ended(process.returncode, output.read(), time.monotonic() - started)


def run_ranks(number: int, source: str, timeout: float = 60, **environ: str) -> Ended:
    """Runs Python source on `number` ranks."""
    command = [*launch.mpirun_command(number), sys.executable, "-c", source]
    return run(command, timeout, **environ)


def on_ranks(*numbers: int, timeout: float = 60) -> Callable[[Callable], Callable]:
    """Makes a test of a body that runs on each of these numbers of ranks.

    Other parameters of the test have to be JSON values.
    """

    def decorate(body: Callable) -> Callable:
        def test(ranks: int, **parameters: Any) -> None:
            command = [*launch.mpirun_command(ranks), sys.executable, __file__]
            target = [body.__code__.co_filename, body.__name__, json.dumps(parameters)]
            ended = run([*command, *target], timeout)
            assert ended.code == 0, f"exit code {ended.code}\n{ended.output}"

        own = inspect.signature(body).parameters.values()
        ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *own])
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        test.pytestmark = list(getattr(body, "pytestmark", []))
        return pytest.mark.parametrize("ranks", numbers)(test)

    return decorate


def _end(process: subprocess.Popen) -> None:
    """Ends a launcher and all below it: politely, so that it ends its ranks, then by force."""
    below = _descendants(process.pid)
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    found = [int(child) for child in children]
    return found + [below for child in found for below in _descendants(child)]


def _main(file: str, name: str, parameters: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    getattr(module, name).body(**json.loads(parameters))


if __name__ == "__main__":
    _main(*sys.argv[1:])
