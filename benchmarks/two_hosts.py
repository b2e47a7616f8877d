"""Two hosts and a slow link between them: allreduce latencies, and the paper's Table 2 in small.

The hosts are network namespaces of this machine, joined by virtual Ethernet on which each may send
--rate bits a second (2 Gbit/s; the paper: TCP over 40 Gbit/s between nodes of 4 V100). They have
its cores, memory and kernel in common, so it is the link that is slow here, not its latency: small
messages take about 20 microseconds, and the first 256 kB after a pause pass at once.

1. Latencies of Adasum's allreduce (RVH, hierarchical) beside MPI_Allreduce(SUM), with the MPI's
   default and each other algorithm that it offers, with 1 and 2 ranks on each host. See
   fig4_allreduce_latency.py for how the times are taken.
2. A network of 1.1 million weights learns 1408 images of handwritten digits with AdasumOptimizer,
   at 1 and 16 local steps, and with no communication at all: seconds per epoch, epochs until a test
   accuracy, and their product. The paper's Table 2 is ResNet-50 on ImageNet over 16 V100.

Needs root and iproute2, and Open MPI; exit code 2 where hosts cannot be made. The namespaces are
removed when the program ends, also by an error or Ctrl-C.

Takes 5 to 8 minutes on 2 cores, with --quick 1 to 2. Run `make build` before.

    sudo python benchmarks/two_hosts.py
    sudo python benchmarks/two_hosts.py --rate 10gbit --ranks-per-host 1 --only training
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jobs
import latency
import namespaces
import report
import runs
from fig4_allreduce_latency import best_mpi, default_mpi
from latency import Points

CONTENDERS = ["rvh", "hierarchical", "mpi"]
LOCAL_STEPS = [0, 1, 16]
TRAINING = Path(__file__).with_name("two_hosts_training.py")


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A column of the paper's Table 2. `epochs` is None where the accuracy was not reached."""

    local_steps: int
    seconds_per_epoch: float
    epochs: float | None

    @property
    def seconds_to_accuracy(self) -> float | None:
        return None if self.epochs is None else self.epochs * self.seconds_per_epoch


PAPER = [Efficiency(1, 2.58 * 60, 68), Efficiency(16, 1.98 * 60, 84)]
"""Table 2; its time to accuracy is the product, 175.44 and 166.32 minutes."""


def efficiency(training: dict[str, Any], target: float) -> Efficiency:
    """What came of a training, with the median over its epochs."""
    return Efficiency(
        training["local_steps"],
        statistics.median(training["epoch_seconds"]),
        runs.first_epoch(training["accuracy"], target),
    )


def table_2(columns: Sequence[Efficiency], unit: str = "s") -> str:
    """The paper's Table 2, in "s" or "min", with local steps 0 for ranks that go apart."""
    seconds = {"s": 1, "min": 60}[unit]
    slowest = {c.local_steps: c.seconds_per_epoch for c in columns}.get(1)
    rows = [
        [
            str(column.local_steps) if column.local_steps else "no communication",
            report.number(column.seconds_per_epoch / seconds),
            "-" if slowest is None else f"{column.seconds_per_epoch / slowest:.2f}",
            "-" if column.epochs is None else f"{column.epochs:.3g}",
            report.number(_divided(column.seconds_to_accuracy, seconds)),
        ]
        for column in columns
    ]
    headings = ["local steps", f"{unit}/epoch", "of that at 1", "epochs", f"{unit} to accuracy"]
    return report.format_table(headings, rows)


def _divided(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def measure_latencies(
    hosts: namespaces.Hosts, options: argparse.Namespace, progress: report.Progress
) -> Points:
    """Points of both numbers of ranks, the MPI's algorithms among the contenders."""
    worker = jobs.build("allreduce_benchmark")
    sizes = ",".join(str(1 << power) for power in options.sizes)
    points = Points()

    def take(result: dict[str, Any], variant: str | None = None) -> None:
        points.add(result, variant)
        name = variant or "all"
        progress.advance(f"np={result['ranks']} {name}, {report.size_name(result['bytes'])}")

    for ranks_per_host in options.ranks_per_host:
        start = [*hosts.mpirun_command(ranks_per_host), str(worker), "--bytes", sizes]
        together = ["--seconds", str(options.seconds), "--contenders", ",".join(options.contenders)]
        jobs.run([*start, *together], options.time_limit, take)
        in_turns = f"mpi,{options.contenders[0]}"
        short = ["--seconds", str(options.seconds / 5), "--contenders", in_turns]
        for name, environ in latency.mpi_variants(hosts=2, quick=options.quick).items():
            command = [*start, *short, "--least-rounds", "3"]
            on_result = functools.partial(take, variant=name)
            jobs.run(command, options.time_limit, on_result, environ)
    return points


def measure_training(
    hosts: namespaces.Hosts, options: argparse.Namespace, progress: report.Progress
) -> list[dict[str, Any]]:
    """For each training its number of ranks, local steps, and the figures of all epochs."""
    lines: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        lines.append(line)
        progress.advance(f"training, np={line['ranks']}")

    for ranks_per_host in options.ranks_per_host:
        command = [*hosts.mpirun_command(ranks_per_host), sys.executable, str(TRAINING)]
        given = ["--epochs", str(options.epochs), "--local-steps"]
        steps = ",".join(map(str, LOCAL_STEPS))
        jobs.run([*command, *given, steps], options.time_limit, take)
    return trainings_of(lines)


def trainings_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of two_hosts_training.py, those of one number of ranks and local steps as one."""
    trainings: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        key = line["ranks"], line["local_steps"]
        alike = {name: line[name] for name in ("ranks", "local_steps", "parameters", "steps")}
        training = trainings.setdefault(key, {**alike, "epoch_seconds": [], "accuracy": []})
        training["epoch_seconds"].append(line["seconds"])
        training["accuracy"].append(line["accuracy"])
    return list(trainings.values())


def tables(points: Points, trainings: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    texts = [
        f"np={ranks}\n{latency.time_table(points.of(ranks), options.contenders)}"
        for ranks in points.ranks
    ]
    for ours in options.contenders if points.ranks else []:
        if ours != "mpi":
            texts.append(latency.ratio_table(points, ours, default_mpi, f"{ours} / mpi"))
            texts.append(latency.ratio_table(points, ours, best_mpi, f"{ours} / best mpi"))
    for ranks in sorted({training["ranks"] for training in trainings}):
        columns = [efficiency(t, options.target) for t in trainings if t["ranks"] == ranks]
        texts.append(
            f"Training, np={ranks}, {options.rate}, accuracy {options.target:.0%}\n"
            f"{table_2(columns)}"
        )
    if trainings:
        texts.append(f"The paper's Table 2: ResNet-50, accuracy 74.9%\n{table_2(PAPER, 'min')}")
    return "\n\n".join(texts)


def plot(points: Points, trainings: Sequence[dict[str, Any]], path: Path) -> None:
    """Latencies by bytes for each number of ranks, and the time of an epoch."""
    from matplotlib.figure import Figure

    styles = {"mpi": "#000000", "best mpi": "#999999", "rvh": "#D55E00", "hierarchical": "#E69F00"}
    panels = len(points.ranks) + bool(trainings)
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    all_axes = list(figure.subplots(1, panels, squeeze=False).flat)
    for axes, ranks in zip(all_axes, points.ranks, strict=False):
        for name, color in styles.items():
            known = [
                (p.bytes, 1e3 * p.seconds[chosen])
                for p in points.of(ranks)
                if (chosen := p.best_mpi if name == "best mpi" else name) in p.seconds
            ]
            if known:
                axes.loglog(*zip(*known, strict=True), label=name, color=color, marker=".")
        axes.set_xscale("log", base=2)
        axes.set(title=f"{ranks} ranks on 2 hosts", xlabel="bytes", ylabel="milliseconds")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    if trainings:
        labels = [f"{t['local_steps'] or 'none'}\nnp={t['ranks']}" for t in trainings]
        seconds = [statistics.median(t["epoch_seconds"]) for t in trainings]
        all_axes[-1].bar(labels, seconds, color="#0072B2")
        all_axes[-1].set(title="An epoch", xlabel="local steps", ylabel="seconds")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--rate", default="2gbit", help="what each host can send, as tc writes it (2gbit)")
    add("--ranks-per-host", type=report.integers, default=[1, 2], help="(1,2)")
    add("--only", choices=["latency", "training"], help="one of the two parts")
    add("--contenders", type=lambda text: text.split(","), default=CONTENDERS)
    add("--sizes", type=report.integers, help="powers of two of the bytes (12,14,...,26)")
    add("--seconds", type=float, help="for each size, about (2; quick: 0.5)")
    add("--epochs", type=int, help="of the training (24; quick: 5)")
    add("--target", type=float, default=0.95, help="test accuracy (0.95)")
    add("--time-limit", type=float, default=600, help="of each job, in seconds (600)")
    options = parser.parse_args(argv)
    options.sizes = options.sizes or list(range(12, 25, 4) if options.quick else range(12, 27, 2))
    options.seconds = options.seconds or (0.5 if options.quick else 2)
    options.epochs = options.epochs or (5 if options.quick else 24)
    return options


def main() -> int:
    options = parse()
    started = time.monotonic()
    variants = latency.mpi_variants(hosts=2, quick=options.quick)
    latencies, training = options.only != "training", options.only != "latency"
    steps = len(options.sizes) * (1 + len(variants)) if latencies else 0
    steps += len(LOCAL_STEPS) * options.epochs if training else 0
    progress = report.Progress(steps * len(options.ranks_per_host))
    points, trainings = Points(), []
    try:
        with namespaces.hosts(2, options.rate) as hosts:
            print(report.describe(), flush=True)
            if latencies:
                points = measure_latencies(hosts, options, progress)
            if training:
                trainings = measure_training(hosts, options, progress)
    except namespaces.UnavailableError as error:
        print(f"Two hosts cannot be made here: {error}.", file=sys.stderr)
        return 2
    progress.close()
    print(f"\n{tables(points, trainings, options)}")
    figures = {
        "rate": options.rate,
        "seconds_taken": round(time.monotonic() - started),
        "points": points.as_json(),
        "trainings": trainings,
        "paper_table_2": [dataclasses.asdict(column) for column in PAPER],
    }
    path = report.write("two_hosts", options.output, figures)
    plot(points, trainings, path.with_suffix(".png"))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
