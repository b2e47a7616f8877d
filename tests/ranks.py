"""Running test bodies on several MPI ranks: under a time limit, with nothing left behind.

    @on_ranks(3)
    def test_something():
        assert core.size() == 3      # this body runs on each of 3 ranks

An assertion that fails on any rank fails the test, with that rank's traceback.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pool
import processes
import pytest

from tf_adasum import launch


@dataclass
class Ended:
    """A job that came to its end: exit code, all that its ranks printed, and how long it took."""

    code: int
    output: str
    seconds: float


def run(command: list[str], timeout: float, cwd: Path | None = None, **environ: str) -> Ended:
    """Runs a command with `launch.environment()` and ends all of its processes after `timeout` s.

    Raises:
        TimeoutError: with what was printed until then.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = processes.start(command, output, cwd, **environ)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            processes.end(process)
            output.seek(0)
            raise TimeoutError(
                f"{command} did not end within {timeout} s:\n{output.read()}"
            ) from None
        except BaseException:
            processes.end(process)
            raise
        output.seek(0)
        return Ended(process.returncode, output.read(), time.monotonic() - started)


def run_ranks(number: int, source: str, timeout: float = 60, **environ: str) -> Ended:
    """Runs Python source on `number` ranks."""
    command = [*launch.mpirun_command(number), sys.executable, "-c", source]
    return run(command, timeout, **environ)


def on_ranks(
    *numbers: int, timeout: float = 120, fresh: bool = False
) -> Callable[[Callable], Callable]:
    """Makes a test of a body that runs on each of these numbers of ranks.

    The ranks have run other bodies before: `pooled_rank.py` says what it resets after each of them.
    `fresh` ones have not, and exit after the body, for what happens once in a process, or for all
    of its time. Other parameters of the test have to be JSON values.
    """

    def decorate(body: Callable) -> Callable:
        def test(ranks: int, **parameters: Any) -> None:
            target = [body.__code__.co_filename, body.__name__, json.dumps(parameters)]
            if not fresh:
                pool.run(ranks, *target, timeout)
                return
            source = "import sys, pooled_rank; pooled_rank.run(*sys.argv[1:])"
            command = [*launch.mpirun_command(ranks), sys.executable, "-c", source]
            ended = run([*command, *target], timeout)
            assert ended.code == 0, f"exit code {ended.code}\n{ended.output}"

        own = inspect.signature(body).parameters.values()
        ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *own])
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        test.shares_ranks = not fresh
        test.pytestmark = list(getattr(body, "pytestmark", []))
        return pytest.mark.parametrize("ranks", numbers)(test)

    return decorate
