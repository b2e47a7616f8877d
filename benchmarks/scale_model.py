"""How Adasum's allreduce scales to 4096 ranks, by a model with parameters measured here.

Measured: what messages between two ranks of this machine cost (LogGP's L, o, g and G, from a
ping-pong, exchanges and rows of small messages), and the speed of the core's kernels, with as many
at work as there are cores. Both in the cache, for up to 512 KiB in all, and beyond it. Predicted:
seconds of RVH, ring and hierarchical Adasum, and of the two common algorithms for a plain sum, for
several sizes and numbers of ranks. cost_model.py has the formulas.

Between nodes the model takes a network that is *assumed*, not measured: 100 Gbit/s, as in the
paper's cluster, and 2 microseconds from end to end (--network-gbit, --network-microseconds), shared
by the ranks of a node (--node-size).

Checked: the model against measured times with up to 16 ranks of this machine, with messages only
(no memory that ranks share). Where there are more ranks than cores, all that a rank does takes its
turn, which the model treats as that many times the time. What it costs to wake a waiting rank it
does not know, so there it is far too low for small messages. Shown are measured / predicted, and
the mean factor between the two.

The paper has measurements instead: 64 GPUs in Figure 4, up to 512 in Table 4.

Takes 2 to 3 minutes on 2 cores, with --quick half a minute. Run `make build` before.

    python benchmarks/scale_model.py
    python benchmarks/scale_model.py --node-size 4 --network-gbit 40 --network-microseconds 20
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cost_model
import jobs
import numpy as np
import report
from cost_model import ALGORITHMS, SUMS, Arithmetic, Cluster, Link
from latency import Point, Points

from tf_adasum import launch

TENSORS = 64
CACHED_BYTES = 512 << 10
"""Up to which a rank's buffers stay in the cache of its core."""
KERNELS = {"dot3": "dot3 float32", "combine": "combine float32", "copy": "memcpy"}
TRIAD = "triad float64"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The parameters of this machine, for messages and arithmetic in the cache and beyond it."""

    cached: Cluster
    beyond: Cluster

    def of(self, size: float) -> Cluster:
        return self.cached if size <= CACHED_BYTES else self.beyond

    def on_one_node(self) -> Measured:
        """The same where all ranks are on this machine."""
        one = {"node_size": 1 << 30}
        return Measured(
            dataclasses.replace(self.cached, **one), dataclasses.replace(self.beyond, **one)
        )


def links(pingpong: Mapping[str, Any]) -> tuple[Link, Link]:
    """LogGP's parameters in the cache and beyond it, from a line of loggp.cc.

    The line L + 2 o + m G that comes nearest, relatively, to the times of exchanges of 512 bytes to
    the cache's size gives L and the first G, that to larger ones with the same L the second.
    """
    o = (pingpong["o_send"] + pingpong["o_receive"]) / 2
    sizes, times = np.array(pingpong["bytes"]), np.array(pingpong["exchanges"])
    cached = (sizes >= 512) & (sizes <= CACHED_BYTES)
    per_byte, start = np.polyfit(sizes[cached], times[cached], 1, w=1 / times[cached])
    beyond = sizes > CACHED_BYTES
    per_byte_beyond = np.mean((times[beyond] - start) / sizes[beyond])
    return tuple(
        Link(L=max(0.0, float(start) - 2 * o), o=o, g=pingpong["g"], G=float(slope))
        for slope in (per_byte, per_byte_beyond)
    )


def arithmetic(printed: Sequence[str]) -> tuple[Arithmetic, Arithmetic]:
    """Seconds per byte of an operand in the cache and beyond it, from what kernels.cc prints.

    Args:
        printed: the output of each of the processes that ran at the same time.
    """

    def rates(text: str) -> dict[str, float]:
        found = re.findall(r"^  (\S.*?) +([\d.]+) GB/s", text, re.MULTILINE)
        return {name: float(rate) * 1e9 for name, rate in found}

    def of_section(number: int) -> Arithmetic:
        sections = [
            rates(re.split(r"^\S.* an operand$", text, flags=re.M)[number]) for text in printed
        ]
        rate = {name: statistics.mean(s[name] for s in sections) for name in sections[0]}
        # kernels.cc counts what is read and written of all operands.
        return Arithmetic(
            dot3=2 / rate[KERNELS["dot3"]],
            combine=3 / rate[KERNELS["combine"]],
            add=3 / rate[TRIAD],
            copy=2 / rate[KERNELS["copy"]],
        )

    return of_section(1), of_section(2)


def measure_parameters(options: argparse.Namespace, cores: int) -> Measured:
    worker = jobs.build("loggp_benchmark")
    (pingpong,) = jobs.run([*launch.mpirun_command(2), str(worker)], options.time_limit)
    kernels = jobs.build("kernels_benchmark")
    together = [
        subprocess.Popen([str(kernels)], stdout=subprocess.PIPE, text=True) for _ in range(cores)
    ]
    printed = [process.communicate(timeout=options.time_limit)[0] for process in together]
    inside = links(pingpong)
    computing = arithmetic(printed)
    microsecond = 1e-6 * options.network_microseconds
    network = Link(
        L=microsecond / 2, o=microsecond / 4, g=microsecond / 4, G=8e-9 / options.network_gbit
    )
    return Measured(
        *(
            Cluster(inside=link, between=network, arithmetic=each, node_size=options.node_size)
            for link, each in zip(inside, computing, strict=True)
        )
    )


def measure_latencies(options: argparse.Namespace, progress: report.Progress) -> Points:
    """Points without shared memory and without the way that small messages take."""
    worker = jobs.build("allreduce_benchmark")
    sizes = ",".join(str(1 << power) for power in options.checked_sizes)
    environ = {"TF_ADASUM_SHARED_MEMORY": "0", "TF_ADASUM_SMALL": "0"}
    points = Points()

    def take(result: dict[str, Any]) -> None:
        points.add(result)
        progress.advance(f"np={result['ranks']}, {report.size_name(result['bytes'])}")

    for ranks in options.checked_ranks:
        contenders = ["--contenders", ",".join([*options.algorithms, "mpi"])]
        given = ["--bytes", sizes, "--seconds", str(options.seconds)]
        command = [*launch.mpirun_command(ranks), str(worker), *given, *contenders]
        jobs.run(command, options.time_limit, take, environ)
    return points


def predict(measured: Measured, ranks: int, size: int) -> dict[str, float]:
    """Seconds by algorithm."""
    cluster = measured.of(size)
    return {
        name: cost(cluster, ranks, size, TENSORS) for name, cost in {**ALGORITHMS, **SUMS}.items()
    }


def check(measured: Measured, point: Point, cores: int) -> dict[str, float]:
    """Measured / predicted for each algorithm that was measured, with all ranks here.

    What MPI's sum is held against is the better of the two algorithms.
    """
    predicted = predict(measured.on_one_node(), point.ranks, point.bytes)
    predicted["mpi"] = min(predicted[name] for name in SUMS)
    return {
        name: seconds / cost_model.serialised(predicted[name], point.ranks, cores)
        for name, seconds in point.seconds.items()
    }


def mean_factor(ratios: Sequence[float]) -> float:
    """By what factor prediction and measurement differ in the geometric mean, either way."""
    return report.geometric_mean(max(ratio, 1 / ratio) for ratio in ratios)


def check_table(
    points: Points, checks: Mapping[tuple[int, int], Mapping[str, float]], cores: int
) -> str:
    names = list(dict.fromkeys(name for ratios in checks.values() for name in ratios))
    rows = [
        [
            f"np={p.ranks}, {report.size_name(p.bytes)}",
            *(f"{checks[p.ranks, p.bytes][name]:.2f}" for name in names),
        ]
        for p in points
    ]
    for title, crowded in (("up to as many ranks as cores", False), ("more ranks", True)):
        chosen = [ratios for (ranks, _), ratios in checks.items() if (ranks > cores) == crowded]
        factors = [mean_factor([ratios[name] for ratios in chosen]) for name in names]
        rows.append([f"mean factor, {title}", *(f"{factor:.2f}" for factor in factors)])
    return report.format_table(["measured / predicted", *names], rows)


def prediction_table(predictions: Mapping[int, Mapping[str, float]], size: int) -> str:
    """Milliseconds by number of ranks, and RVH against the better of the sums."""
    names = [*ALGORITHMS, *SUMS]
    rows = [
        [
            str(ranks),
            *(report.number(1e3 * of_ranks[name]) for name in names),
            f"{of_ranks['rvh'] / min(of_ranks[name] for name in SUMS):.2f}",
        ]
        for ranks, of_ranks in predictions.items()
    ]
    return report.format_table(
        [f"{report.size_name(size)}, ms; ranks", *names, "rvh / best sum"], rows
    )


def parameter_table(measured: Measured) -> str:
    def row(name: str, cluster: Cluster, link: Link) -> list[str]:
        microseconds = [f"{1e6 * value:.3f}" for value in (link.L, link.o, link.g)]
        gamma = dataclasses.astuple(cluster.arithmetic)
        return [name, *microseconds, *(f"{1e12 * value:.0f}" for value in (link.G, *gamma))]

    headings = ["", "L us", "o us", "g us", "G ps/B", "dot3 ps/B", "combine", "add", "copy"]
    rows = [
        row("in the cache", measured.cached, measured.cached.inside),
        row("beyond it", measured.beyond, measured.beyond.inside),
        row("between nodes (assumed)", measured.beyond, measured.beyond.between),
    ]
    return report.format_table(headings, rows)


def plot(
    predictions: Mapping[int, Mapping[int, Mapping[str, float]]], node_size: int, path: Path
) -> None:
    """Predicted milliseconds against ranks, once for each size."""
    from matplotlib.figure import Figure

    styles = {
        "rvh": ("#D55E00", "-"),
        "ring": ("#CC79A7", "-"),
        "hierarchical": ("#E69F00", "-."),
        "Rabenseifner sum": ("#000000", "--"),
        "ring sum": ("#999999", "--"),
    }
    figure = Figure(figsize=(4.2 * len(predictions), 4), layout="constrained")
    all_axes = figure.subplots(1, len(predictions), squeeze=False).flat
    for axes, (size, of_size) in zip(all_axes, predictions.items(), strict=True):
        for name, (color, line) in styles.items():
            milliseconds = [1e3 * of_ranks[name] for of_ranks in of_size.values()]
            axes.loglog(list(of_size), milliseconds, color=color, linestyle=line, label=name)
        axes.axvline(node_size, color="#cccccc", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(title=report.size_name(size), xlabel="ranks", ylabel="milliseconds")
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--node-size", type=int, default=8, help="ranks of a node (8)")
    add("--network-gbit", type=float, default=100, help="of a node's connection, per second (100)")
    add("--network-microseconds", type=float, default=2, help="of a small message (2)")
    add("--sizes", type=report.integers, default=[16, 20, 24, 28], help="powers of two (16,...,28)")
    add("--most-ranks", type=int, default=4096, help="(4096)")
    add("--algorithms", type=lambda text: text.split(","), default=list(ALGORITHMS))
    add("--checked-ranks", type=report.integers, help="measured (2,4,8,16; quick: 2,4)")
    add("--checked-sizes", type=report.integers, help="measured (16,20,24; quick: 20)")
    add("--seconds", type=float, default=2, help="for each size measured, about (2)")
    add("--time-limit", type=float, default=600, help="of each job, in seconds (600)")
    options = parser.parse_args(argv)
    options.checked_ranks = options.checked_ranks or ([2, 4] if options.quick else [2, 4, 8, 16])
    options.checked_sizes = options.checked_sizes or ([20] if options.quick else [16, 20, 24])
    return options


def main() -> int:
    options = parse()
    started = time.monotonic()
    cores = report.machine()["cores"]
    print(report.describe(), flush=True)
    progress = report.Progress(1 + len(options.checked_ranks) * len(options.checked_sizes))
    measured = measure_parameters(options, cores)
    progress.advance("messages and kernels")
    points = measure_latencies(options, progress)
    progress.close()
    checks = {(point.ranks, point.bytes): check(measured, point, cores) for point in points}
    numbers = [2**i for i in range(1, int(math.log2(options.most_ranks)) + 1)]
    predictions = {
        1 << power: {ranks: predict(measured, ranks, 1 << power) for ranks in numbers}
        for power in options.sizes
    }
    texts = [parameter_table(measured), check_table(points, checks, cores)]
    texts += [prediction_table(of_size, size) for size, of_size in predictions.items()]
    print("\n" + "\n\n".join(texts))
    figures = {
        "seconds_taken": round(time.monotonic() - started),
        "tensors": TENSORS,
        "parameters": dataclasses.asdict(measured),
        "points": points.as_json(),
        "measured_to_predicted": [
            {"ranks": ranks, "bytes": size, **ratios} for (ranks, size), ratios in checks.items()
        ],
        "predicted_seconds": [
            {"bytes": size, "ranks": ranks, **costs}
            for size, of_size in predictions.items()
            for ranks, costs in of_size.items()
        ],
    }
    path = report.write("scale_model", options.output, figures)
    plot(predictions, options.node_size, path.with_suffix(".png"))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
