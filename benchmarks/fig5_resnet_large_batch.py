"""The paper's Figure 5: epochs until an accuracy at a small and an 8 times larger batch.

What the paper did (section 5.1): ResNet-50 on ImageNet, momentum SGD with the benchmark's default
hyper-parameters, 64 V100, with 2K and 16K examples for each allreduce: 32 and 256 a GPU. Epochs
until 74.9%: Sum 62 with 2K and never with 16K (it was let run for 120), Adasum 62 and 69.

What is scaled down here: the ResNet (v1.5 blocks) has one bottleneck in each of 3 stages and 33,410
weights, and learns 8192 images of Fashion-MNIST. Workers are simulated (`simulation.py`): 4 of them
with the paper's 32 and 256 images each, so 128 and 1024 in all; a batch of 8 times as many by as
many workers is what the paper has. The schedule is MLPerf's of 90 epochs in 12: warm-up, then a
tenth of the rate at each of 1/3, 2/3 and 8/9 of the epochs; one here is 7.5 of the paper's. A test
after each epoch; "never" is for what has not reached the target when the schedule has ended. The
target, 86%, is a point below where Sum ends at the small batch, as 74.9% is of ResNet-50. (87.5%
was tried before, which Sum missed there with two of three seeds.) The large batch has 96 steps in
all, the paper's had some 5,400 until its target: what does not get there here may lack steps alone.

Rates: the default hyper-parameters scale the rate with the batch. So the large batch is trained
with 8 times the rate that was found for the small one ("scaled"), and besides with one searched for
it ("searched"). A search tries --budget rates for each method and batch, on a seed that no reported
run has, and takes the one that reaches the target first, or else comes nearest to it. Sum is that
of the workers' changes, as in `fig6_lenet.py`: 4 times their mean.

Takes some 35 minutes on one busy core, with --quick 1. Goes on where it was stopped.

    python benchmarks/fig5_resnet_large_batch.py
    python benchmarks/fig5_resnet_large_batch.py --workers 16 --train-images 16384 --seeds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lenet
import numpy as np
import report
import resnet
import runs
import search
from resnet import Run

OPS = ("sum", "adasum")
SEARCH_SEED = 1000
PAPER = {("sum", False): 62, ("sum", True): None, ("adasum", False): 62, ("adasum", True): 69}
"""Epochs, by method and whether the batch is the large one."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A method at a batch with a rate, over the seeds."""

    op: str
    batch: int
    """Of each worker."""
    is_searched: bool
    rate: float
    accuracy: list[list[float]]
    """Of each seed, after each epoch."""

    def epochs(self, target: float) -> list[int | None]:
        """Of each seed, until the target."""
        return [runs.first_epoch(of_seed, target) for of_seed in self.accuracy]


Train = Callable[[Run], Mapping[str, Any]]


def measure(options: argparse.Namespace, train: Train) -> list[Point]:
    """For each method the small batch, then the large one with a scaled and a searched rate."""
    small, large = options.batches

    def run(op: str, batch: int, rate: float, seed: int) -> Run:
        return Run(
            options.workers,
            batch,
            op,
            rate,
            seed,
            epochs=options.epochs,
            train_images=options.train_images,
        )

    def searched(op: str, batch: int, start: float) -> float:
        def score(rate: float) -> float:
            found = train(run(op, batch, rate, SEARCH_SEED))
            return resnet.score(found["accuracy"], options.target)

        return search.best_rate(score, start, options.budget)

    def point(op: str, batch: int, is_searched: bool, rate: float) -> Point:
        of = [train(run(op, batch, rate, seed)) for seed in range(options.seeds)]
        return Point(op, batch, is_searched, rate, [each["accuracy"] for each in of])

    points = []
    for op in OPS:
        rate = searched(op, small, resnet.BASE_RATE)
        points.append(point(op, small, True, rate))
        points.append(point(op, large, False, rate * large / small))
        points.append(point(op, large, True, searched(op, large, resnet.BASE_RATE)))
    return points


def table(points: Sequence[Point], workers: int, target: float) -> str:
    """Epochs to the target of each seed, and the highest accuracy, in percent."""
    small = min(p.batch for p in points)
    rows = []
    for p in points:
        best = [max(of_seed, default=0.0) for of_seed in p.accuracy]
        rows.append(
            [
                p.op.capitalize(),
                str(workers * p.batch),
                f"{p.rate:.4f}, {'searched' if p.is_searched else 'scaled'}",
                runs.epochs_text(p.epochs(target)),
                runs.Spread.of(best).percent(),
                str(PAPER[p.op, p.batch > small] or "never"),
            ]
        )
    headings = ["method", "batch of all", "rate", "epochs", "best accuracy, %", "the paper's"]
    return report.format_table(headings, rows)


def findings(points: Sequence[Point], target: float) -> list[str]:
    """What the paper says, and whether it is so here."""
    small = min(p.batch for p in points)
    by = {(p.op, p.batch > small, p.is_searched): p.epochs(target) for p in points}
    said = []

    def say(claim: str, holds: bool, *figures: Sequence[int | None]) -> None:
        texts = " and ".join(runs.epochs_text(of) for of in figures)
        said.append(f"{'yes' if holds else 'NO'}: {claim} ({texts})")

    for is_searched, name in ((False, "scaled"), (True, "searched")):
        total, adasum = by["sum", True, is_searched], by["adasum", True, is_searched]
        say(f"Sum never gets there at the large batch, rate {name}", not any(total), total)
        say(f"Adasum does, rate {name}", all(adasum), adasum)
    total, adasum = by["sum", False, True], by["adasum", False, True]
    say(
        "at the small batch Adasum needs as many epochs as Sum, or fewer",
        all(total) and all(adasum) and statistics.fmean(adasum) <= statistics.fmean(total),
        adasum,
        total,
    )
    return said


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "points" not in figures:
        return None
    points = [Point(**point) for point in figures["points"]]
    said = "\n".join(f"- {line}" for line in figures["findings"])
    target = figures["target"]
    return (
        f"Epochs until {target:.1%} of the test images, of each seed, and the highest accuracy, "
        f"mean (least-most) of the seeds:\n\n```\n{table(points, figures['workers'], target)}\n"
        f"```\n\nWhat the paper found, and whether it is so here:\n\n{said}"
    )


def plot(points: Sequence[Point], workers: int, target: float, path: Path) -> None:
    """Accuracy over epochs, the seeds' mean, one line a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    small = min(p.batch for p in points)
    for p in points:
        epochs = min(map(len, p.accuracy))
        if epochs == 0:
            continue
        rate = "" if p.batch == small else f", {'searched' if p.is_searched else 'scaled'} rate"
        axes.plot(
            range(1, epochs + 1),
            100 * np.mean([of_seed[:epochs] for of_seed in p.accuracy], axis=0),
            color={"sum": "#D55E00", "adasum": "#0072B2"}[p.op],
            linestyle="-" if p.batch == small else "--" if p.is_searched else ":",
            marker=".",
            label=f"{p.op.capitalize()}, {workers * p.batch}{rate}",
        )
    axes.axhline(100 * target, color="#000000", linewidth=0.8, label="target")
    axes.set(xlabel="epochs", ylabel="test accuracy, percent", ylim=(60, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=4, help="(4)")
    add("--batches", type=report.integers, help="of a worker (32,256; quick: 8,64)")
    add("--epochs", type=int, help="of the schedule (12; quick: 3)")
    add("--train-images", type=int, help="(8192; quick: 512)")
    add("--target", type=float, help="test accuracy (0.86; quick: 0.5)")
    add("--budget", type=int, help="rates that each search tries (4; quick: 1)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.batches = options.batches or ([8, 64] if quick else [32, 256])
    options.epochs = options.epochs or (3 if quick else 12)
    options.train_images = options.train_images or (512 if quick else 8192)
    options.target = options.target or (0.5 if quick else 0.86)
    options.budget = options.budget or (1 if quick else 4)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = resnet.Trainer(lenet.load("fashion_mnist"))
    done = resnet.runs_of("fig5_resnet_large_batch", options)
    progress = report.Progress(len(OPS) * (3 * options.seeds + 2 * options.budget))

    def train(run: Run) -> Mapping[str, Any]:
        result = done.get(run, lambda: trainer.train(run))
        progress.advance(
            f"{run.op}, {run.batch} a worker, rate {run.rate:.4f}: "
            f"{max(result['accuracy'], default=0):.1%}"
        )
        return result

    points = measure(options, train)
    progress.close()
    target, workers = options.target, options.workers
    said = findings(points, target)
    path = done.write(
        target=target,
        workers=workers,
        points=[dataclasses.asdict(point) for point in points],
        findings=said,
        paper_epochs={f"{op} {'16k' if large else '2k'}": n for (op, large), n in PAPER.items()},
    )
    plot(points, workers, target, path.with_suffix(".png"))
    print(f"\nEpochs until {target:.1%}\n{table(points, workers, target)}\n")
    print("What the paper found, and whether it is so here\n" + "\n".join(said))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
