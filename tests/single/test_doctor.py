"""What `python -m tf_adasum doctor` makes of an environment that is not as it should be."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tf_adasum
from tf_adasum import doctor, launch, native
from tf_adasum.doctor import Facts

GOOD = Facts(
    host="a",
    python="3.11.7",
    build={
        "version": "0.1.0",
        "tensorflow": "2.21.0",
        "mpi": "Open MPI",
        "mpi_version": "5.0.11",
        "compiler": "GNU 12.2.0",
        "xla": True,
        "cuda": None,
    },
    mpi="Open MPI v5.0.11",
    cpu_kernels="avx2",
    tensorflow="2.21.0",
    keras="3.15.1",
    launcher="/mpi/bin/mpirun",
    launcher_says="mpirun (Open MPI) 5.0.11\n",
    mpirun_on_path="/mpi/bin/mpirun",
    shared_memory_bytes=1 << 30,
    thread_level="MULTIPLE",
)
GPUS = {"has_cuda": True, "build": {**GOOD.build, "cuda": "13.0.88"}, "cuda_devices": 2}


def facts(**changes):
    return dataclasses.replace(copy.deepcopy(GOOD), **changes)


def problems(found):
    return [finding.problem for finding in doctor.findings(found) if finding.problem]


def values(found):
    return {finding.name: finding.value for finding in doctor.findings(found)}


def test_all_is_well():
    assert problems(GOOD) == []
    lines = doctor.report([GOOD]).splitlines()
    assert lines[:4] == [
        "tf_adasum             0.1.0",
        "host                  a, Python 3.11.7",
        "compiler              GNU 12.2.0",
        "built for TensorFlow  2.21.0",
    ]
    assert lines[-2] == "Training can work."
    assert lines[-1].startswith("To look at all hosts: /mpi/bin/mpirun -np N ")


@pytest.mark.parametrize(
    "changes, problem",
    [
        pytest.param(
            {"core_error": "tf_adasum's compiled libraries are missing.", "build": {}},
            "tf_adasum cannot be used: .* libraries are missing",
            id="not built",
        ),
        pytest.param(
            {"core_error": "tf_adasum was built for MPICH, but this process has loaded 'Open MPI'"},
            "cannot be used: tf_adasum was built for MPICH, but",
            id="another MPI",
        ),
        pytest.param(
            {"tensorflow": "2.20.0"},
            r"built for TensorFlow 2\.21\.0, but this is TensorFlow 2\.20\.0: install "
            r"tensorflow==2\.21\.0, or reinstall",
            id="another TensorFlow",
        ),
        pytest.param(
            {"tensorflow": "", "tensorflow_error": "ModuleNotFoundError: No module"},
            r"cannot be imported \(ModuleNotFoundError: No .*\): pip install tensorflow==2.21.0",
            id="no TensorFlow",
        ),
        pytest.param(
            {"keras": "3.4.1"},
            r"needs Keras 3\.5 or later, but this is Keras 3\.4\.1.*pip install \"keras>=3\.5\"",
            id="old Keras",
        ),
        pytest.param(
            {"ops_error": "NotFoundError: undefined symbol: _ZN3tsl"},
            r"cannot load tf_adasum's ops \(NotFoundError: undefined symbol: _ZN3tsl\): reinstall",
            id="undefined symbol",
        ),
        pytest.param(
            {"launcher": "", "launcher_error": "found neither mpirun.openmpi nor mpirun"},
            r"No launcher for Open MPI v5\.0\.11 was found \(found neither .*\): put the bin",
            id="no launcher",
        ),
        pytest.param(
            {"launcher_says": "HYDRA build details:\n    Version:   5.0.2\n"},
            "/mpi/bin/mpirun is of another MPI than Open MPI v5.0.11, .* first on PATH",
            id="Open MPI's library, MPICH's launcher",
        ),
        pytest.param(
            {"mpi": "MPICH Version: 5.0.2"},
            "/mpi/bin/mpirun is of another MPI than MPICH",
            id="MPICH's library, Open MPI's launcher",
        ),
        pytest.param(
            {
                "started_by": "srun",
                "started": 4,
                "job_error": "srun started 4 processes, but MPI sees only this one",
            },
            "srun started 4 processes, but MPI sees only this one",
            id="four jobs of one process",
        ),
        pytest.param(
            {"allreduce_error": "the sum of 1 to 4 came out as 1.0", "size": 4},
            r"A first allreduce failed \(the sum of 1 to 4 came out as 1.0\)",
            id="allreduce",
        ),
        pytest.param(
            {"shared_memory_bytes": 64 << 20, "size": 8, "local_size": 8},
            "8 ranks of Open MPI on a host take up to 128 MiB of /dev/shm, of which 64 MiB are "
            "free, .*--shm-size=1g",
            id="little shared memory",
        ),
        pytest.param(
            {"visible_gpus": 2},
            r"puts variables on a GPU \(2 here\), but tf_adasum was built without CUDA: reinstall "
            ".* where nvcc is found .*CUDA_VISIBLE_DEVICES=-1",
            id="GPUs, but built without CUDA",
        ),
    ],
)
def test_what_keeps_training_from_working(changes, problem):
    found = facts(**changes)
    (said,) = problems(found)
    assert re.search(problem, said)
    # One sentence, with an end or another message's.
    assert "\n" not in said
    assert doctor.report([found]).splitlines()[-2:] == ["Training would not work:", f"- {said}"]


@pytest.mark.parametrize(
    "changes, row, value",
    [
        ({"thread_level": "SERIALIZED"}, "thread level", "MPI_THREAD_SERIALIZED: overlap=True is"),
        ({"build": {**GOOD.build, "xla": False}}, "XLA", "no: jit_compile=True is an error"),
        ({}, "CUDA", "no: built without nvcc"),
        (GPUS, "CUDA", "built with 13.0.88; GPUs here: 2"),
        ({**GPUS, "cuda_devices": 0}, "CUDA", "built with 13.0.88; GPUs here: none"),
        ({}, "CUDA-aware MPI", "no: it has no MPIX_Query_cuda_support"),
        ({"mpi_knows_cuda": True}, "CUDA-aware MPI", "no: it says that it was built without"),
        ({"mpi_knows_cuda": True, "mpi_reads_cuda": True}, "CUDA-aware MPI", "yes"),
        ({}, "NCCL", "not looked for"),
        (GPUS, "NCCL", "found"),
        ({**GPUS, "nccl_problem": "libnccl.so.2: gone"}, "NCCL", "no: libnccl.so.2: gone"),
        (GPUS, "tensors on GPUs go", "by NCCL, where each rank has a GPU of its own"),
        ({**GPUS, "mpi_reads_cuda": True}, "tensors on GPUs go", "by this MPI, which is CUDA-"),
        ({**GPUS, "nccl_problem": "x"}, "tensors on GPUs go", "through memory of the hosts"),
        (
            {**GPUS, "environ": {"TF_ADASUM_DEVICE_TRANSPORT": "staged"}},
            "tensors on GPUs go",
            "by NCCL, where each rank has a GPU of its own; this MPI is not CUDA-aware "
            "(TF_ADASUM_DEVICE_TRANSPORT=staged)",
        ),
        (
            {"mpirun_on_path": "/usr/bin/mpirun"},
            "launcher",
            "/mpi/bin/mpirun (5.0.11); `mpirun` on PATH is another one, /usr/bin/mpirun",
        ),
        # srun has started the ranks, so none is missing.
        (
            {"size": 4, "started_by": "srun", "launcher_error": "found none"},
            "launcher",
            "started by srun",
        ),
        ({"size": 4, "local_size": 2}, "job", "4 ranks, 2 on this host"),
        ({"local_size": 2, "shares_memory": True}, "ranks of a host", "read each other's memory"),
        ({"local_size": 2}, "ranks of a host", "send messages: they cannot open each other's"),
        (
            {"local_size": 2, "environ": {"TF_ADASUM_SHARED_MEMORY": "0"}},
            "ranks of a host",
            "send messages: TF_ADASUM_SHARED_MEMORY=0",
        ),
        ({"shared_memory_bytes": 40 << 20}, "/dev/shm", "40 MiB free"),
        ({"shared_memory_bytes": None}, "/dev/shm", "none"),
        (
            {"environ": {"TF_ADASUM_SIMD": "avx2", "HOROVOD_FUSION_THRESHOLD": "1"}},
            "environment",
            "TF_ADASUM_SIMD=avx2 HOROVOD_FUSION_THRESHOLD=1",
        ),
    ],
)
def test_rows(changes, row, value):
    found = facts(**changes)
    assert values(found)[row].startswith(value)
    assert problems(found) == []


def test_ranks_that_differ_are_shown_by_value():
    everyone = [facts(), facts(), facts(host="b", cpu_kernels="avx512"), facts(host="b")]
    lines = doctor.report(everyone).splitlines()
    assert "host                  a, Python 3.11.7 (ranks 0-1)" in lines
    assert "                      b, Python 3.11.7 (ranks 2-3)" in lines
    assert "CPU kernels           avx2 (ranks 0-1, 3)" in lines
    assert "                      avx512 (rank 2)" in lines
    assert lines[-1] == "Training can work."


def test_ranks_that_must_not_differ():
    other = facts(tensorflow="2.20.0", build={**GOOD.build, "tensorflow": "2.20.0"})
    assert problems(other) == []
    lines = doctor.report([GOOD, other, GOOD]).splitlines()
    assert lines[-2:] == [
        "Training would not work:",
        "- The ranks differ in TensorFlow here: 2.21.0, Keras 3.15.1 on ranks 0, 2; 2.20.0, Keras "
        "3.15.1 on rank 1. Install the same everywhere.",
    ]


def test_problems_of_other_ranks_are_shown():
    report = doctor.report([GOOD, facts(shared_memory_bytes=1 << 20)])
    assert "Training would not work:" in report and report.endswith("(rank 1)")


@pytest.mark.parametrize(
    "environ, shows",
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "3"}, False),
        ({"SLURM_PROCID": "2"}, False),
    ],
)
def test_of_processes_that_do_not_see_each_other_one_prints(environ, shows, monkeypatch):
    for name in doctor._RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    apart = facts(started=4, started_by="srun", job_error="srun started 4")
    assert doctor._shows(apart) is shows
    # What is missing on one host alone is said there.
    assert doctor._shows(facts(started=4, core_error="missing"))


def test_what_is_found_out_here():
    found = doctor.find_out({**os.environ, "TF_ADASUM_SIMD": "plain", "TF_ADASUMMER": "x"})
    assert found.build == native.build_info()
    assert found.mpi == native.core_library().adasum_mpi_running().decode()
    assert found.launcher == launch.mpirun_command(1)[0]
    assert re.search(r"\d+\.\d+", found.launcher_says)
    assert found.environ == {
        **{k: v for k, v in os.environ.items() if k.startswith("TF_ADASUM_")},
        "TF_ADASUM_SIMD": "plain",
    }
    assert found.shared_memory_bytes > 0
    assert (found.size, found.local_size, found.thread_level) == (1, 1, "MULTIPLE")
    assert problems(found) == []


def test_a_launcher_that_is_missing(monkeypatch):
    def none(np):
        raise FileNotFoundError("found neither mpirun nor mpiexec")

    monkeypatch.setattr(launch, "mpirun_command", none)
    (said,) = problems(doctor.find_out())
    assert said.startswith("No launcher for ")


def test_a_first_allreduce_that_fails(monkeypatch):
    monkeypatch.setenv("TF_ADASUM_ALGORITHM", "fastest")
    (said,) = problems(doctor.find_out())
    assert "`algorithm` must be one of" in said


def _doctor(folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with the package of a folder; without TensorFlow, to take less time."""
    block = "import sys; sys.modules['tensorflow'] = None; "
    path = f"sys.path.insert(0, {str(folder)!r}); " if folder else ""
    code = f"{block}{path}from tf_adasum import doctor; sys.exit(doctor.main([]))"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**launch.environment(), **environ},
    )


def test_no_tensorflow_ends_with_1():
    ended = _doctor()
    assert ended.returncode == 1
    assert "- TensorFlow cannot be imported (ModuleNotFoundError" in ended.stdout


def test_missing_libraries_end_with_1(tmp_path):
    package = Path(tf_adasum.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "_lib")
    shutil.copytree(package, tmp_path / "tf_adasum", ignore=ignored)
    ended = _doctor(tmp_path)
    assert ended.returncode == 1
    assert "- tf_adasum cannot be used: tf_adasum's compiled libraries are missing" in ended.stdout
    assert ended.stderr == ""


def test_processes_of_their_own_end_with_1():
    ended = _doctor(PMI_SIZE="4", PMI_RANK="0")
    assert ended.returncode == 1
    assert "- MPICH's mpiexec started 4 processes, but MPI (" in ended.stdout
    assert ended.stdout.count("started 4") == 1
    assert _doctor(PMI_SIZE="4", PMI_RANK="2").stdout == ""
