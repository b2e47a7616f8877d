"""Random faults in random jobs: does each end as expected, and does none hang?

Each job is some ranks of this machine that make collectives of all kinds (job.py), one or two of
which fail (injector.py), in one of three modes: plain mpirun, `--with-ft ulfm`, and that with
`core.go_on_without_the_dead()`. What has to come of each kind of fault is in expectations.py. A job
that has not ended after the limit is a hang; its output and the stacks of its processes (where gdb
is installed) are shown. Ends with status 1 if there was a hang or anything unexpected.

    python tests/faults/campaign.py --faults 300 --seed 1
    python tests/faults/campaign.py --seed 1 --case 17      # one of them, with its output

Some 3 seconds a fault where cores are free.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expectations
import injector
import numpy as np
from expectations import MODES
from injector import DEADLY, ERRORS, INSIDE, MISTAKES, OUTSIDE, Fault

from tf_adasum import launch

HERE = Path(__file__).parent
LIMIT = 40
CALLS = 8

# How often, in percent.
_KINDS = {
    **{"kill": 28, "segv": 5, "exit0": 8, "exit3": 4, "interrupt": 5, "interrupt_mpirun": 3},
    **{"stop": 4, "delay": 5, "halt": 5, "exception": 7, "memory": 3},
    **{"nan": 5, "shape": 4, "dtype": 3, "skip": 5, "extra": 3, "other": 3},
}
_SECOND_KINDS = {"kill": 60, "segv": 5, "exit0": 10, "exception": 10, "delay": 10, "halt": 5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job and its faults."""

    mode: str
    ranks: int
    faults: tuple[Fault, ...]
    job: dict
    environ: dict[str, str]

    @property
    def kind(self) -> str:
        return ", ".join(fault.kind for fault in self.faults)

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        return f"{self.mode}, {self.ranks} ranks, {faults}, {self.job}, {self.environ}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What has come of a case."""

    case: Case
    happened: list[str]
    expected: str
    problem: str
    """Nothing where it is as expected; "HANG: ..." where it hung."""
    seconds: float
    ranks_seconds: float
    """From the last fault until no rank's process was left; the launcher may stay."""
    code: int | None
    output: str


def plan(seed: int, number: int) -> Case:
    """A random case; the same for the same numbers."""
    rng = np.random.default_rng([seed, number])
    mode = str(rng.choice(MODES, p=[0.3, 0.2, 0.5]))
    ranks = int(rng.integers(2, 7))
    faults = [_plan_fault(rng, mode, int(rng.integers(ranks)))]
    first = faults[0]
    deadly = first.kind in (*DEADLY, *ERRORS, "delay") and first.place != "start"
    if deadly and ranks > 2 and rng.random() < (0.35 if mode == "elastic" else 0.15):
        faults.append(_plan_second(rng, mode, first, ranks))
    pauses = any(fault.kind in injector.PAUSES for fault in faults)
    environ = {
        "TF_ADASUM_STALL_WARNING_SECONDS": str(rng.integers(1, 3)),
        "TF_ADASUM_STALL_ABORT_SECONDS": "8" if pauses else str(rng.integers(6, 9)),
        "TF_ADASUM_START_ABORT_SECONDS": "10" if first.place == "start" else "60",
        "TF_ADASUM_SHARED_MEMORY": str(rng.choice(["0", "1"])),
        "TF_ADASUM_SMALL": str(rng.choice(["0", "1"])),
    }
    job = {"seed": int(rng.integers(1 << 30)), "calls": CALLS, "elastic": mode == "elastic"}
    return Case(mode, ranks, tuple(faults), job, environ)


def _plan_fault(rng: np.random.Generator, mode: str, rank: int) -> Fault:
    kind = _choose(rng, _KINDS)
    call = int(rng.integers(CALLS))
    if kind in (*MISTAKES, *ERRORS):
        # So that a call that fits is still to come: see make_calls.
        return Fault(rank, kind, call=min(call, 4) if kind in MISTAKES else call)
    places = {"start": 6, "before": 12, "after": 6, "inside": 60}
    if kind in (*DEADLY, "halt"):
        places["time"] = 16
    place = _choose(rng, places)
    if place == "time":
        # Some calls before the end, so that the others are still there.
        return Fault(rank, kind, place, min(call, 4), seconds=float(rng.uniform(0, 0.02)))
    if place == "inside":
        place = _place_inside(rng, mode)
        # Also while the ranks leave. After that one is waited for in MPI_Finalize only, which is
        # not called with ulfm.
        leaves = mode != "ulfm" and kind in ("kill", "segv", "exit0", "stop", "delay", "halt")
        if place in ("agree", "agreed", "vote") and leaves and rng.random() < 0.15:
            call = CALLS
    if kind == "interrupt_mpirun":
        call = min(call, 4)
    nth = 1 if place in OUTSIDE else int(rng.integers(1, 4))
    return Fault(rank, kind, place, call, nth)


def _plan_second(rng: np.random.Generator, mode: str, first: Fault, ranks: int) -> Fault:
    kind = _choose(rng, _SECOND_KINDS)
    rank = int(rng.choice([r for r in range(ranks) if r != first.rank]))
    call = first.call + int(rng.integers(2))
    if kind in ERRORS:
        return Fault(rank, kind, call=min(call, CALLS))
    place = _place_inside(rng, mode)
    if mode == "elastic" and rng.random() < 0.4:
        place = "shrink"
    return Fault(rank, kind, place, call)


def _place_inside(rng: np.random.Generator, mode: str) -> str:
    # Nothing shrinks before the first death.
    outside = {"shrink"} if mode == "elastic" else {"shrink", "vote"}
    return str(rng.choice([place for place in INSIDE if place not in outside]))


def _choose(rng: np.random.Generator, weights: dict[str, int]) -> str:
    total = sum(weights.values())
    return str(rng.choice(list(weights), p=[weight / total for weight in weights.values()]))


def run(case: Case, limit: float = LIMIT) -> Result:
    """Runs a case's job, and leaves nothing running."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            command(case.mode, case.ranks),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(case, folder),
            start_new_session=True,
        )
        try:
            code, ranks_ended = _wait(process, folder, limit)
            ended, stacks = time.time(), ""
            left = _left(folder, 0 if code is None else 5)
            if code is None:
                stacks = _stacks(left)
        finally:
            for pid in _left(folder, 0):
                _kill(pid)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").replace("\0", "") + stacks
        reports = read_reports(folder, case.ranks)
        return judge(case, code, text, reports, ended, ranks_ended, left)


def command(mode: str, ranks: int) -> list[str]:
    mpirun, *options = launch.mpirun_command(ranks)
    fault_tolerant = [] if mode == "plain" else ["--with-ft", "ulfm"]
    return [mpirun, *fault_tolerant, *options, sys.executable, str(HERE / "job.py")]


def environment(case: Case, folder: str) -> dict[str, str]:
    environ = {**launch.environment(), **case.environ}
    # The ranks have work for all cores.
    environ["OPENBLAS_NUM_THREADS"] = "1"
    # The program's own folder is on the path already.
    environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environ["PYTHONPATH"]])
    environ[injector.VARIABLE] = injector.text(list(case.faults))
    environ["TF_ADASUM_TEST_JOB"] = json.dumps({"folder": folder, "ranks": case.ranks, **case.job})
    return environ


def read_reports(folder: str, ranks: int) -> expectations.Reports:
    reports = {}
    for rank in range(ranks):
        file = Path(folder, f"{rank}.json")
        lines = file.read_text().splitlines() if file.exists() else []
        reports[rank] = [json.loads(line) for line in lines]
    return reports


def judge(
    case: Case,
    code: int | None,
    output: str,
    reports: expectations.Reports,
    ended: float,
    ranks_ended: float,
    left: list[int],
) -> Result:
    entries = expectations.happened(reports)
    faults = [injector.parse(entry["fault"])[0] for entry in entries]
    outcome = expectations.expected(faults, case.mode)
    if code is None:
        wrong = f"HANG: expected {outcome}"
    elif left:
        wrong = f"{len(left)} processes were left running"
    else:
        wrong = expectations.problem(faults, case.mode, code, output, reports)
    seconds = expectations.seconds(entries, outcome, reports, ended) if entries else 0.0
    of_ranks = ranks_ended - max((entry["time"] for entry in entries), default=ranks_ended)
    happened = [str(fault) for fault in faults]
    return Result(case, happened, outcome, wrong, seconds, of_ranks, code, output)


def _wait(process: subprocess.Popen, folder: str, limit: float) -> tuple[int | None, float]:
    """The launcher's exit code, None where it is still there at the limit, and when a process of
    the ranks was last seen.
    """
    end, seen = time.monotonic() + limit, time.time()
    while process.poll() is None and time.monotonic() < end:
        if any(_is_rank(pid) for pid in _left(folder, 0)):
            seen = time.time()
        time.sleep(0.1)
    return process.poll(), seen


def _is_rank(pid: int) -> bool:
    # What a rank has left behind to end the launcher has the rank's environment, but no output.
    directory = Path("/proc", str(pid))
    try:
        return b"PMIX_RANK=" in (directory / "environ").read_bytes() and "1" in os.listdir(
            directory / "fd"
        )
    except OSError:
        return False


def _left(folder: str, seconds: float) -> list[int]:
    """The processes that have the job's folder in their environment, once none or time is left."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if folder.encode() in (directory / "environ").read_bytes():
                    found.append(int(directory.name))
            except OSError:
                continue
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stacks(pids: Sequence[int]) -> str:
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    text = ""
    for pid in pids:
        asked = [gdb, "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all bt 14"]
        try:
            told = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout
        except subprocess.TimeoutExpired:
            told = "no answer"
        lines = [line for line in told.splitlines() if line.startswith(("#", "Thread"))]
        text += f"\nProcess {pid}:\n" + "\n".join(lines) + "\n"
    return text


def run_all(cases: Sequence[Case], at_once: int, limit: float = LIMIT) -> Iterator[Result]:
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda case: run(case, limit), cases)


def table(results: Sequence[Result]) -> str:
    """A row for each kind of fault and mode."""
    groups = defaultdict(list)
    for result in sorted(results, key=_order):
        groups[_name(result), result.case.mode, result.expected].append(result)
    rows = [("fault", "mode", "what has to come", "ranks", "jobs")]
    rows = [(*rows[0], "as expected", "other", "HANG", "median s", "max s")]
    for key, group in groups.items():
        hangs = sum(result.problem.startswith("HANG") for result in group)
        others = sum(bool(result.problem) for result in group) - hangs
        took = [result.seconds for result in group if not result.problem] or [float("nan")]
        ranks = [result.case.ranks for result in group]
        counts = (len(group), len(group) - others - hangs, others, hangs)
        times = (f"{f(took):.2f}" for f in (statistics.median, max))
        rows.append((*key, f"{min(ranks)}-{max(ranks)}", *map(str, counts), *times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line) for line in lines)


def _name(result: Result) -> str:
    happened = [injector.parse(text)[0] for text in result.happened]
    name = " and ".join(fault.kind for fault in happened) or "place not reached"
    return name + " at the start" * any(fault.place == "start" for fault in happened)


def _order(result: Result) -> tuple[int, int, int]:
    kinds = [injector.parse(text)[0].kind for text in result.happened]
    first = list(_KINDS).index(kinds[0]) if kinds else 0
    return len(kinds) or 3, first, MODES.index(result.case.mode)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=300, help="how many jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one, and show its output")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a job")
    parser.add_argument("--json", type=Path, help="write all results into this file")
    given = parser.parse_args()
    numbers = range(given.faults) if given.case is None else [given.case]
    cases = [plan(given.seed, number) for number in numbers]
    results = []
    for number, result in zip(numbers, run_all(cases, given.at_once, given.limit), strict=True):
        results.append(result)
        if result.problem or given.case is not None:
            print(f"\ncase {number}: {result.case}\nhappened: {result.happened}")
            print(f"{result.output}\n{result.problem or result.expected}", flush=True)
        wrong = sum(bool(r.problem) for r in results)
        hangs = sum(r.problem.startswith("HANG") for r in results)
        line = f"{len(results)} of {len(cases)}: {wrong - hangs} unexpected, {hangs} hangs"
        print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
    print(table(results))
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
