"""Processes that do not outlive their time: started in a session of their own, ended with all
that they started.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import IO

from tf_adasum import launch

_START = str(Path(__file__).with_name("start"))
# TensorFlow's notices would bury what a failed rank says.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def start(
    command: list[str], output: IO, cwd: Path | None = None, **environ: str
) -> subprocess.Popen:
    """Starts a command with `launch.environment()`; all that it prints goes to `output`."""
    environ = {**launch.environment(), **_QUIET, **environ}
    environ["PYTHONPATH"] = os.pathsep.join([_START, environ["PYTHONPATH"]])
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environ,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
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
