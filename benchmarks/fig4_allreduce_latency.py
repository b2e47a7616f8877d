"""Figure 4 of the paper: the latency of Adasum's allreduce beside that of a plain sum.

Sixty-four float32 tensors of equal size, 4 KiB to 256 MiB together, are reduced over 2, 3, 4 and 8
ranks of this machine. Contenders take turns in one process, one operation each after a barrier:

    rvh, ring, hierarchical   Adasum of 64 tensors that lie apart in memory
    mpi                       MPI_Allreduce(SUM) of one contiguous buffer of as many bytes
    mpi_in_place              the same in place, which saves a copy, as Horovod has it from its
                              fusion buffer; it loses the ranks' own values
    memcpy                    a copy of as many bytes within each rank

The time of an operation is that of its slowest rank; shown is the median over the rounds. Further
jobs run MPI_Allreduce with each of the algorithms that the MPI library lets one choose, in turns
with Adasum as before, since it is up to a third faster when it finds its data in the cache; "best
mpi" is the fastest of all for that size, whatever the library would have picked. One more job for
each number of ranks goes through TensorFlow: tf_adasum.grouped_allreduce beside Horovod's, where
that can be imported (--horovod-python names the interpreter of an environment that has it).

The paper: 16 nodes of 4 V100, 64 tensors on each GPU, NCCL's sum against AdasumRVH; the latencies
are about equal, and a ring (linear) Adasum was slower.

More ranks than cores take turns on them, and the ranks of one machine share its memory's bandwidth.

Takes 15 to 20 minutes on 2 cores, with --quick 1 to 2. Run `make build` before.

    python benchmarks/fig4_allreduce_latency.py
    python benchmarks/fig4_allreduce_latency.py --np 2,4 --sizes 12,16,20 --seconds 1
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import latency
import report
from latency import Point, Points

from tf_adasum import launch

BESIDE = ["mpi", "mpi_in_place", "memcpy"]
IN_TENSORFLOW = ["tf adasum", "tf sum", "horovod adasum", "horovod sum", "horovod average"]
ROOT = Path(__file__).resolve().parent.parent
TENSORFLOW_WORKER = Path(__file__).with_name("fig4_tensorflow.py")


@dataclasses.dataclass(frozen=True)
class Job:
    """One start of mpirun: what it runs, and which of the MPI's variants it is for."""

    label: str
    command: list[str]
    environ: dict[str, str]
    variant: str | None = None


def plan(options: argparse.Namespace, worker: Path) -> list[Job]:
    """The jobs in the order in which they run."""
    sizes = ",".join(str(1 << power) for power in options.sizes)
    planned = []
    for ranks in options.np:
        mpirun = launch.mpirun_command(ranks)
        given = ["--bytes", sizes, "--seconds"]
        in_core = [*mpirun, str(worker), *given, str(options.seconds), "--contenders"]
        chosen = [*options.algorithms, *BESIDE]
        planned.append(Job(f"np={ranks}", [*in_core, ",".join(chosen)], {}))
        if options.tensorflow:
            program = [str(options.horovod_python), str(TENSORFLOW_WORKER)]
            command = [*mpirun, *program, *given, str(options.seconds)]
            # Horovod's environment need not have this package installed.
            found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            environ = {"HOROVOD_CYCLE_TIME": "0.1", "PYTHONPATH": found}
            planned.append(Job(f"np={ranks} TensorFlow", command, environ))
        short = [*mpirun, str(worker), *given, str(options.seconds / 10), "--least-rounds", "3"]
        for name, environ in latency.mpi_variants(quick=options.quick).items():
            command = [*short, "--contenders", f"mpi,{options.algorithms[0]}"]
            planned.append(Job(f"np={ranks} mpi {name}", command, environ, name))
    return planned


def default_mpi(point: Point) -> str:
    return "mpi"


def best_mpi(point: Point) -> str | None:
    return point.best_mpi


def horovod(name: str) -> Any:
    return lambda point: f"horovod {name}"


def comparisons(algorithms: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Which ratios are shown: whose time, its title, and by whose it is divided."""
    shown = []
    for name in algorithms:
        shown.append((name, f"{name} / mpi", default_mpi))
        shown.append((name, f"{name} / best mpi", best_mpi))
    shown.append(("tf adasum", "tf adasum / horovod adasum", horovod("adasum")))
    shown.append(("tf adasum", "tf adasum / horovod sum", horovod("sum")))
    return shown


def tables(points: Points, algorithms: Sequence[str]) -> str:
    """All that is printed of the figures."""
    texts = []
    for ranks in points.ranks:
        of_ranks = points.of(ranks)
        texts.append(f"np={ranks}\n{latency.time_table(of_ranks, [*algorithms, *BESIDE])}")
        if any(name in point.seconds for point in of_ranks for name in IN_TENSORFLOW):
            bare = [dataclasses.replace(p, seconds=_only(p.seconds)) for p in of_ranks]
            texts.append(f"np={ranks}, TensorFlow\n{latency.time_table(bare, IN_TENSORFLOW)}")
    for ours, title, to in comparisons(algorithms):
        if any(point.ratio(ours, to(point)) is not None for point in points):
            texts.append(latency.ratio_table(points, ours, to, title))
    return "\n\n".join(texts)


def _only(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if name in IN_TENSORFLOW}


def means(points: Points, algorithms: Sequence[str]) -> dict[str, Any]:
    """The geometric means over all numbers of ranks, for the JSON file."""
    return {
        title: dataclasses.asdict(latency.mean_ratio(points, ours, to))
        for ours, title, to in comparisons(algorithms)
    }


def plot(points: Points, path: Path) -> None:
    """The paper's Figure 4, once for each number of ranks."""
    from matplotlib.figure import Figure

    styles = {
        "memcpy": ("#999999", ":", "memory copy"),
        "mpi": ("#000000", "-", "MPI sum"),
        "mpi_in_place": ("#666666", "-.", "MPI sum in place"),
        "best mpi": ("#000000", "--", "MPI sum, its best algorithm"),
        "rvh": ("#D55E00", "-", "Adasum RVH"),
        "ring": ("#CC79A7", "-", "Adasum ring"),
        "hierarchical": ("#E69F00", "-.", "Adasum hierarchical"),
        "tf adasum": ("#0072B2", "-", "Adasum RVH through TensorFlow"),
        "horovod sum": ("#009E73", "--", "Horovod sum"),
        "horovod adasum": ("#009E73", "-", "Horovod Adasum"),
    }
    columns = min(len(points.ranks), 2)
    rows = -(-len(points.ranks) // columns)
    figure = Figure(figsize=(6 * columns, 4.2 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flat
    handles: dict[str, Any] = {}
    for axes, ranks in zip(all_axes, points.ranks, strict=False):
        for name, (color, line, label) in styles.items():
            known = [(p.bytes, _seconds(p, name)) for p in points.of(ranks)]
            known = [(size, 1e3 * seconds) for size, seconds in known if seconds is not None]
            if known:
                handles[label] = axes.loglog(
                    *zip(*known, strict=True), color=color, linestyle=line, marker="."
                )[0]
        axes.set_xscale("log", base=2)
        axes.set(title=f"{ranks} ranks", xlabel="bytes in 64 tensors", ylabel="milliseconds")
        axes.grid(alpha=0.3)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, dpi=120)


def _seconds(point: Point, name: str) -> float | None:
    name = (point.best_mpi or "") if name == "best mpi" else name
    return point.seconds.get(name)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--np", type=report.integers, help="numbers of ranks (2,3,4,8; quick: 2,4)")
    add("--sizes", type=report.integers, help="powers of two of the bytes (12,14,...,28)")
    add("--seconds", type=float, help="for each size of the main jobs, about (4; quick: 0.5)")
    add("--algorithms", type=lambda text: text.split(","), default=list(latency.ALGORITHMS))
    add("--horovod-python", default=sys.executable, metavar="PYTHON", help="it has Horovod")
    add("--no-tensorflow", dest="tensorflow", action="store_false", help="leave that job out")
    add("--time-limit", type=float, default=900, help="of each job, in seconds (900)")
    options = parser.parse_args(argv)
    options.np = options.np or ([2, 4] if options.quick else [2, 3, 4, 8])
    options.sizes = options.sizes or list(range(12, 25, 4) if options.quick else range(12, 29, 2))
    options.seconds = options.seconds or (0.5 if options.quick else 4)
    return options


def main() -> int:
    options = parse()
    started = time.monotonic()
    planned = plan(options, jobs.build("allreduce_benchmark"))
    print(report.describe(), flush=True)
    points, failures = Points(), {}
    progress = report.Progress(len(planned) * len(options.sizes))
    for job in planned:
        seen = 0

        def take(result: dict[str, Any], job: Job = job) -> None:
            nonlocal seen
            seen += 1
            points.add(result, job.variant)
            progress.advance(f"{job.label}, {report.size_name(result['bytes'])}")

        try:
            jobs.run(job.command, options.time_limit, take, job.environ)
        except jobs.JobError as error:
            failures[job.label] = str(error)
            progress.advance(f"{job.label} failed", len(options.sizes) - seen)
    progress.close()
    print(f"\n{tables(points, options.algorithms)}")
    for label, error in failures.items():
        print(f"\n{label} failed: {error}", file=sys.stderr)
    figures = {
        "tensors": 64,
        "seconds_taken": round(time.monotonic() - started),
        "geometric_means": means(points, options.algorithms),
        "failures": failures,
        "points": points.as_json(),
    }
    path = report.write("fig4_allreduce_latency", options.output, figures)
    plot(points, path.with_suffix(".png"))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
