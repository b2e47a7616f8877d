"""What launchers leave in the environment of a process, and the `mpirun` that fits."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_adasum import native

# What each launcher tells a process about the number of processes. Slurm also sets SLURM_NTASKS,
# but that one is there in a batch script's own process too, which is rightly alone; and PMI_SIZE
# where it starts processes as mpiexec would.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PMI_SIZE": "MPICH's mpiexec",
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


def _running() -> str:
    return native.core_library().adasum_mpi_running().decode()


def is_open_mpi() -> bool:
    """Whether the MPI in use is Open MPI."""
    return _running().startswith("Open MPI")


def mpirun_command(
    np: int,
    *,
    hosts: Sequence[tuple[str, int]] = (),
    elastic: bool = False,
    oversubscribe: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """The start of a command line that runs a program as `np` ranks.

    It belongs to the MPI that the core is linked to. Ranks are not bound to cores, since TensorFlow
    brings threads of its own.

    Args:
        np: the number of ranks.
        hosts: names, each with the number of ranks that it has room for; by default this host, or
            those of the batch job.
        elastic: the others are to go on when a process dies.
        oversubscribe: more ranks than cores are allowed. MPICH and Intel MPI always allow them.
        environ: what it will be started with, and what matters of that goes to other hosts.

    Raises:
        FileNotFoundError: if that MPI's launcher is not beside its library nor on PATH.
        ValueError: if that MPI does not have what is asked for.
    """
    flags = _flags(_running(), np, hosts, elastic, oversubscribe, environ)
    names = ["mpirun.openmpi", "mpirun"] if is_open_mpi() else ["mpiexec.mpich", "mpiexec"]
    for folder in _mpi_folders():
        for name in names:
            if found := shutil.which(name, path=str(folder)):
                return [found, *flags]
    raise FileNotFoundError(f"found neither {' nor '.join(names)} for the MPI in use")


def _flags(
    running: str,
    np: int,
    hosts: Sequence[tuple[str, int]],
    elastic: bool,
    oversubscribe: bool,
    environ: Mapping[str, str],
) -> list[str]:
    """`mpirun_command`'s, for an MPI that says of itself what `running` is."""
    open_mpi = re.match(r"Open MPI v(\d+)", running)
    if elastic and (open_mpi is None or int(open_mpi[1]) < 5):
        raise ValueError(
            "only Open MPI 5 and later (`mpirun --with-ft ulfm`) let the others go on when a "
            f"process dies. This is {running.split(',')[0]}"
        )
    if open_mpi:
        return [
            *(["--with-ft", "ulfm"] if elastic else []),
            *(["--oversubscribe"] if oversubscribe else []),
            *("--bind-to", "none"),
            *(["--host", _with_slots(hosts), *_exports(environ)] if hosts else []),
            *("-np", str(np)),
        ]
    if running.startswith("Intel"):
        # Unlike MPICH it binds each rank to cores.
        flags = ["-genv", "I_MPI_PIN", "0"]
        if hosts:
            slots = {number for _, number in hosts}
            if len(slots) > 1:
                raise ValueError(
                    "Intel MPI's -hosts and -ppn want the same number of ranks on every host; name "
                    f"a file of lines `host:number` by -machinefile. Received: {_with_slots(hosts)}"
                )
            flags += ["-hosts", ",".join(name for name, _ in hosts), "-ppn", str(slots.pop())]
        return [*flags, "-n", str(np)]
    return [*(["-hosts", _with_slots(hosts)] if hosts else []), "-n", str(np)]


def _with_slots(hosts: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{number}" for name, number in hosts)


# What of this process's environment ranks on other hosts want: Open MPI hands on to these only what
# it is told to, MPICH and Intel MPI everything.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_FAMILIES = ("TF_", "KERAS_", "HOROVOD_", "XLA_", "CUDA_", "NCCL_", "OMP_", "UCX_", "FI_")


def _exports(environ: Mapping[str, str]) -> list[str]:
    names = sorted(n for n in environ if n in _EXPORTED or n.startswith(_FAMILIES))
    return [word for name in names for word in ("-x", name)]


def allow_root() -> dict[str, str]:
    """What root's environment needs in addition.

    Open MPI refuses root unless told twice; in a container there is often no other user.
    """
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return dict.fromkeys(names, "1") if os.geteuid() == 0 else {}


def environment() -> dict[str, str]:
    """The environment for `mpirun_command`: this process's, without the marks of a launcher."""
    environ = {**os.environ, **allow_root()}
    # Ranks find this package where this process found it, installed or not.
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in sys.path if p))
    return environ
