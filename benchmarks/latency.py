"""Latencies of allreduce by number of ranks and bytes: how they are measured and shown.

The paper's Figure 4 is one use, two_hosts.py another. A *point* is what allreduce.cc prints, a
number of ranks and of bytes with the median seconds of each contender; points of several jobs with
the same two numbers are merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import report

from tf_adasum import native

SMALL = 64 << 10
"""Bytes below which the latency of messages counts, and no longer their size."""

ALGORITHMS = ("rvh", "ring", "hierarchical")


@dataclasses.dataclass
class Point:
    """Medians and quartiles in seconds, by contender."""

    ranks: int
    bytes: int
    seconds: dict[str, float]
    quartiles: dict[str, list[float]]
    rounds: dict[str, int]

    @property
    def best_mpi(self) -> str | None:
        """The fastest of the MPI library's algorithms, its default among them."""
        theirs = [name for name in self.seconds if name.split()[0] == "mpi"]
        return min(theirs, key=self.seconds.__getitem__, default=None)

    def ratio(self, ours: str, to: str | None) -> float | None:
        """How many times longer `ours` takes than `to`; None where one was not measured."""
        if to is None or ours not in self.seconds or to not in self.seconds:
            return None
        return self.seconds[ours] / self.seconds[to]


class Points:
    """All points of a run, in order of ranks and bytes."""

    def __init__(self, points: Iterable[Point] = ()):
        self._points = {(point.ranks, point.bytes): point for point in points}

    def add(self, result: dict[str, Any], variant: str | None = None) -> None:
        """Merges a line of allreduce.cc; of a job for one of `mpi_variants` MPI's time alone."""
        key = result["ranks"], result["bytes"]
        point = self._points.setdefault(key, Point(*key, {}, {}, {}))
        for contender, figures in result["seconds"].items():
            if variant is not None and contender != "mpi":
                continue
            name = contender if variant is None else f"mpi {variant}"
            point.seconds[name] = figures["median"]
            point.quartiles[name] = figures["quartiles"]
            point.rounds[name] = result["rounds"]

    def __iter__(self):
        return iter(sorted(self._points.values(), key=lambda point: (point.ranks, point.bytes)))

    def of(self, ranks: int) -> list[Point]:
        return [point for point in self if point.ranks == ranks]

    @property
    def ranks(self) -> list[int]:
        return sorted({ranks for ranks, _ in self._points})

    @property
    def bytes(self) -> list[int]:
        return sorted({size for _, size in self._points})

    def as_json(self) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(point), "best_mpi": point.best_mpi} for point in self]


def mpi_variants(hosts: int = 1, quick: bool = False) -> dict[str, dict[str, str]]:
    """Names of the running MPI's other ways of an allreduce, and the environment that chooses each.

    Open MPI's fixed rules pick one of the numbered algorithms of its component `tuned` by size and
    number of ranks; other components can be given precedence. On several hosts `han` has it, unless
    it is told not to.
    """
    if native.core_library().adasum_mpi_running().decode().startswith("Open MPI"):
        tuned = {1: "linear", 2: "reduce and broadcast", 3: "recursive doubling", 4: "ring"}
        tuned |= {5: "segmented ring", 6: "Rabenseifner", 7: "allgather and reduce"}
        without_han = {"OMPI_MCA_coll_han_priority": "0"}
        variants = {
            name: {
                **without_han,
                "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
                "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
            }
            for number, name in tuned.items()
            if not quick or number in (3, 4, 6)
        }
        if hosts > 1:
            variants["component tuned"] = without_han
        components = ["sm"] if hosts == 1 else []
        components += [] if quick else ["adapt", "basic", "han"]
        return variants | {
            f"component {name}": {f"OMPI_MCA_coll_{name}_priority": "95"} for name in components
        }
    names = ["recursive_doubling", "reduce_scatter_allgather"]
    if not quick:
        names += ["recursive_multiplying", "k_reduce_scatter_allgather", "ring", "tree", "smp"]
    by_message = {
        name.replace("_", " "): {
            "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0",
            "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name,
        }
        for name in names
    }
    return by_message | {
        "release gather": {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"}
    }


@dataclasses.dataclass(frozen=True)
class Mean:
    """The geometric mean of ratios below 64 KiB and from there on; NaN where there is no size."""

    small: float
    large: float


def mean_ratio(points: Iterable[Point], ours: str, to: Callable[[Point], str | None]) -> Mean:
    """The means over all points that have both."""
    ratios = [(point.bytes, point.ratio(ours, to(point))) for point in points]
    known = [(size, ratio) for size, ratio in ratios if ratio is not None]
    return Mean(
        report.geometric_mean(ratio for size, ratio in known if size < SMALL),
        report.geometric_mean(ratio for size, ratio in known if size >= SMALL),
    )


def time_table(points: Sequence[Point], contenders: Sequence[str]) -> str:
    """Milliseconds of points with the same number of ranks."""
    shown = [name for name in contenders if any(name in point.seconds for point in points)]
    rows = []
    for point in points:
        best = point.best_mpi
        row = [report.size_name(point.bytes)]
        row += [report.number(1e3 * point.seconds.get(name, float("nan"))) for name in shown]
        if best is not None:
            row += [report.number(1e3 * point.seconds[best]), best]
        rows.append(row)
    best_headings = ["best mpi", "which is"] if points and points[0].best_mpi else []
    return report.format_table(["milliseconds", *shown, *best_headings], rows)


def ratio_table(points: Points, ours: str, to: Callable[[Point], str | None], title: str) -> str:
    """Ratios by bytes and ranks, and below them the geometric means of each number of ranks."""
    columns = [points.of(ranks) for ranks in points.ranks]

    def cell(column: Sequence[Point], size: int) -> str:
        ratios = [point.ratio(ours, to(point)) for point in column if point.bytes == size]
        return f"{ratios[0]:.2f}" if ratios and ratios[0] is not None else "-"

    rows = [
        [report.size_name(size), *(cell(column, size) for column in columns)]
        for size in points.bytes
    ]
    means = [mean_ratio(column, ours, to) for column in columns]
    rows.append(["mean below 64 KiB", *(_ratio(mean.small) for mean in means)])
    rows.append(["mean from 64 KiB on", *(_ratio(mean.large) for mean in means)])
    return report.format_table([title, *(f"np={ranks}" for ranks in points.ranks)], rows)


def _ratio(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"
