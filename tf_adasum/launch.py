"""What launchers leave in the environment of a process, and the `mpirun` that fits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tf_adasum import native

# What each launcher tells a process about the number of processes. Slurm also sets SLURM_NTASKS,
# but that one is there in a batch script's own process too, which is rightly alone.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def launched_by(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """The launcher that started this process, or None, and the number of processes it started.

    Launchers start each other, so the one that started most counts.
    """
    numbers = [
        (int(environ[variable]), launcher)
        for variable, launcher in _LAUNCHERS.items()
        if environ.get(variable, "").isdigit()
    ]
    number, launcher = max(numbers, key=lambda found: found[0], default=(1, None))
    return launcher, number


def check_not_alone(mpi_size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError if a launcher started several processes of which MPI sees only this one.

    Training would otherwise go on as that many separate jobs, all of them rank 0.
    """
    launcher, started = launched_by(environ)
    if mpi_size > 1 or started <= 1:
        return
    cures = {
        "horovodrun": "start it with `horovodrun --mpi` or with mpirun (the Gloo controller starts "
        "processes that MPI does not know)",
        "srun": "start it with `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH)",
    }
    built_for = native.core_library().adasum_mpi_built_for().decode()
    cure = cures.get(
        launcher, f"start it with the mpirun of the {built_for} that tf_adasum was built for"
    )
    raise RuntimeError(
        f"{launcher} started {started} processes, but MPI ({built_for}) sees only this one, so "
        f"they would train apart from each other: {cure}."
    )


def _mpi_folders() -> list[Path]:
    """Where the running MPI's programs may be: beside the loaded library, then on PATH."""
    native.core_library()
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = (line.split(maxsplit=5)[-1] for line in maps if "/libmpi" in line)
    folders = [parent / "bin" for file in files for parent in list(Path(file).parents)[1:4]]
    return [*folders, *(Path(folder) for folder in os.get_exec_path())]


def mpirun_command(np: int) -> list[str]:
    """The start of a command line that runs a program as `np` ranks on this host.

    It belongs to the MPI that the core is linked to. More ranks than cores are allowed, and ranks
    are not bound to cores, since TensorFlow brings threads of its own.

    Raises:
        FileNotFoundError: if that MPI's launcher is not beside its library nor on PATH.
    """
    open_mpi = native.core_library().adasum_mpi_running().decode().startswith("Open MPI")
    names = ["mpirun.openmpi", "mpirun"] if open_mpi else ["mpiexec.mpich", "mpiexec"]
    flags = ["--oversubscribe", "--bind-to", "none"] if open_mpi else []
    for folder in _mpi_folders():
        for name in names:
            if found := shutil.which(name, path=str(folder)):
                return [found, *flags, "-np" if open_mpi else "-n", str(np)]
    raise FileNotFoundError(f"found neither {' nor '.join(names)} for the MPI in use")


def environment() -> dict[str, str]:
    """The environment for `mpirun_command`: this process's, without the marks of a launcher."""
    environ = dict(os.environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Open MPI refuses root unless told twice; in a container there is often no other user.
        environ["OMPI_ALLOW_RUN_AS_ROOT"] = environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    # Ranks find this package where this process found it, installed or not.
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in sys.path if p))
    return environ
