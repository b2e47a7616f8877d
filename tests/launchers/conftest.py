"""What is made once for many tests of launchers, and why those are skipped that cannot have it."""

from collections.abc import Iterator
from pathlib import Path

import mpich
import pytest
import slurm


@pytest.fixture(scope="session")
def mpich_package() -> Path:
    """A folder with the package, built for MPICH."""
    try:
        return mpich.package()
    except mpich.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_node() -> Iterator[slurm.Slurm]:
    """A Slurm that calls this machine by its name."""
    try:
        with slurm.cluster() as cluster:
            yield cluster
    except slurm.UnavailableError as error:
        pytest.skip(str(error))
