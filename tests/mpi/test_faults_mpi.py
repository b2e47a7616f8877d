"""Ranks that die, stop, are late or do something else: each job ends as expected, and in time.

The faults and what has to come of them are in tests/faults.
"""

import itertools
import re
import sys

import campaign
import pytest
from campaign import Case
from expectations import ENDS, GOES_ON
from injector import Fault
from job import Job, make_calls
from ranks import run, run_ranks

from tf_adasum import launch

# What the shortest job takes on a busy machine, in seconds, beside the limit that is tested.
START = 15

# What Open MPI's launcher may take after the ranks have ended. With ULFM it hangs now and then
# while it aborts a job, until it is ended: see launcher.cc.
LAUNCHER_STAYS = 10 + 3 + 3

PATIENCE = {"TF_ADASUM_STALL_WARNING_SECONDS": "1", "TF_ADASUM_STALL_ABORT_SECONDS": "6"}


def run_case(
    faults: list[Fault], mode: str, ranks: int, memory: int = 1, abort: int = 6, **job: object
) -> campaign.Result:
    """A job that has to end as expected, after all of the faults."""
    environ = {
        "TF_ADASUM_STALL_WARNING_SECONDS": "1",
        "TF_ADASUM_STALL_ABORT_SECONDS": str(abort),
        "TF_ADASUM_SHARED_MEMORY": str(memory),
    }
    job = {"elastic": mode == "elastic", **job}
    result = campaign.run(Case(mode, ranks, tuple(faults), job, environ), limit=60)
    said = f"{result.problem}, code {result.code}, happened: {result.happened}\n{result.output}"
    assert not result.problem, said
    assert len(result.happened) == len(faults), said
    return result


def is_steady(case: Case) -> bool:
    """Whether Open MPI itself can be relied on: after a death its messages within a host crash now
    and then, and its launcher does while it aborts a job with ULFM. See docs/reliability.md.
    """
    return case.mode == "plain" or (
        case.mode == "elastic" and case.environ["TF_ADASUM_SHARED_MEMORY"] == "1"
    )


def test_random_faults():
    plans = (campaign.plan(seed=7, number=number) for number in itertools.count())
    cases = list(itertools.islice(filter(is_steady, plans), 20))
    for result in campaign.run_all(cases, at_once=3, limit=60):
        assert not result.problem, f"{result.problem}: {result.case}\n{result.output}"


FIRST, LAST, MIDDLE = [0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [2, 3, 1, 4, 0]
PLACES = ["agree", "agreed", "fill", "reduce", "dots", "gather", "emit", "vote", "commit", "after"]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("victims", [FIRST, LAST, MIDDLE], ids=["first", "last", "middle"])
def test_the_others_go_on_wherever_a_rank_dies(victims, half):
    # Six ranks down to one, a death a call. Another half of the victims meets each place.
    places = PLACES[5 * half : 5 * half + 5]
    if victims == MIDDLE:
        places = places[::-1]
    faults = [
        Fault(rank, "kill", place, call)
        for call, (rank, place) in enumerate(zip(victims, places, strict=True))
    ]
    kind = "sync" if "commit" in places or victims == LAST else "allreduce"
    result = run_case(faults, "elastic", 6, kind=kind, size="large", seed=3)
    assert result.expected == GOES_ON


def test_ranks_die_while_the_others_get_over_a_death():
    faults = [
        *(Fault(0, "kill", "agreed", 1), Fault(3, "kill", "shrink", 1)),
        *(Fault(5, "kill", "vote", 3), Fault(1, "kill", "shrink", 3)),
    ]
    run_case(faults, "elastic", 6)


def test_a_rank_dies_when_only_some_have_got_over_a_death():
    # The three that are left share memory again. That all have it, rank 0 lives to tell rank 2, but
    # not rank 1.
    place = {"place": "answer", "call": 1, "nth": 2}
    late, dies = Fault(0, "delay", **place, seconds=1), Fault(0, "kill", **place)
    run_case([Fault(3, "kill", "agreed", 1), late, dies], "elastic", 4)


@pytest.mark.parametrize("kind", ["segv", "exit0", "exit3", "interrupt"])
def test_the_end_of_one_ends_all_soon(kind):
    assert run_case([Fault(1, kind, "agreed", 2)], "plain", 3).seconds < 10


@pytest.mark.parametrize(("ranks", "kind"), [(2, "kill"), (3, "exit0")])
def test_the_end_of_one_is_an_error_with_ulfm(kind, ranks):
    # Of the last rank's MPI_Abort Open MPI's launcher would return 0.
    result = run_case([Fault(1, kind, "agreed", 2)], "ulfm", ranks)
    assert "RankLostError: rank 1 has died" in result.output
    assert result.ranks_seconds < 10 and result.seconds < 10 + LAUNCHER_STAYS


@pytest.mark.parametrize("kind", ["exception", "interrupt"])
def test_a_rank_that_fails_has_died_for_the_others(kind):
    assert run_case([Fault(0, kind, call=2)], "elastic", 3).expected == GOES_ON


def test_the_root_of_a_broadcast_dies_and_ranks_before_it():
    job = Job("", 6, seed=35, kind="broadcast")
    assert [call.root for call in make_calls(job)[:4]] == [2, 3, 5, 4]
    faults = [Fault(rank, "kill", "agreed", call) for call, rank in enumerate([0, 3, 5, 1])]
    run_case(faults, "elastic", 6, kind=job.kind, seed=job.seed)


def test_a_root_dies_when_its_first_tensor_has_come():
    # In place of the others' own, one of whom is the next root.
    job = Job("", 3, kind="broadcast", size="large")
    root = make_calls(job)[0].root
    run_case([Fault(root, "kill", "tensor", nth=2)], "elastic", 3, kind=job.kind, size=job.size)


def test_mpirun_is_interrupted():
    assert run_case([Fault(1, "interrupt_mpirun", "before", 1)], "plain", 3).seconds < 10


def test_an_exit_that_the_others_are_not_told_of():
    # With a status that is not 0, Open MPI's launcher does not make MPI know.
    result = run_case([Fault(1, "exit3", "agreed", 2)], "elastic", 3, abort=60)
    assert "the launcher has not told MPI" in result.output
    assert result.expected == ENDS and result.seconds < 20 + START


@pytest.mark.parametrize("mode", ["ulfm", "elastic"])
def test_a_job_in_which_all_ranks_fail_does(mode):
    faults = [Fault(rank, "exception", call=2) for rank in range(4)]
    job = {"elastic": mode == "elastic"}
    result = campaign.run(Case(mode, 4, tuple(faults), job, PATIENCE))
    assert result.code not in (0, None), result.output
    assert len(result.happened) == 4 and "InjectedError: rank 2 fails" in result.output
    assert result.ranks_seconds < 10 and result.seconds < 10 + LAUNCHER_STAYS


def test_a_stopped_rank_ends_the_job():
    assert run_case([Fault(2, "halt", "agreed", 3)], "plain", 4).seconds < 6 + START


def test_a_rank_that_is_stopped_while_the_others_get_over_a_death():
    faults = [Fault(0, "kill", "agreed", 2), Fault(2, "halt", "shrink", 2)]
    result = run_case(faults, "elastic", 4)
    assert "process of rank 0 has died, and the others do not get over it" in result.output


FLUSH = """
import os, signal
import numpy as np
from syncs import sync
from tf_adasum import core, native
core.go_on_without_the_dead()
me, start = core.rank(), np.zeros(200_000)
weights, starts = [start + 1 + me], [start.copy()]
dies = native.FaultHook(lambda place: place == b"emit" and os.kill(os.getpid(), signal.SIGKILL))
if me == 2:
    native.core_library().adasum_set_fault_hook(dies)
# Rank 0 has no more steps to take, rank 1 some: both go back, one takes part in the other's next.
if me > 0:
    assert sync(weights, starts, with_starts=True).syncs == 0
    np.testing.assert_array_equal(weights[0], 0)
    weights[0] += 5
assert sync(weights, starts, with_starts=True, flush=True).syncs == 1
np.testing.assert_array_equal(weights[0], 5)
print("equal", core.shrinkings()[0].lost)
"""


def test_all_go_back_while_some_have_come_to_their_end():
    mpirun, *options = launch.mpirun_command(3)
    ended = run([mpirun, "--with-ft", "ulfm", *options, sys.executable, "-c", FLUSH], 60)
    assert (ended.code, ended.output.count("equal (2,)")) == (0, 2), ended.output


def test_a_rank_that_is_stopped_while_the_others_leave_mpi():
    result = run_case([Fault(2, "halt", "agreed", 8)], "plain", 3)
    assert "a process has not come to the end of MPI within 6 s" in result.output


@pytest.mark.parametrize("kind", ["stop", "delay"])
def test_a_pause_ends_nothing(kind):
    run_case([Fault(0, kind, "reduce", 2, seconds=2)], "elastic", 3)


LATE = """
import sys, time
import numpy as np
from tf_adasum import core
core.allreduce(np.ones(3), name="first")
if core.rank() == 2:
    time.sleep({seconds})
core.allreduce(np.ones(3), name="second")
core.barrier()
time.sleep(2)
core.barrier()
"""


def test_the_user_is_told_whom_the_others_wait_for():
    ended = run_ranks(3, LATE.format(seconds=5), TF_ADASUM_STALL_WARNING_SECONDS="1")
    assert ended.code == 0, ended.output
    waits = r"warning: rank 0 has been waiting for \d s in its call 2, allreduce 'second'"
    # Twice as long each time: after 1, 2 and 4 seconds.
    assert len(re.findall(waits, ended.output)) in (2, 3), ended.output
    assert "Missing: rank 2, which has been out of its call 1, allreduce 'first'" in ended.output
    assert "will end after 1800 s (TF_ADASUM_STALL_ABORT_SECONDS)" in ended.output
    assert "call 2 has ended, the ranks go on" in ended.output
    assert "rank 1 has been waiting" not in ended.output


def test_after_a_death_the_user_is_told_of_a_late_rank_by_its_new_number():
    faults = [Fault(0, "kill", "agreed", 1), Fault(2, "delay", "before", 3, seconds=3)]
    result = run_case(faults, "elastic", 3, abort=60)
    assert "Missing: rank 1, which has been out of its call" in result.output


def test_nobody_is_warned_where_the_limit_is_zero():
    environ = {"TF_ADASUM_STALL_WARNING_SECONDS": "0", "TF_ADASUM_STALL_ABORT_SECONDS": "0"}
    ended = run_ranks(3, LATE.format(seconds=3), **environ)
    assert (ended.code, ended.output) == (0, "")


def test_a_rank_that_never_comes_ends_the_job():
    ended = run_ranks(3, LATE.format(seconds=100), **PATIENCE)
    assert ended.code != 0
    assert re.search(r"error: rank 0 has been waiting for \d+ s in its call 2", ended.output)
    assert "Missing: rank 2, which has been out of its call 1" in ended.output
    assert "The job ends, since TF_ADASUM_STALL_ABORT_SECONDS is 6 s." in ended.output
    assert ended.seconds < 6 + START


def test_a_limit_that_is_no_number():
    ended = run_ranks(
        2, "from tf_adasum import core; core.init()", TF_ADASUM_STALL_ABORT_SECONDS="1h"
    )
    assert ended.code != 0
    assert "TF_ADASUM_STALL_ABORT_SECONDS must be a number of seconds" in ended.output
    assert "Received: 1h" in ended.output


@pytest.mark.parametrize("rest", ["time.sleep(100)", "sys.exit(0)"])
def test_a_process_that_does_not_start(rest):
    source = f"""
import os, sys, time
from tf_adasum import core
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {rest}
core.init()
"""
    environ = {"TF_ADASUM_STALL_WARNING_SECONDS": "2", "TF_ADASUM_START_ABORT_SECONDS": "5"}
    ended = run_ranks(3, source, **environ)
    assert ended.code != 0
    assert ended.seconds < 5 + START
    by_launcher = ("PMIX ERROR", "prterun has exited due to process rank 1")
    if rest == "sys.exit(0)" and any(text in ended.output for text in by_launcher):
        return  # the launcher has noticed the exit by itself, which it does now and then
    missing = "these have not come to tf_adasum.init(): rank 1 (local rank 1)."
    assert "warning: for 2 s the processes" in ended.output
    assert f"Of the 3 of this host {missing}" in ended.output
    assert "have not met within 5 s (TF_ADASUM_START_ABORT_SECONDS)" in ended.output


@pytest.mark.parametrize("memory", ["1", "0"])
def test_a_death_of_which_the_launcher_makes_nothing(memory):
    source = """
import os, signal
import numpy as np
from tf_adasum import core
core.allreduce(np.ones(3))
if core.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
core.allreduce(np.ones(100_000))
"""
    mpirun, *options = launch.mpirun_command(3)
    command = [mpirun, "--enable-recovery", *options, sys.executable, "-c", source]
    ended = run(command, 60, TF_ADASUM_SHARED_MEMORY=memory)
    assert ended.code != 0
    assert "the process of rank 1 has died, and the launcher has not ended" in ended.output
    assert ended.seconds < 10 + START


def test_the_others_cannot_go_on_where_mpi_cannot():
    ended = run_ranks(2, "from tf_adasum import core; core.go_on_without_the_dead()")
    assert ended.code != 0
    assert "RuntimeError: this MPI does not go on after a process has died" in ended.output
    assert "mpirun --with-ft ulfm" in ended.output
