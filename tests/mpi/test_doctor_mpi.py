"""`python -m tf_adasum doctor` under mpirun: one table of all ranks, and one exit status."""

from __future__ import annotations

import re
import sys

from ranks import run, run_ranks

from tf_adasum import launch, native


def test_all_ranks_in_one_table():
    command = [*launch.mpirun_command(2), sys.executable, "-m", "tf_adasum", "doctor"]
    ended = run(command, timeout=120)
    assert ended.code == 0, ended.output
    table = ended.output[ended.output.index("tf_adasum  ") :].splitlines()
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in table if "  " in line)
    info = native.build_info()
    assert rows["built for TensorFlow"] == info["tensorflow"]
    assert rows["TensorFlow here"].startswith(f"{info['tensorflow']}, Keras ")
    assert rows["MPI built for"] == f"{info['mpi']} {info['mpi_version']}"
    assert rows["job"] == "2 ranks, 2 on this host"
    assert rows["thread level"] == "MPI_THREAD_MULTIPLE"
    assert rows["ranks of a host"] == "read each other's memory"
    assert rows["allreduce"] == "of 2 numbers: right"
    assert rows["XLA"].startswith("yes" if info["xla"] else "no")
    if native.has_cuda():
        assert rows["CUDA"].startswith(f"built with {info['cuda']}; GPUs here: ")
        assert rows["tensors on GPUs go"].endswith("(TF_ADASUM_DEVICE_TRANSPORT=auto)")
    else:
        assert rows["CUDA"].startswith("no: built without nvcc")
    assert table[-1] == "Training can work."


def test_a_problem_of_one_rank_is_shown_by_rank_0_and_ends_all_with_1():
    source = """
import sys
from tf_adasum import core, doctor

def look(facts):  # instead of importing it, which takes long
    facts.tensorflow, facts.keras = facts.build["tensorflow"], "3.15.1"
    facts.tensorflow_error = "ImportError: libcudart" if core.rank() == 1 else ""

doctor._look_at_tensorflow = look
doctor.importlib.import_module = lambda name: doctor  # nor the ops
doctor.ops = lambda: None
status = doctor.main([])
print(f"status of rank {core.rank()}: {status}")
sys.exit(status)
"""
    ended = run_ranks(2, source)
    assert ended.code == 1
    assert ended.output.count("Training would not work:") == 1
    assert re.search(r"^- TensorFlow cannot .*libcudart.* \(rank 1\)$", ended.output, re.MULTILINE)
    for rank in range(2):
        assert f"status of rank {rank}: 1" in ended.output
