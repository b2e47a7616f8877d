"""What each rank of a job with faults runs: some collectives of all kinds, each result held against
`tf_adasum.reference` over the ranks that were alive at that call.

Each rank writes what it saw into a file of its own, a JSON object a line, so that nothing is lost
when it dies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import injector
import numpy as np
from cases import DTYPES, allowed_error, assert_close, expected
from injector import Fault, Injector
from syncs import broadcast_in_place, sync

from tf_adasum import core

VARIABLE = "TF_ADASUM_TEST_JOB"

# After these the ranks go on, since the call could not begin.
REFUSED = ("shape", "dtype", "other")


@dataclasses.dataclass(frozen=True)
class Job:
    """The same on all ranks."""

    folder: str
    ranks: int
    seed: int = 0
    calls: int = 8
    kind: str = "mixed"
    """"mixed", or one of KINDS for all calls."""
    size: str = "mixed"
    """"mixed", or one of SIZES for all calls."""
    elastic: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective, and the seed of its data. Ranks are named by their first numbers."""

    kind: str
    op: str
    algorithm: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    threshold: int | None
    root: int
    seed: int

    def inputs(self, rank: int, wrong: str = "") -> list[np.ndarray]:
        """What the rank brings."""
        arrays = self._arrays(rank)
        if self.kind == "allgather":
            arrays = [np.repeat(array[np.newaxis], 1 + rank % 3, axis=0) for array in arrays]
        if wrong == "nan":
            arrays[0].reshape(-1)[0] = np.nan
        return [self._spoiled(array, wrong) for array in arrays]

    def starts(self, wrong: str = "") -> list[np.ndarray]:
        """The weights that all ranks start a sync from."""
        return [self._spoiled(array, wrong) for array in self._arrays(10_000)]

    def _arrays(self, number: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, number])
        # An array is had of a scalar, too.
        return [np.asarray(rng.normal(size=s), dtype=DTYPES[self.dtype]) for s in self.shapes]

    def _spoiled(self, array: np.ndarray, wrong: str) -> np.ndarray:
        if wrong == "shape":
            return np.stack([array, array], axis=-1)
        if wrong == "dtype":
            return array.astype(np.float32 if self.dtype == "float64" else np.float64)
        return array


KINDS = ("allreduce", "sync", "allgather", "broadcast", "barrier")
SIZES = {
    "8 bytes": ((1,),),
    "small": ((3,), (64, 9), (), (500,)),
    "large": ((200_000,), (333, 77), (64,), (300_000,)),
}


def make_calls(job: Job) -> list[Call]:
    rng = np.random.default_rng([job.seed, 1])
    calls = []
    for i in range(job.calls):
        kind = str(rng.choice(KINDS, p=[0.45, 0.2, 0.12, 0.12, 0.11]))
        size = str(rng.choice(list(SIZES), p=[0.25, 0.4, 0.35]))
        kind = kind if job.kind == "mixed" else job.kind
        shapes = SIZES[size if job.size == "mixed" else job.size]
        calls.append(
            Call(
                kind=kind,
                op=str(rng.choice(["adasum", "sum", "average"], p=[0.6, 0.2, 0.2])),
                algorithm=str(rng.choice(["rvh", "rvh", "ring", "hierarchical"])),
                dtype=str(rng.choice(["float32", "float64"])),
                shapes=shapes[:1] if kind == "allgather" else shapes,
                threshold=(None, 4096, 400_000)[rng.integers(3)],
                root=int(rng.integers(job.ranks)),
                seed=int(rng.integers(1 << 30)) + i,
            )
        )
    return calls


class Members:
    """The ranks that live, by their first numbers, as this one, `own`, is told."""

    def __init__(self, job: Job, own: int):
        self.ranks = list(range(job.ranks))
        self._own = own
        self._seen = 0

    def update(self) -> None:
        for shrinking in core.shrinkings()[self._seen :]:
            place = self.ranks.index(self._own)
            assert (shrinking.old_rank, shrinking.old_size) == (place, len(self.ranks))
            self.ranks = [r for i, r in enumerate(self.ranks) if i not in shrinking.lost]
            place = self.ranks.index(self._own)
            assert (shrinking.new_rank, shrinking.new_size) == (place, len(self.ranks))
            self._seen += 1
        assert (core.rank(), core.size()) == (self.ranks.index(self._own), len(self.ranks))


class Rank:
    """One rank's way through a job."""

    def __init__(self, job: Job, faults: list[Fault]):
        self.own = int(os.environ["OMPI_COMM_WORLD_RANK"])
        self.job = job
        self._file = Path(job.folder, f"{self.own}.json")
        own_faults = [fault for fault in faults if fault.rank == self.own]
        self.injector = Injector(own_faults, lambda fault: self.write("fault", fault=str(fault)))
        self.calls = make_calls(job)
        self.mistakes = injector.mistakes(faults, [call.kind != "barrier" for call in self.calls])
        self.members = Members(job, self.own)

    def write(self, what: str, **more: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")

    def run(self) -> None:
        self.injector.start()
        core.init()
        if self.job.elastic:
            core.go_on_without_the_dead()
        self.injector.install()
        self.write("start")
        for i in range(len(self.calls)):
            with self.injector.around(i):
                self.call(i)
        self.injector.cancel()
        with self.injector.around(len(self.calls)):
            core.shutdown()
        self.write("end")

    def call(self, i: int) -> None:
        call, mistake = self.calls[i], self.mistakes.get(i)
        wrong = mistake.kind if mistake is not None and mistake.rank == self.own else ""
        if wrong:
            self.write("fault", fault=str(mistake))
        if wrong == "skip":
            return
        before = self.members.ranks
        try:
            if wrong == "extra":
                core.barrier("extra")
            results, syncs = self.make(call, f"call {i}", wrong)
        except core.DisagreementError as error:
            self.write("disagreement", call=i, text=str(error))
            if mistake is None or mistake.kind not in REFUSED:
                raise
            return
        self.members.update()
        alive = self.members.ranks
        assert syncs == 1 or alive != before, "nothing was reduced, but all live"
        nan = mistake.rank if mistake is not None and mistake.kind == "nan" else None
        check(call, results, syncs, before, alive, nan)
        seen = {"members": alive, "lost": [each.lost for each in core.shrinkings()], "syncs": syncs}
        digest = hashlib.sha1(b"".join(result.tobytes() for result in results)).hexdigest()
        self.write("call", call=i, kind=call.kind, seen={**seen, "digest": digest})

    def make(self, call: Call, name: str, wrong: str) -> tuple[list[np.ndarray], int]:
        """Its results, and for a sync the number of reductions, otherwise 1."""
        if wrong == "other":
            core.allgather(np.zeros(1), name) if call.kind == "barrier" else core.barrier(name)
        own = call.inputs(self.own, wrong)
        if call.kind == "barrier":
            core.barrier(name)
            return [], 1
        if call.kind == "allgather":
            return [core.allgather(own[0], name)], 1
        if call.kind == "broadcast":
            root = self.members.ranks.index(root_of(call, self.members.ranks))
            broadcast_in_place(own, root, name)
            return own, 1
        if call.kind == "sync":
            starts = call.starts(wrong)
            # The sum of arrays without dimensions is none itself.
            values = [np.asarray(s + x) for s, x in zip(starts, own, strict=True)]
            options = {"name": name, "fusion_threshold": call.threshold, "with_starts": True}
            done = sync(values, starts, call.algorithm, **options)
            for value, start in zip(values, starts, strict=True):
                assert value.tobytes() == start.tobytes(), "values and starts differ"
            return values, done.syncs
        options = {"algorithm": call.algorithm, "fusion_threshold": call.threshold}
        return core.grouped_allreduce(own, call.op, name, **options), 1


def root_of(call: Call, before: list[int], alive: list[int] | None = None) -> int:
    """The call's root or, if that is dead, the next one after it, or the first.

    before, alive: the ranks when the call began and when it ended.
    """
    root = call.root if call.root in before else before[0]
    alive = before if alive is None else alive
    return next((rank for rank in alive if rank >= root), alive[0])


def check(
    call: Call,
    results: list[np.ndarray],
    syncs: int,
    before: list[int],
    alive: list[int],
    nan: int | None,
) -> None:
    """Raises AssertionError where the results are not those of the reference.

    nan: the rank that brought one, if any.
    """
    inputs = [call.inputs(rank, "nan" if rank == nan else "") for rank in alive]
    if call.kind == "allgather":
        np.testing.assert_array_equal(results[0], np.concatenate([own[0] for own in inputs]))
    elif call.kind == "broadcast":
        root = alive.index(root_of(call, before, alive))
        for result, want in zip(results, inputs[root], strict=True):
            np.testing.assert_array_equal(result, want)
    elif call.kind == "allreduce":
        _check_reduced(call, call.op, results, inputs)
    elif call.kind == "sync" and syncs == 0:  # all went back
        for result, start in zip(results, call.starts(), strict=True):
            np.testing.assert_array_equal(result, start)
    elif call.kind == "sync":
        # A change that is not finite counts as zero.
        starts = call.starts()
        deltas = [
            [0 * s if rank == nan else (s + x) - s for s, x in zip(starts, own, strict=True)]
            for rank, own in zip(alive, inputs, strict=True)
        ]
        changes = [result - start for result, start in zip(results, starts, strict=True)]
        largest = max(np.linalg.norm(start.ravel()) for start in starts)
        slack = 4 * float(largest + 1) * float(np.finfo(DTYPES[call.dtype]).eps)
        _check_reduced(call, "adasum", changes, deltas, slack)


def _check_reduced(
    call: Call,
    op: str,
    results: list[np.ndarray],
    inputs: list[list[np.ndarray]],
    slack: float = 0.0,
) -> None:
    with np.errstate(invalid="ignore"):
        wants = expected(inputs, op, call.algorithm)
    for t, want in enumerate(wants):
        what = f"tensor {t} of {call}"
        np.testing.assert_array_equal(np.isnan(results[t]), np.isnan(want), what)
        want = np.nan_to_num(want)
        of_t = [np.nan_to_num(own[t]) for own in inputs]
        largest = np.linalg.norm(np.sum(np.abs(np.asarray(of_t, float)), axis=0).ravel())
        allowed = allowed_error(want, of_t, DTYPES[call.dtype], len(inputs), largest)
        assert_close(np.nan_to_num(results[t]), want, allowed + slack, what)


if __name__ == "__main__":
    Rank(
        Job(**json.loads(os.environ[VARIABLE])),
        injector.parse(os.environ.get(injector.VARIABLE, "")),
    ).run()
