"""`python -m tf_adasum run` with the MPI of this environment, and its mpirun's own line."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run
from said import RANK, one_host, places

from tf_adasum import launch

RUN = [sys.executable, "-m", "tf_adasum", "run"]

only_open_mpi = pytest.mark.skipif(not launch.is_open_mpi(), reason="flags of Open MPI's mpirun")


def test_it_prints_the_line_and_runs_it():
    ended = run([*RUN, "-np", "3", *RANK[1:]], timeout=60)
    assert ended.code == 0, ended.output
    assert places(ended.output) == one_host(3)
    line, *rest = ended.output.splitlines()
    assert len(rest) == 3
    # In a shell it does the same.
    again = run(["sh", "-c", line], timeout=60)
    assert again.code == 0 and places(again.output) == one_host(3)


def test_a_module_and_hosts():
    folder = os.path.dirname(RANK[1])
    path = os.pathsep.join([folder, launch.environment()["PYTHONPATH"]])
    command = [*RUN, "-H", "localhost:2", "-m", "rank"]
    ended = run(command, timeout=60, PYTHONPATH=path)
    assert ended.code == 0 and places(ended.output) == one_host(2), ended.output


def test_the_exit_status_is_the_programs():
    assert run([*RUN, "-np", "2", *RANK[1:], "3"], timeout=60).code == 3


@only_open_mpi
def test_flags_get_to_mpirun():
    command = [*RUN, "-np", "2", "--mpi-args=--tag-output", *RANK[1:]]
    ended = run(command, timeout=60)
    assert ended.code == 0
    assert ended.output.count("<stdout>") == 2, ended.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks(tmp_path, number):
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from tf_adasum import core\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{core.rank()}}.pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [*RUN, "-np", "2", str(script)],
        env=launch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        files = [tmp_path / f"{rank}.pid" for rank in range(2)]
        limit = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0, errors
    assert "python" in shlex.split(errors.splitlines()[0])[-2]
    limit = time.monotonic() + 10
    while any(_runs(file.read_text()) for file in files):
        assert time.monotonic() < limit, "a rank goes on"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # what nobody has waited for has ended, too


@only_open_mpi
def test_elastic_lets_the_others_go_on(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal\n"
        "import numpy as np\n"
        "from tf_adasum import core\n"
        "core.go_on_without_the_dead()\n"
        "if core.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('goes on with', core.allreduce(np.ones(1), 'sum'))\n"
    )
    ended = run([*RUN, "-np", "3", "--elastic", str(script)], timeout=60)
    assert ended.output.count("goes on with [2.]") == 2, ended.output
    assert ended.code == 0
