"""Ranks that run one test body after the other, since starting them takes longer than most bodies.

A pool is an MPI job whose ranks, `pooled_rank.py`, sleep until they are sent a body, each over a
socket of its own, and answer when it has ended. What they print goes to one file. One pool is alive
at a time. The first body that fails ends it, and so does the end of pytest, however that comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import processes
import pytest

from tf_adasum import launch

_SCRIPT = Path(__file__).with_name("pooled_rank.py")

_START_SECONDS = 60
_EXIT_SECONDS = 30
# How long the others may go on after the first rank has failed: most of them wait for that one.
_GRACE_SECONDS = 3


class _FailureError(Exception):
    pass


@dataclass
class _Rank:
    number: int
    pid: int
    connection: Connection
    failure: str | None = None


class Pool:
    """A job of so many ranks."""

    def __init__(self, size: int):
        self.size = size
        self._last = "their start"
        self._printed = 0
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "output"
        address = str(Path(self._folder.name) / "socket")
        script = [sys.executable, str(_SCRIPT), address, str(self._output)]
        self._ranks: list[_Rank] = []
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(size)
            door.settimeout(0.5)
            with self._output.open("ab") as output:
                self._job = processes.start([*launch.mpirun_command(size), *script], output)
            with self._ended_by_failures():
                self._let_in(door)

    def run(self, file: str, name: str, parameters: str, timeout: float) -> None:
        """Runs a body on all ranks. Where it fails on one of them, so does the test."""
        before, self._last = self._last, name
        self._printed = self._output.stat().st_size
        with self._ended_by_failures():
            for rank in self._ranks:
                try:
                    rank.connection.send((file, name, parameters, timeout))
                except ConnectionError:
                    rank.failure = f"exited after {before}"
            self._wait_for_answers(timeout)
            failures = [f"rank {r.number}: {r.failure}" for r in self._ranks if r.failure]
            if failures:
                raise _FailureError("\n".join(failures))

    def close(self) -> None:
        """Lets the ranks exit; fails if that is not as it should be."""
        with self._ended_by_failures():
            for rank in self._ranks:
                rank.connection.close()
            try:
                code = self._job.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"none within {_EXIT_SECONDS} s"
            if code != 0:
                raise _FailureError(f"exit code of the ranks after {self._last}: {code}")
        self._folder.cleanup()

    @property
    def ended(self) -> bool:
        return self._job.returncode is not None

    def _let_in(self, door: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self.size:
            if self._job.poll() is not None or time.monotonic() > deadline:
                raise _FailureError(f"{self.size} ranks did not start")
            with contextlib.suppress(TimeoutError, EOFError):
                connection = Connection(door.accept()[0].detach())
                self._ranks.append(_Rank(*connection.recv(), connection))
        self._ranks.sort(key=lambda rank: rank.number)

    def _wait_for_answers(self, timeout: float) -> None:
        late = f"did not end within {timeout} s"
        deadline = time.monotonic() + timeout
        running = {rank.connection: rank for rank in self._ranks}
        while running and (answers := wait(running, max(0, deadline - time.monotonic()))):
            for connection in answers:
                rank = running.pop(connection)
                try:
                    rank.failure = connection.recv()
                except (EOFError, ConnectionError):
                    rank.failure = rank.failure or "exited"
                if rank.failure and time.monotonic() + _GRACE_SECONDS < deadline:
                    late = f"had not ended {_GRACE_SECONDS} s after another rank's failure"
                    deadline = time.monotonic() + _GRACE_SECONDS
        for rank in running.values():
            rank.failure = late
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        if running:
            time.sleep(0.5)
        for rank in running.values():
            rank.failure += "\n" + Path(f"{self._output}.{rank.number}").read_text()

    @contextlib.contextmanager
    def _ended_by_failures(self) -> Iterator[None]:
        try:
            yield
            return
        except _FailureError as error:
            failure = str(error)
        except BaseException:
            self.end()
            raise
        printed = self.end()
        said = f"{failure}\nAll that the ranks printed:\n{printed}"
        raise pytest.fail.Exception(said, pytrace=False) from None

    def end(self) -> str:
        """Ends the ranks by force. Returns what they have printed since the last body began."""
        if not self.ended:
            processes.end(self._job)
        printed = self._output.read_bytes()[self._printed :].decode(errors="replace")
        self._folder.cleanup()
        return printed


_pool: Pool | None = None


def run(size: int, file: str, name: str, parameters: str, timeout: float) -> None:
    """Runs a body on the ranks that are there, or on new ones if those are not so many."""
    global _pool
    if _pool is not None and _pool.size != size:
        close()
    if _pool is None or _pool.ended:
        _pool = Pool(size)
    _pool.run(file, name, parameters, timeout)


def close() -> None:
    """Ends the ranks that are there; fails if they do not exit as they should."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None and not pool.ended:
        pool.close()


def end() -> None:
    """Ends the ranks that are there by force."""
    if _pool is not None and not _pool.ended:
        _pool.end()
