"""Horovod's launcher, and Horovod in the same process. `make horovod` builds it beside us."""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from ranks import run
from said import RANK

from tf_adasum import launch

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="no Horovod here: make horovod"
    ),
    pytest.mark.skipif(not launch.is_open_mpi(), reason="the flags are for Open MPI's mpirun"),
]

BESIDE = [sys.executable, str(Path(__file__).with_name("beside_horovod.py"))]
# horovodrun's own have one dash, which Open MPI 5 takes for the program to run.
BINDING = "--bind-to none --map-by slot"


def horovodrun(*options: str, ranks: int = 2) -> list[str]:
    found = shutil.which("horovodrun", path=sysconfig.get_path("scripts"))
    assert found, "Horovod is installed without its launcher"
    return [found, *options, "-np", str(ranks)]


def printed(output: str) -> list[str]:
    """The lines in order, without what horovodrun puts before them."""
    return sorted(line.rpartition("<stdout>:")[2].strip() for line in output.splitlines())


def test_horovodrun_with_mpi_and_horovod_first():
    command = [*horovodrun("--mpi", f"--binding-args={BINDING}"), *BESIDE, "horovod", "nobody"]
    ended = run(command, timeout=240)
    assert ended.code == 0, ended.output
    assert printed(ended.output) == ["rank 0 is equal", "rank 1 is equal"]


@pytest.mark.parametrize("first, shut_down", [("tf_adasum", "nobody"), ("horovod", "horovod")])
def test_in_one_process(first, shut_down):
    # Who has initialised MPI finalizes it, at the exit or when the program says so.
    ended = run([*launch.mpirun_command(2), *BESIDE, first, shut_down], timeout=240)
    assert ended.code == 0, ended.output
    assert printed(ended.output) == ["rank 0 is equal", "rank 1 is equal"]


def test_horovodrun_with_gloo_is_told():
    # Horovod is built without Gloo here, which its launcher does not need to start processes.
    program = (
        "import sys; from horovod.runner import launch\n"
        "launch.gloo_built = lambda verbose=False: True\n"
        "sys.exit(launch.run_commandline())"
    )
    command = [sys.executable, "-c", program, *horovodrun("--gloo")[1:], *RANK]
    ended = run(command, timeout=120)
    assert ended.code != 0
    said = "RuntimeError: horovodrun started 2 processes, but MPI (Open MPI) sees only this one"
    assert said in ended.output and "`horovodrun --mpi`" in ended.output, ended.output
