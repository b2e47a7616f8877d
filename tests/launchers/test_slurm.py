"""`srun`, and mpirun within an allocation, on a Slurm of one node that the test starts."""

import sys

import pytest
import slurm
from mpich import run_with
from ranks import run
from said import RANK, one_host, places

from tf_adasum import launch

open_mpi = pytest.mark.skipif(not launch.is_open_mpi(), reason="--mpi=pmix is for Open MPI")


@open_mpi
def test_open_mpi_over_pmix(one_node):
    ended = run(["srun", "--mpi=pmix", "-n", "3", *RANK], timeout=60, **one_node.environ)
    assert (ended.code, places(ended.output)) == (0, one_host(3)), ended.output
    assert len(ended.output.splitlines()) == 3  # and nobody says anything else


def test_mpich_over_pmi2(one_node, mpich_package):
    srun = ["srun", "--mpi=pmi2", "-n", "3", *RANK]
    ended = run_with(mpich_package, srun, **one_node.environ)
    assert (ended.code, places(ended.output)) == (0, one_host(3)), ended.output


@open_mpi
def test_without_pmix_every_process_is_told(one_node):
    ended = run(["srun", "--mpi=none", "-n", "2", *RANK], timeout=60, **one_node.environ)
    assert ended.code == 1
    said = "RuntimeError: srun started 2 processes, but MPI (Open MPI) sees only this one"
    assert ended.output.count(said) == 2, ended.output
    assert "srun --mpi=pmix" in ended.output
    ended = run(["srun", "--mpi=pmi2", "-n", "2", *RANK], timeout=60, **one_node.environ)
    assert ended.code == 1 and said in ended.output, ended.output


@open_mpi
def test_an_exception_on_one_rank_ends_the_step(one_node):
    source = (
        "import time; from tf_adasum import core\n"
        "if core.rank() == 1: raise LookupError('the disk is gone')\n"
        "time.sleep(600)"
    )
    command = ["srun", "--mpi=pmix", "-n", "2", sys.executable, "-c", source]
    ended = run(command, timeout=60, **one_node.environ)
    assert ended.code != 0
    assert "rank 1 ends the job. Its error, shown above: LookupError: the disk" in ended.output


@open_mpi
def test_mpirun_in_an_allocation_takes_its_slots(one_node):
    command = [sys.executable, "-m", "tf_adasum", "run", "-np", "2", *RANK[1:]]
    ended = run(["salloc", "-n", "2", *command], timeout=60, **one_node.environ)
    assert (ended.code, places(ended.output)) == (0, one_host(2)), ended.output
    # More than the job was given is refused, as Slurm's administrator wants it.
    ended = run(["salloc", "-n", "1", *command], timeout=60, **one_node.environ)
    assert ended.code != 0 and "not enough slots" in ended.output, ended.output


@open_mpi
def test_a_node_with_another_name_than_the_hosts():
    # Then Open MPI takes each rank for one on a host of its own.
    try:
        with slurm.cluster("node17") as cluster:
            ended = run(["srun", "--mpi=pmix", "-n", "2", *RANK], timeout=60, **cluster.environ)
    except slurm.UnavailableError as error:
        pytest.skip(str(error))
    assert (ended.code, places(ended.output)) == (0, one_host(2)), ended.output


def test_nothing_is_left_of_it():
    try:
        with slurm.cluster() as cluster:
            started = cluster.processes()
            raise ZeroDivisionError
    except slurm.UnavailableError as error:
        pytest.skip(str(error))
    except ZeroDivisionError:
        assert len(started) >= 3
        assert cluster.processes() == [] and not cluster.folder.exists()
