"""What has to come of each fault: written down by hand, and held against what a job has done."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from injector import DEADLY, ERRORS, Fault

MODES = ("plain", "ulfm", "elastic")
"""mpirun; `mpirun --with-ft ulfm`; that and `core.go_on_without_the_dead()`."""

FINISHES = "all finish"  # exit code 0, all results right
REFUSED = "refused on all"  # a DisagreementError on every rank, which names one; then all finish
GOES_ON = "others finish"  # exit code 0, all results right, of those that live
ENDS = "job ends"  # exit code not 0, with the cause in the output

# Of several faults the one that is later in this list counts.
_ORDER = (FINISHES, REFUSED, GOES_ON, ENDS)

EXPECTED = {
    # kind: in the modes
    "kill": (ENDS, ENDS, GOES_ON),
    "segv": (ENDS, ENDS, GOES_ON),
    "exit0": (ENDS, ENDS, GOES_ON),
    # Open MPI's launcher does not tell the others of it.
    "exit3": (ENDS, ENDS, ENDS),
    "exception": (ENDS, ENDS, GOES_ON),
    "memory": (ENDS, ENDS, GOES_ON),
    "interrupt": (ENDS, ENDS, GOES_ON),
    "interrupt_mpirun": (ENDS, ENDS, ENDS),
    "stop": (FINISHES, FINISHES, FINISHES),
    "delay": (FINISHES, FINISHES, FINISHES),
    "halt": (ENDS, ENDS, ENDS),
    "nan": (FINISHES, FINISHES, FINISHES),
    "shape": (REFUSED, REFUSED, REFUSED),
    "dtype": (REFUSED, REFUSED, REFUSED),
    "other": (REFUSED, REFUSED, REFUSED),
    "skip": (ENDS, ENDS, ENDS),
    "extra": (ENDS, ENDS, ENDS),
}


def expected(faults: Iterable[Fault], mode: str) -> str:
    """What has to come of these faults together."""
    outcomes = [FINISHES]
    for fault in faults:
        outcome = EXPECTED[fault.kind][MODES.index(mode)]
        # A job that has not started cannot go on.
        outcomes.append(ENDS if outcome == GOES_ON and fault.place == "start" else outcome)
    return max(outcomes, key=_ORDER.index)


def cause(fault: Fault, rank: int, mode: str) -> str:
    """A pattern of what tells the user, who knows the rank by this number."""
    by_launcher = {
        "kill": rf"process rank {rank} with PID \d+ on node \S+ exited on\s+signal 9",
        "segv": rf"process rank {rank} with PID \d+ on node \S+ exited on\s+signal 11",
        "exit0": rf"process rank {rank} with PID \d+ on node \S+ exiting\s+improperly",
        "exit3": rf"Process name: \[\S+,{rank}\]\s+Exit code:    3",
    }
    patterns = [rf"have not met within .*rank {rank} \(local"] if fault.place == "start" else []
    if fault.kind in by_launcher:
        patterns += [by_launcher[fault.kind], rf"\brank {rank}(, \d)*(, which)? has died"]
    elif fault.kind == "exception":
        patterns.append(f"InjectedError: rank {fault.rank} fails")
    elif fault.kind == "memory":
        patterns.append(f"MemoryError: rank {fault.rank} has none left")
    elif fault.kind == "interrupt":
        patterns.append("KeyboardInterrupt")
    elif fault.kind == "halt":
        patterns.append(rf"Missing: .*rank {rank}, which does not answer.*\s+The job ends")
        patterns.append("a process has not come to the end of MPI within")
        patterns.append("the others do not get over it.*\\s+The job ends")
    elif fault.kind in ("skip", "extra"):
        patterns.append(rf"the ranks disagree about this call:\s.*\brank {rank} with (call|name)")
    return "|".join(patterns)


Reports = dict[int, list[dict[str, Any]]]
"""What each rank has written, by its first number."""


def happened(reports: Reports) -> list[dict[str, Any]]:
    """The faults that have, in order."""
    entries = (entry for of_rank in reports.values() for entry in of_rank)
    return sorted((e for e in entries if e["what"] == "fault"), key=lambda entry: entry["time"])


def problem(faults: list[Fault], mode: str, code: int, output: str, reports: Reports) -> str:
    """What is not as expected, or nothing.

    faults: those that have happened, in order.
    """
    if "AssertionError" in output:
        return "a wrong result"
    if differing := _differing(reports):
        return differing
    outcome = expected(faults, mode)
    if outcome == ENDS:
        if code == 0:
            return "exit code 0"
        wanted = [fault for fault in faults if expected([fault], mode) == ENDS]
        numbers = [(fault, _number(fault, faults, mode)) for fault in wanted]
        # Of several causes one is enough: the job may end before the second.
        if not any(re.search(cause(f, number, mode), output, re.S) for f, number in numbers):
            return "the cause is not named"
        return ""
    if code != 0:
        return f"exit code {code}"
    victims = {f.rank for f in faults if EXPECTED[f.kind][MODES.index(mode)] == GOES_ON}
    for rank, entries in reports.items():
        said = [entry["what"] for entry in entries]
        if rank not in victims and "end" not in said:
            return f"rank {rank} has not come to the end"
        if outcome == REFUSED:
            texts = [entry["text"] for entry in entries if entry["what"] == "disagreement"]
            if len(texts) != 1 or not re.search(rf"\brank {faults[-1].rank} with", texts[0]):
                return f"rank {rank} was told of {len(texts)} disagreements: {texts}"
    return ""


def _number(fault: Fault, faults: list[Fault], mode: str) -> int:
    """What number the rank has by then."""
    if mode != "elastic":
        return fault.rank
    dead = {f.rank for f in faults[: faults.index(fault)] if f.kind in (*DEADLY, *ERRORS)}
    return fault.rank - sum(rank < fault.rank for rank in dead)


def _differing(reports: Reports) -> str:
    """Where ranks have not the same result, or not the same idea of who died when."""
    results = defaultdict(set)
    for entries in reports.values():
        for entry in entries:
            if entry["what"] == "call":
                results[entry["call"]].add(str(entry["seen"]))
    differing = [call for call, found in results.items() if len(found) > 1]
    return f"results differ between ranks in call {differing[0]}" if differing else ""


def seconds(faults: list[dict[str, Any]], outcome: str, reports: Reports, ended: float) -> float:
    """From the last fault until the job has ended, or all that live have ended a call."""
    begin = max(entry["time"] for entry in faults)
    if outcome == ENDS:
        return ended - begin
    next_ones = []
    for entries in reports.values():
        later = [e["time"] for e in entries if e["time"] > begin and e["what"] != "fault"]
        next_ones += later[:1]
    return max(next_ones, default=ended) - begin
