"""`python -m tf_adasum bench`: how long an allreduce takes on this cluster, and what to choose.

Runs under mpirun, on NumPy arrays, without TensorFlow. A *cell* is a number of bytes, an algorithm
and a fusion threshold. Rank 0 decides which cell comes next and how often, by its clock alone, and
broadcasts that before each visit: so all ranks do the same, and stop together. The time of a call
is that of its slowest rank, after a barrier; shown are medians over all calls of a cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tf_adasum import core, launch, native
from tf_adasum.arrays import Tensors
from tf_adasum.reductions import reduce_options
from tf_adasum.tables import format_table, geometric_mean, number, size_name

TENSORS = 64
SIZES = tuple(4096 << (2 * power) for power in range(8))
"""Bytes of all tensors together: 4 KiB to 64 MiB."""
THRESHOLDS = tuple(1 << power for power in range(20, 27))
"""Bytes: 1 MiB to 64 MiB."""

_THRESHOLD_SHARE = 0.3
"""Of the time, for fusion thresholds."""
_VISIT_SECONDS = 0.02
_MOST_CALLS = 50
"""In one visit of a cell, so that what disturbs for a moment is spread over all cells."""

_BETTER = 0.95
"""What is worth a change takes less than so much of the time of what is there."""
_LEAST_CALLS = 5
"""Of a cell, so that advice rests on it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured: Adasum by an algorithm, or the plain sum for `"sum"`."""

    bytes: int
    contender: str
    threshold: int | None = None
    """Bytes of the fusion buffer; None: what the environment says, or the default."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """The median and the quartiles of a cell's calls, in seconds."""

    median: float
    quartiles: tuple[float, float]
    calls: int


Figures = dict[Cell, Figure]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum bench",
        description="Measures the allreduce of 64 float32 tensors on this cluster, by size, "
        "algorithm and fusion threshold, and says what to choose. To be started by mpirun.",
    )
    parser.add_argument("--seconds", type=_seconds, default=20.0, help="how long (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: {options.json.absolute().parent} is no folder")

    if core.size() == 1:
        try:
            mpirun = " ".join(launch.mpirun_command(4))
        except FileNotFoundError:
            mpirun = "mpirun -np 4"
        print(
            "There is one rank, so nothing is to be reduced. Start it as your training is, for "
            f"example: {mpirun} {sys.executable} -m tf_adasum bench",
            file=sys.stderr,
        )
        return 2
    is_first, hosts = core.rank() == 0, number_of_hosts()
    if is_first:
        print(f"{_where(hosts)}. {options.seconds:g} s ...", flush=True)
    sizes, thresholds = measure(options.seconds, hosts)
    if is_first:
        advised = advice(sizes, thresholds, hosts)
        print(report(sizes, thresholds, advised), flush=True)
        if options.json is not None:
            content = as_json(sizes, thresholds, advised, options.seconds, hosts)
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0. Received: {text}")
    return value


def _where(hosts: int) -> str:
    library = native.core_library()
    mpi = library.adasum_mpi_running().decode().split(",")[0]
    ranks = f"{core.size()} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return f"{ranks}, {mpi}, {library.adasum_simd().decode()}"


def number_of_hosts() -> int:
    """As rank 0 sees it: where hosts have different numbers of ranks, others see fewer."""
    return int(core.broadcast(np.array([core.cross_size()]), 0, name="bench")[0])


def contenders(hosts: int) -> list[str]:
    """What is compared; within one host there is nothing for `hierarchical` to leave out."""
    return ["rvh", "ring", *(["hierarchical"] if hosts > 1 else []), "sum"]


def measure(seconds: float, hosts: int) -> tuple[Figures, Figures]:
    """Figures by size and contender, and by fusion threshold for the largest size that was reached.

    Called by all ranks, which get the same figures.
    """
    calls = Calls()
    start = time.monotonic()
    until = start + (1 - _THRESHOLD_SHARE) * seconds
    table = [Cell(size, name) for size in SIZES for name in contenders(hosts)]
    by_size = Measurement(table, calls, until).run()
    largest = max((cell.bytes for cell in by_size), default=SIZES[0])
    # Another number of bytes is another fusion only where it makes another number of buckets.
    different = [None, *(threshold for threshold in THRESHOLDS if threshold <= largest)]
    table = [Cell(largest, "rvh", threshold) for threshold in different]
    return by_size, Measurement(table, calls, start + seconds).run()


class Calls:
    """Makes the calls of cells, with tensors that are made once for each size."""

    def __init__(self) -> None:
        self._bytes = -1

    def seconds(self, cell: Cell) -> float:
        """How long this rank's call took."""
        self._prepare(cell.bytes)
        is_sum = cell.contender == "sum"
        options = reduce_options(
            core.Sum if is_sum else core.Adasum,
            "bench",
            "rvh" if is_sum else cell.contender,
            cell.threshold,
        )
        core.barrier()
        start = time.perf_counter()
        core.reduce_into(self._results, self._inputs, options)
        return time.perf_counter() - start

    def _prepare(self, size: int) -> None:
        if size == self._bytes:
            return
        random = np.random.default_rng(core.rank())
        elements = size // TENSORS // 4
        arrays = [random.random(elements, np.float32) for _ in range(TENSORS)]
        self._inputs, self._bytes = Tensors(arrays), size
        self._results = self._inputs.empty_like()
        for result in self._results.arrays:
            result.fill(0)  # so that its pages have memory


class Measurement:
    """Visits cells in turns until the time is over, on all ranks alike."""

    _STOP = -1

    def __init__(
        self,
        cells: Sequence[Cell],
        calls: Calls,
        until: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._cells, self._calls, self._until, self._clock = cells, calls, until, clock
        self._times: dict[Cell, list[float]] = {}

    def run(self) -> Figures:
        """All that was measured; cells that the time did not suffice for are missing."""
        turn = 0
        while True:
            index, number_of_calls = self._told_by_rank_0(turn)
            if index == self._STOP:
                break
            cell = self._cells[index]
            times = self._times.setdefault(cell, [])
            times += [self._calls.seconds(cell) for _ in range(number_of_calls)]
            turn = index + 1
        return self._figures()

    def _told_by_rank_0(self, turn: int) -> tuple[int, int]:
        plan = self.next(turn) if core.rank() == 0 else (0, 0)
        told = core.broadcast(np.array(plan, np.int64), 0, name="bench")
        return int(told[0]), int(told[1])

    def next(self, turn: int) -> tuple[int, int]:
        """The next cell's index, from `turn` on, and how often; _STOP if none ends in time."""
        left = self._until - self._clock()
        count = len(self._cells)
        for index in ((turn + step) % count for step in range(count)):
            cell = self._cells[index]
            expected = self._expected(cell)
            if expected < left:
                often = int(min(_VISIT_SECONDS, left) / expected) if expected > 0 else 1
                # A first visit is two calls: the first of them warms up.
                return index, max(1 if cell in self._times else 2, min(often, _MOST_CALLS))
        return self._STOP, 0

    def _expected(self, cell: Cell) -> float:
        """Seconds that a visit takes at least: a call, or, before there was one, two as long as
        those of the largest size so far would be for so many bytes, and making the tensors."""
        if cell in self._times:
            return statistics.median(self._times[cell])
        seen = [(known.bytes, max(times)) for known, times in self._times.items()]
        if not seen:
            return 0.0
        size, seconds = max(seen)
        return 3 * seconds * cell.bytes / size

    def _figures(self) -> Figures:
        figures = {}
        for cell, mine in self._times.items():
            # Of two calls or more the first one has warmed up.
            own = np.array(mine[1:] or mine)
            slowest = core.allgather(own[np.newaxis], name="bench").max(axis=0)
            lower, median, upper = np.quantile(slowest, [0.25, 0.5, 0.75])
            figures[cell] = Figure(float(median), (float(lower), float(upper)), len(slowest))
        return figures


def advice(sizes: Figures, thresholds: Figures, hosts: int) -> list[str]:
    """Sentences on what to choose, as far as the figures say."""
    sizes = {cell: figure for cell, figure in sizes.items() if figure.calls >= _LEAST_CALLS}
    largest = max((cell.bytes for cell in sizes if cell.contender == "rvh"), default=None)
    if largest is None:
        return ["There was too little time for advice: give it more with --seconds."]
    ratio = geometric_mean(pair.ratio for pair in _pairs(sizes, "rvh", "sum"))
    advised = [_on_algorithm(sizes, hosts)]
    if not math.isnan(ratio):
        advised.append(f"Adasum takes {ratio:.2f} of the time of a plain sum.")
    advised.append(_on_threshold(thresholds))
    seconds = sizes[Cell(largest, "rvh")].median
    advised.append(
        f"Local steps: a sync of {size_name(largest)} of weights takes about "
        f"{number(1e3 * seconds)} ms, and more in proportion. It is 1% of a training's time where "
        f"local_steps times the seconds of a step are {number(99 * seconds)}."
    )
    return advised


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A contender's figure beside another's, for the same bytes."""

    bytes: int
    figure: Figure
    other: Figure

    @property
    def ratio(self) -> float:
        return self.figure.median / self.other.median

    @property
    def is_clearly_faster(self) -> bool:
        """By more than calls differ among themselves: what may be noise is no reason to change."""
        return self.ratio < _BETTER and self.figure.quartiles[1] < self.other.quartiles[0]


def _pairs(sizes: Figures, name: str, other: str) -> list[_Pair]:
    """For all sizes that have both."""
    return [
        _Pair(cell.bytes, figure, sizes[beside])
        for cell, figure in sizes.items()
        if cell.contender == name
        and (beside := dataclasses.replace(cell, contender=other)) in sizes
    ]


_MEANING = {
    "ring": "it combines one rank after the other, so results are others than those of the tree "
    "(the paper's section 4.2.3)",
    "hierarchical": "it takes the mean of each host's ranks first, so Adasum combines {hosts} "
    "hosts instead of all ranks",
}


def _on_algorithm(sizes: Figures, hosts: int) -> str:
    """Of those that are clearly faster at half of the sizes, the fastest."""
    faster = {}
    for name in _MEANING:
        pairs = _pairs(sizes, name, "rvh")
        if pairs and 2 * sum(pair.is_clearly_faster for pair in pairs) >= len(pairs):
            faster[name] = geometric_mean(pair.ratio for pair in pairs)
    if not faster:
        return 'Algorithm: keep "rvh", the default; no other is clearly faster here.'
    name = min(faster, key=faster.__getitem__)
    return (
        f'Algorithm: "{name}" takes {faster[name]:.2f} of the time of "rvh"; '
        f'{_MEANING[name].format(hosts=hosts)}. To choose it: algorithm="{name}", or '
        f"TF_ADASUM_ALGORITHM={name} on all ranks."
    )


def _on_threshold(thresholds: Figures) -> str:
    known = {cell: figure for cell, figure in thresholds.items() if figure.calls >= _LEAST_CALLS}
    now = next((figure for cell, figure in known.items() if cell.threshold is None), None)
    others = [(cell, figure) for cell, figure in known.items() if cell.threshold is not None]
    if now is None or not others:
        return "Fusion threshold: there was too little time to compare any."
    cell, figure = min(others, key=lambda item: item[1].median)
    pair = _Pair(cell.bytes, figure, now)
    if not pair.is_clearly_faster:
        return "Fusion threshold: keep what is set now; no other is clearly faster here."
    return (
        f"Fusion threshold: {size_name(cell.threshold)} takes {pair.ratio:.2f} of the time of what "
        f"is set now, for {size_name(cell.bytes)}. To choose it: "
        f"TF_ADASUM_FUSION_THRESHOLD={cell.threshold} on all ranks."
    )


def report(sizes: Figures, thresholds: Figures, advised: Sequence[str]) -> str:
    """The two tables, and the advice below them."""
    names = list(dict.fromkeys(cell.contender for cell in sizes))
    rows = []
    for size in dict.fromkeys(cell.bytes for cell in sizes):
        figures = [sizes.get(Cell(size, name)) for name in names]
        rows.append([size_name(size), *(_milliseconds(figure) for figure in figures)])
    texts = [format_table([f"{TENSORS} tensors, milliseconds", *names], rows)]
    if thresholds:
        rows = [
            ["set now" if cell.threshold is None else size_name(cell.threshold), _milliseconds(f)]
            for cell, f in thresholds.items()
        ]
        size = size_name(next(iter(thresholds)).bytes)
        texts.append(format_table([f"fusion threshold, for {size}", "rvh"], rows))
    return "\n" + "\n\n".join([*texts, "\n".join(advised)])


def _milliseconds(figure: Figure | None) -> str:
    return number(None if figure is None else 1e3 * figure.median)


def as_json(
    sizes: Figures, thresholds: Figures, advised: Sequence[str], seconds: float, hosts: int
) -> dict[str, Any]:
    """All figures, in seconds and bytes, and where they come from."""
    library = native.core_library()
    return {
        "tf_adasum": native.build_info()["version"],
        "mpi": library.adasum_mpi_running().decode(),
        "instruction_set": library.adasum_simd().decode(),
        "ranks": core.size(),
        "hosts": hosts,
        "time_limit_seconds": seconds,
        "tensors": TENSORS,
        "sizes": _rows(sizes),
        "thresholds": _rows(thresholds),
        "advice": list(advised),
    }


def _rows(figures: Figures) -> list[dict[str, Any]]:
    return [
        {**dataclasses.asdict(cell), **dataclasses.asdict(figure)}
        for cell, figure in figures.items()
    ]
