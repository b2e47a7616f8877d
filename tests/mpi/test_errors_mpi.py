"""Jobs that have to end, soon and non-zero, with the cause in what they print."""

import re
import subprocess
import sys
import time

import pytest
from ranks import on_ranks, run, run_ranks

from tf_adasum import core, launch

# What the shortest job takes on a busy machine, in seconds, beside the limit that is tested.
START = 15


@on_ranks(5)
def test_every_rank_gets_the_difference_and_goes_on():
    import numpy as np

    rank = core.rank()
    for call, message in {
        lambda: core.allreduce(np.zeros(2 + (rank == 3))): r"rank 3 with tensor 0: float64\[3\]",
        lambda: core.allreduce(np.zeros(2, "f" if rank == 1 else "d")): r"rank 1 .*float32\[2\]",
        lambda: core.grouped_allreduce([np.zeros(1)] * (1 + rank // 4)): r"rank 4 .*tensors: 2",
        lambda: core.allreduce(np.zeros(1), "sum" if rank else "average"): "ranks 1-4 .*op: sum",
        lambda: core.allreduce(np.zeros(1), name=str(rank // 2)): "ranks 2, 3 with name: '1'",
        lambda: core.broadcast(np.zeros(1), rank % 2): "ranks 1, 3 with root rank: 1",
        lambda: core.allgather(np.zeros((3, 1 + rank // 3))): r"ranks 3, 4 .*float64\[any, 2\]",
        lambda: core.barrier() if rank == 2 else core.allreduce(np.zeros(1)): "rank 2 .*barrier",
    }.items():
        with pytest.raises(core.DisagreementError, match=message):
            call()
        assert core.allreduce(np.ones(2), "sum").tolist() == [5, 5]
    # Calls of different kinds have nothing else to compare.
    with pytest.raises(core.DisagreementError) as error:
        core.barrier() if rank == 2 else core.allreduce(np.zeros(1), "sum")
    assert len(str(error.value).splitlines()) == 2
    # What all ranks do wrong alike is refused on all.
    with pytest.raises(ValueError, match="Received: int32"):
        core.allreduce(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=r"from 0 to 4\. Received: -1"):
        core.broadcast(np.zeros(1), -1)
    with pytest.raises(ValueError, match="from 0 to 4"):
        core.broadcast(np.zeros(1), 2**32)
    with pytest.raises(TypeError, match="Received: name=3"):
        core.allreduce(np.zeros(1), name=3)
    with pytest.raises(core.DisagreementError, match=r"<f4.*<i4"):
        core.broadcast(np.zeros(1, [("a", "i4" if rank else "f4")]))
    with pytest.raises(ValueError, match="Received: a scalar"):
        core.allgather(np.float64(1))


def test_an_exception_on_one_rank_ends_the_job():
    source = """
import numpy as np
from tf_adasum import core
core.allreduce(np.ones(3))
if core.rank() == 1:
    raise LookupError("the disk is gone")
core.allreduce(np.ones(3))
"""
    ended = run_ranks(3, source)
    assert ended.code != 0
    assert "LookupError: the disk is gone" in ended.output
    last = ended.output.rindex("rank 1 ends the job. Its error, shown above: LookupError: the disk")
    assert "Traceback" not in ended.output[last:]
    assert ended.seconds < 10 + START


def test_an_exception_on_one_rank_in_fit_ends_the_job():
    source = """
import time
import numpy as np, keras, tf_adasum as adasum
class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if adasum.rank() == 1 and batch == 2:
            print("at", time.time(), flush=True)
            raise MemoryError("in a callback")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(adasum.AdasumOptimizer("sgd"), "mse", jit_compile=False)
x = np.random.default_rng(adasum.rank()).normal(size=(64, 2))
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[*adasum.callbacks.standard(), Fail()])
"""
    ended = run_ranks(2, source)
    assert ended.code != 0
    assert "MemoryError: in a callback" in ended.output
    assert time.time() - float(re.search(r"at (\d+\.\d+)", ended.output)[1]) < 10


def test_an_exception_ends_ranks_outside_of_the_communicator():
    source = """
from mpi4py import MPI
from tf_adasum import core
core.init(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank, 0))
if MPI.COMM_WORLD.rank == 2:
    raise LookupError("in a search over settings, one to a rank")
MPI.COMM_WORLD.Barrier()
"""
    ended = run_ranks(3, source)
    assert ended.code != 0 and "LookupError" in ended.output
    assert ended.seconds < 10 + START


def test_forked_children_are_no_ranks():
    source = """
import os, sys
import numpy as np
from tf_adasum import core
core.init()
for child in (lambda: sys.exit(core.size() - 2), core.barrier, lambda: 1 / 0):
    if os.fork() == 0:
        child()
    os.wait()
print(core.allreduce(np.ones(1), "sum"))
"""
    ended = run_ranks(2, source)
    assert ended.code == 0, ended.output
    assert ended.output.count("[2.]") == 2 and "ZeroDivisionError" in ended.output
    assert "is no rank itself, and cannot call a collective" in ended.output


def test_a_rank_that_leaves_early():
    source = """
import sys
import numpy as np
from tf_adasum import core
if core.rank() == 2:
    sys.exit(0)
core.allreduce(np.ones(3))
"""
    ended = run_ranks(3, source)
    assert ended.code != 0
    assert "rank 2 with call: shutdown" in ended.output
    assert "ranks 0, 1 with call: allreduce" in ended.output


@pytest.mark.parametrize(
    "source",
    [
        "from tf_adasum import core; core.init()",
        "from tf_adasum import core; core.rank(); core.shutdown()",
        "from tf_adasum import core; import sys; core.barrier(); sys.exit(0)",
        "from mpi4py import MPI; from tf_adasum import core; core.init(MPI.COMM_WORLD)",
        "from tf_adasum import core; core.init(); from mpi4py import MPI; MPI.COMM_WORLD.barrier()",
        # Long enough for the watchdog to look at the others, if it were still there.
        "from mpi4py import MPI; from tf_adasum import core; import time; core.barrier()\n"
        "MPI.Finalize(); assert not core.is_initialized(); time.sleep(1)",
        "import tf_adasum; tf_adasum.barrier()",
    ],
    ids=[
        *("init", "shutdown", "exit", "mpi4py before", "mpi4py after", "mpi4py ends it"),
        "tensorflow",
    ],
)
def test_a_clean_end_says_nothing(source):
    ended = run_ranks(2, source)
    assert (ended.code, ended.output) == (0, "")


def test_mpi_is_finalized_on_one_rank_while_the_others_go_on():
    source = """
import numpy as np
from mpi4py import MPI
from tf_adasum import core
core.init()
if core.rank() == 1:
    MPI.Finalize()
core.allreduce(np.ones(3))
"""
    ended = run_ranks(2, source)
    assert ended.code != 0
    assert "MPI is finalized on this rank, but the ranks disagree" in ended.output
    assert "rank 1 with call: shutdown" in ended.output


def test_no_start_while_another_thread_finalizes_mpi(tmp_path):
    source = f"""
import pathlib, threading, time
from tf_adasum import core, native
core.init()
finalize = native.core_library().MPI_Finalize  # unlike mpi4py's it lets other threads run
done = pathlib.Path({str(tmp_path / "done")!r})
if core.rank() == 0:
    while not done.exists():  # so long the other rank's does not end
        time.sleep(0.01)
    finalize()
else:
    ends = threading.Thread(target=finalize)
    ends.start()
    while core.is_initialized():
        time.sleep(0.01)
    try:
        core.init()
    except RuntimeError as error:
        print(error)
    done.touch()
    ends.join()
"""
    ended = run_ranks(2, source)
    assert ended.code == 0 and "MPI is already finalized" in ended.output, ended.output


def test_mpi_with_too_low_a_thread_level():
    source = """
import mpi4py
mpi4py.rc.thread_level = "single"
from mpi4py import MPI
from tf_adasum import core
core.init()
"""
    ended = run_ranks(2, source)
    assert ended.code != 0
    assert "thread level SINGLE, tf_adasum needs SERIALIZED or MULTIPLE" in ended.output


def test_after_mpi_is_finalized():
    source = """
from mpi4py import MPI
from tf_adasum import core
MPI.Finalize()
try:
    core.init()
except RuntimeError as error:
    print(error)
"""
    ended = run_ranks(1, source)
    assert ended.code == 0 and "MPI is already finalized" in ended.output


def test_several_processes_of_which_mpi_sees_one():
    # As under another MPI's mpirun: started several times, but MPI knows of no other process.
    source = "from tf_adasum import core; core.rank()"
    ended = run([sys.executable, "-c", source], 60, HOROVOD_SIZE="2", HOROVOD_CONTROLLER="gloo")
    assert ended.code == 1
    assert "RuntimeError: horovodrun started 2 processes, but MPI" in ended.output


def test_several_processes_with_a_communicator_of_one():
    source = "from mpi4py import MPI; from tf_adasum import core; core.init(MPI.COMM_WORLD)"
    ended = run([sys.executable, "-c", source], 60, OMPI_COMM_WORLD_SIZE="2")
    assert ended.code == 1 and "sees only this one" in ended.output


def test_without_a_launcher_it_is_one_rank():
    source = "from tf_adasum import core; print(core.rank(), core.size())"
    ended = run([sys.executable, "-c", source], 60)
    assert (ended.code, ended.output) == (0, "0 1\n")


def test_the_time_limit_of_these_tests_leaves_nothing_running():
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(TimeoutError) as error:
        run_ranks(2, source, timeout=5)
    pids = [int(word) for word in str(error.value).split() if word.isdigit() and int(word) > 1]
    alive = subprocess.run(
        ["ps", "-o", "args=", "-p", ",".join(map(str, pids))], capture_output=True
    )
    assert b"time.sleep(600)" not in alive.stdout
    assert launch.mpirun_command(2)
