"""The core on MPICH, started by its mpiexec; and by another MPI's launcher."""

import sys

import pytest
from mpich import folder, run_with
from said import RANK, one_host, places

from tf_adasum import launch

RUN = [sys.executable, "-m", "tf_adasum", "run"]


def test_run_finds_mpiexec(mpich_package):
    ended = run_with(mpich_package, [*RUN, "-np", "3", *RANK[1:]])
    assert ended.code == 0, ended.output
    assert places(ended.output) == one_host(3)
    line, *rest = ended.output.splitlines()
    assert line.split()[:3] == [str(folder() / "bin" / "mpiexec"), "-n", "3"]
    assert len(rest) == 3  # and MPI says nothing


def test_hosts(mpich_package):
    ended = run_with(mpich_package, [*RUN, "-H", "localhost:2", *RANK[1:]])
    assert ended.code == 0 and places(ended.output) == one_host(2), ended.output


def test_the_exit_status_is_the_programs(mpich_package):
    ended = run_with(mpich_package, [*RUN, "-np", "2", *RANK[1:], "3"])
    assert ended.code == 3


@pytest.mark.parametrize(
    "death, said",
    [
        ("raise LookupError('the disk is gone')", "Its error, shown above: LookupError: the disk"),
        ("os.kill(os.getpid(), 9)", "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),
    ],
    ids=["exception", "SIGKILL"],
)
def test_a_rank_that_dies_ends_the_job(mpich_package, death, said):
    source = (
        "import os; import numpy as np; from tf_adasum import core\n"
        f"if core.rank() == 1: {death}\n"
        "core.allreduce(np.ones(3))"
    )
    mpiexec = str(folder() / "bin" / "mpiexec")
    ended = run_with(mpich_package, [mpiexec, "-n", "3", sys.executable, "-c", source])
    assert ended.code != 0 and said in ended.output, ended.output


def test_it_is_not_elastic(mpich_package):
    ended = run_with(mpich_package, [*RUN, "-np", "2", "--elastic", *RANK[1:]])
    assert ended.code == 2
    assert "only Open MPI 5 and later" in ended.output and "This is MPICH" in ended.output


def test_doctor_names_the_mpi(mpich_package):
    ended = run_with(mpich_package, [sys.executable, "-m", "tf_adasum", "doctor"])
    # The ops are not part of this build, which is all that is wrong.
    assert ended.code == 1 and "MPICH Version" in ended.output, ended.output
    assert ended.output.count("\n- ") == 1 and "ops were built for" in ended.output


other_mpi = pytest.mark.skipif(
    not launch.is_open_mpi(), reason="there is no other MPI than MPICH here"
)


@other_mpi
def test_mpiexec_starts_another_mpis_ranks(mpich_package):
    mpiexec = [str(folder() / "bin" / "mpiexec"), "-n", "2"]
    # Where the other package is not, so that the one of all other tests is found.
    ended = run_with(mpich_package.parent, [*mpiexec, *RANK])
    assert ended.code != 0
    assert "MPICH's mpiexec started 2 processes, but MPI (Open MPI) sees only" in ended.output
    assert "start it with the mpirun of the Open MPI that tf_adasum was built for" in ended.output


@other_mpi
def test_open_mpis_mpirun_starts_its_ranks(mpich_package):
    ended = run_with(mpich_package, [*launch.mpirun_command(2), *RANK])
    # It is MPICH that ends them, before anybody else can say a word.
    assert ended.code != 0
    assert "unsupported PMI version PMIx" in ended.output and "rank 0" not in ended.output
