"""`python -m tf_adasum doctor`: what was built, what is here, and whether training can work.

Every rank finds out its own facts, as plain values. They are brought together where MPI can, and
rank 0 judges them: what is a row of the table, and what is a problem, stands in `findings` alone.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_adasum import core, launch, native

_SEGMENT = 16 << 20
"""Bytes of /dev/shm that Open MPI sets aside for each rank's messages on its host."""

# Before MPI is initialized: which of the processes that a launcher has started this one is.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")

# What must be the same on all ranks.
_SAME = ("tf_adasum", "MPI here", "TensorFlow here")


@dataclasses.dataclass
class Facts:
    """What one process has found out. Of what could not be had, the reason is in an `_error`."""

    host: str = ""
    python: str = ""
    build: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The build's own notes: `native.build_info()`."""
    core_error: str = ""
    mpi: str = ""
    """The first line of MPI_Get_library_version."""
    cpu_kernels: str = ""
    tensorflow: str = ""
    tensorflow_error: str = ""
    keras: str = ""
    visible_gpus: int = 0
    """GPUs that TensorFlow would put variables on."""
    ops_error: str = ""
    has_cuda: bool = False
    cuda_devices: int = 0
    mpi_knows_cuda: bool = False
    """Whether this MPI has the function that tells if it is CUDA-aware."""
    mpi_reads_cuda: bool = False
    nccl_problem: str = ""
    launcher: str = ""
    launcher_says: str = ""
    """What the launcher answers to --version."""
    launcher_error: str = ""
    mpirun_on_path: str = ""
    started_by: str | None = None
    started: int = 1
    shared_memory_bytes: int | None = None
    """Free in /dev/shm; None where there is none."""
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    # What is known only once MPI is initialized.
    job_error: str = ""
    size: int = 1
    local_size: int = 1
    thread_level: str = ""
    shares_memory: bool = False
    allreduce_error: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A row of the table, and where training would not work, why and what to do, in a sentence."""

    name: str
    value: str
    problem: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum doctor",
        description="Says what tf_adasum was built with and what is here, and tries an allreduce. "
        "Ends with 1 where training would not work. Under mpirun it looks at all ranks.",
    )
    parser.parse_args(argv)
    facts = find_out()
    everyone = gather(facts)
    problems = [found for each in everyone for found in findings(each) if found.problem]
    differing = differences(everyone)
    if _shows(facts):
        print(report(everyone), flush=True)
    return 1 if problems or differing else 0


def find_out(environ: Mapping[str, str] = os.environ) -> Facts:
    """This process's facts, after it has joined the others and summed a number with them."""
    facts = Facts(host=platform.node(), python=platform.python_version())
    # A copy: loading the core names a library there.
    facts.environ = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("TF_ADASUM_")
        or name in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_HIERARCHICAL_ALLREDUCE")
    }
    facts.started_by, facts.started = launch.launched_by(environ)
    try:
        shared = os.statvfs("/dev/shm")
        facts.shared_memory_bytes = shared.f_bavail * shared.f_frsize
    except OSError:
        facts.shared_memory_bytes = None
    try:
        facts.build = native.build_info()
        library = native.core_library()
    except ImportError as error:
        facts.core_error = str(error)
        _look_at_tensorflow(facts)
        return facts
    facts.mpi = library.adasum_mpi_running().decode()
    facts.cpu_kernels = library.adasum_simd().decode()
    facts.has_cuda = native.has_cuda()
    # The name is looked for in what the core is linked to as well.
    facts.mpi_knows_cuda = hasattr(ctypes.CDLL(str(native.CORE)), "MPIX_Query_cuda_support")
    facts.mpi_reads_cuda = bool(library.adasum_mpi_reads_cuda())
    if facts.has_cuda:
        facts.cuda_devices = max(0, library.adasum_cuda_devices())
        facts.nccl_problem = library.adasum_nccl_problem().decode()
    _look_for_launcher(facts, environ)
    _look_at_tensorflow(facts)
    _join(facts, library)
    return facts


def _look_for_launcher(facts: Facts, environ: Mapping[str, str]) -> None:
    facts.mpirun_on_path = shutil.which("mpirun", path=environ.get("PATH")) or ""
    try:
        facts.launcher = launch.mpirun_command(1)[0]
    except FileNotFoundError as error:
        facts.launcher_error = str(error)
        return
    try:
        said = subprocess.run(
            [facts.launcher, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
        facts.launcher_says = said.stdout or said.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        facts.launcher_error = f"{facts.launcher} --version: {error}"


def _look_at_tensorflow(facts: Facts) -> None:
    try:
        tensorflow = importlib.import_module("tensorflow")
        facts.tensorflow = tensorflow.__version__
        facts.visible_gpus = len(tensorflow.config.list_physical_devices("GPU"))
        facts.keras = importlib.import_module("keras").__version__
    except Exception as error:  # whatever a broken installation raises
        facts.tensorflow_error = f"{type(error).__name__}: {error}"


def _join(facts: Facts, library: ctypes.CDLL) -> None:
    """What takes MPI: the ranks, the ops that call it, and a first allreduce."""
    try:
        core.init()
    except RuntimeError as error:
        facts.job_error = str(error)
        return
    facts.size, facts.local_size = core.size(), core.local_size()
    facts.thread_level = library.adasum_mpi_thread_level().decode()
    facts.shares_memory = bool(library.adasum_shares_memory())
    if facts.tensorflow == facts.build["tensorflow"] and not facts.tensorflow_error:
        try:
            importlib.import_module("tf_adasum.collectives").ops()
        except Exception as error:  # tf.errors.NotFoundError, or what Keras raises
            facts.ops_error = f"{type(error).__name__}: {error}"
    try:
        summed = core.allreduce(np.float32([core.rank() + 1]), op="sum", name="doctor")[0]
        expected = facts.size * (facts.size + 1) // 2
        if summed != expected:
            facts.allreduce_error = f"the sum of 1 to {facts.size} came out as {summed}"
    except (RuntimeError, ValueError) as error:
        facts.allreduce_error = str(error)


def gather(facts: Facts) -> list[Facts]:
    """The facts of all ranks, in their order; this one's alone where there is no job."""
    if facts.core_error or facts.job_error or facts.allreduce_error or facts.size == 1:
        return [facts]
    text = np.frombuffer(json.dumps(dataclasses.asdict(facts)).encode(), np.uint8)
    lengths = core.allgather(np.array([len(text)]), name="doctor")
    texts = np.split(core.allgather(text, name="doctor"), np.cumsum(lengths)[:-1])
    return [Facts(**json.loads(each.tobytes())) for each in texts]


def _shows(facts: Facts) -> bool:
    """Whether this process prints: rank 0, or the first one that a launcher has started."""
    if facts.size > 1:
        return core.rank() == 0
    # Processes of their own, which would all print the same. On what only this one lacks it speaks.
    started = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()]
    return facts.started == 1 or bool(facts.core_error) or not started or "0" in started


def findings(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order of the table."""
    rows = [_tf_adasum(facts), Finding("host", f"{facts.host}, Python {facts.python}")]
    if facts.build:
        rows.append(Finding("compiler", facts.build["compiler"]))
        rows.append(Finding("built for TensorFlow", facts.build["tensorflow"]))
    rows.append(_tensorflow(facts))
    if not facts.core_error:
        rows.append(Finding("MPI built for", f"{facts.build['mpi']} {facts.build['mpi_version']}"))
        rows += [Finding("MPI here", facts.mpi), _launcher(facts), _job(facts)]
        if not facts.job_error:
            rows += [_thread_level(facts), _ranks_of_a_host(facts), _allreduce(facts)]
        rows += [_shared_memory(facts), Finding("CPU kernels", facts.cpu_kernels)]
        rows += [_xla(facts), _cuda(facts), *_between_gpus(facts)]
    if facts.environ:
        shown = " ".join(f"{name}={value}" for name, value in facts.environ.items())
        rows.append(Finding("environment", shown))
    return rows


def _tf_adasum(facts: Facts) -> Finding:
    version = facts.build.get("version", "not built")
    problem = f"tf_adasum cannot be used: {facts.core_error}" if facts.core_error else ""
    return Finding("tf_adasum", version, problem)


def _tensorflow(facts: Facts) -> Finding:
    name, built_for = "TensorFlow here", facts.build.get("tensorflow")
    if facts.tensorflow_error:
        wanted = f"tensorflow=={built_for}, or another and" if built_for else "tensorflow,"
        return Finding(
            name,
            "cannot be imported",
            f"TensorFlow cannot be imported ({facts.tensorflow_error}): pip install {wanted} "
            f"then {native.REBUILD}.",
        )
    value = f"{facts.tensorflow}, Keras {facts.keras}"
    if built_for and facts.tensorflow != built_for:
        return Finding(
            name,
            value,
            f"tf_adasum's ops were built for TensorFlow {built_for}, but this is TensorFlow "
            f"{facts.tensorflow}: install tensorflow=={built_for}, or {native.REBUILD}.",
        )
    try:
        native.check_keras(facts.keras)
    except ImportError as error:
        return Finding(name, value, str(error))
    if facts.ops_error:
        return Finding(
            name,
            value,
            f"TensorFlow cannot load tf_adasum's ops ({facts.ops_error}): {native.REBUILD}.",
        )
    return Finding(name, value)


def _launcher(facts: Facts) -> Finding:
    if facts.launcher_error:
        # A process that was started as one of several has no use for another launcher.
        if facts.size > 1:
            return Finding("launcher", f"started by {facts.started_by or 'another'}")
        return Finding(
            "launcher",
            "none",
            f"No launcher for {facts.mpi} was found ({facts.launcher_error}): put the bin folder "
            "of that MPI on PATH, for the PyPI wheel that of this Python environment.",
        )
    theirs = re.search(r"\d+(\.\d+)+", facts.launcher_says)
    version = theirs.group() if theirs else "of unknown version"
    value = f"{facts.launcher} ({version})"
    is_open_mpi = re.search(r"Open.?MPI|OpenRTE|PRRTE", facts.launcher_says, re.I) is not None
    if is_open_mpi != facts.mpi.startswith("Open MPI") and facts.size == 1:
        return Finding(
            "launcher",
            value,
            f"{facts.launcher} is of another MPI than {facts.mpi}, and would start processes that "
            "do not see each other: put the bin folder of the right MPI first on PATH.",
        )
    if facts.mpirun_on_path and not _same_folder(facts.mpirun_on_path, facts.launcher):
        value += f"; `mpirun` on PATH is another one, {facts.mpirun_on_path}"
    return Finding("launcher", value)


def _same_folder(one: str, other: str) -> bool:
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))


def _job(facts: Facts) -> Finding:
    if facts.job_error:
        value = f"{facts.started} processes by {facts.started_by}" if facts.started_by else "none"
        return Finding("job", value, facts.job_error)
    if facts.size == 1 and facts.started == 1:
        return Finding("job", "one process")
    return Finding("job", f"{facts.size} ranks, {facts.local_size} on this host")


def _thread_level(facts: Facts) -> Finding:
    value = f"MPI_THREAD_{facts.thread_level}"
    if facts.thread_level != "MULTIPLE":
        value += ": overlap=True is refused, and a rank that is late is not told from one stopped"
    return Finding("thread level", value)


def _ranks_of_a_host(facts: Facts) -> Finding:
    if facts.local_size == 1:
        value = "one, so there is nothing to share"
    elif facts.shares_memory:
        value = "read each other's memory"
    elif facts.environ.get("TF_ADASUM_SHARED_MEMORY") == "0":
        value = "send messages: TF_ADASUM_SHARED_MEMORY=0"
    else:
        value = "send messages: they cannot open each other's memory (containers of their own?)"
    return Finding("ranks of a host", value)


def _allreduce(facts: Facts) -> Finding:
    if not facts.allreduce_error:
        return Finding("allreduce", f"of {facts.size} numbers: right")
    return Finding(
        "allreduce",
        "failed",
        f"A first allreduce failed ({facts.allreduce_error}): look at the environment above, and "
        "at whether the hosts reach each other.",
    )


def _shared_memory(facts: Facts) -> Finding:
    free = facts.shared_memory_bytes
    if free is None:
        return Finding("/dev/shm", "none")
    value = f"{free / 2**30:.0f} GiB free" if free >= 2**30 else f"{free >> 20} MiB free"
    needed = facts.local_size * _SEGMENT
    if free >= needed or not facts.mpi.startswith("Open MPI"):
        return Finding("/dev/shm", value)
    return Finding(
        "/dev/shm",
        value,
        f"{facts.local_size} ranks of Open MPI on a host take up to {needed >> 20} MiB of "
        f"/dev/shm, of which {free >> 20} MiB are free, and are slow or crash without: start the "
        "container with more (docker run --shm-size=1g; in Kubernetes an emptyDir of medium "
        "Memory), or remove what fills it.",
    )


def _xla(facts: Facts) -> Finding:
    if facts.build.get("xla"):
        return Finding("XLA", "yes")
    return Finding("XLA", "no: jit_compile=True is an error")


def _cuda(facts: Facts) -> Finding:
    if facts.has_cuda:
        here = facts.cuda_devices or "none"
        return Finding("CUDA", f"built with {facts.build['cuda']}; GPUs here: {here}")
    value = "no: built without nvcc, so tensors on GPUs are refused"
    if not facts.visible_gpus:
        return Finding("CUDA", value)
    return Finding(
        "CUDA",
        value,
        f"TensorFlow puts variables on a GPU ({facts.visible_gpus} here), but tf_adasum was built "
        f"without CUDA: {native.REBUILD} where nvcc is found (CUDA_HOME), or hide the GPUs with "
        "CUDA_VISIBLE_DEVICES=-1.",
    )


def _between_gpus(facts: Facts) -> list[Finding]:
    if facts.mpi_reads_cuda:
        aware = "yes"
    elif facts.mpi_knows_cuda:
        aware = "no: it says that it was built without, or its support is switched off"
    else:
        aware = "no: it has no MPIX_Query_cuda_support to say so"
    rows = [Finding("CUDA-aware MPI", aware)]
    if not facts.has_cuda:
        return [*rows, Finding("NCCL", "not looked for: built without CUDA")]
    rows.append(Finding("NCCL", f"no: {facts.nccl_problem}" if facts.nccl_problem else "found"))
    if facts.mpi_reads_cuda:
        way = "by this MPI, which is CUDA-aware"
    elif not facts.nccl_problem:
        way = "by NCCL, where each rank has a GPU of its own; this MPI is not CUDA-aware"
    else:
        way = "through memory of the hosts: this MPI is not CUDA-aware, and there is no NCCL"
    wanted = facts.environ.get("TF_ADASUM_DEVICE_TRANSPORT") or "auto"
    rows.append(Finding("tensors on GPUs go", f"{way} (TF_ADASUM_DEVICE_TRANSPORT={wanted})"))
    return rows


def differences(everyone: Sequence[Facts]) -> list[str]:
    """What would have to be the same on all ranks and is not, in a sentence for each."""
    sentences = []
    for name in _SAME:
        values = _by_value(everyone, name)
        if len(values) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            sentences.append(f"The ranks differ in {name}: {shown}. Install the same everywhere.")
    return sentences


def report(everyone: Sequence[Facts]) -> str:
    """The table of all ranks, with each value once, and the problems below it."""
    names = dict.fromkeys(found.name for facts in everyone for found in findings(facts))
    width = max(map(len, names))
    lines = []
    for name in names:
        values = _by_value(everyone, name)
        for i, (value, ranks) in enumerate(values.items()):
            whose = f" ({_ranks(ranks)})" if len(ranks) < len(everyone) else ""
            lines.append(f"{name if i == 0 else '':{width}}  {value}{whose}")
    problems: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        for found in findings(facts):
            if found.problem:
                problems.setdefault(found.problem, []).append(rank)
    sentences = [
        f"- {text}" + (f" ({_ranks(ranks)})" if len(everyone) > 1 else "")
        for text, ranks in problems.items()
    ]
    sentences += [f"- {text}" for text in differences(everyone)]
    if sentences:
        return "\n".join([*lines, "", "Training would not work:", *sentences])
    lines += ["", "Training can work."]
    if len(everyone) == 1:
        program = f"{everyone[0].launcher or 'mpirun'} -np N {os.path.basename(sys.executable)}"
        lines.append(f"To look at all hosts: {program} -m tf_adasum doctor")
    return "\n".join(lines)


def _by_value(everyone: Sequence[Facts], name: str) -> dict[str, list[int]]:
    """The values of a row, and which ranks have each."""
    values: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        for found in findings(facts):
            if found.name == name:
                values.setdefault(found.value, []).append(rank)
    return values


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in their order as text: rank 1, or ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
