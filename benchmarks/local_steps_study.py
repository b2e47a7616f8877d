"""Local steps: Adasum or averaging, and what becomes of the momentum at a sync.

The paper's Table 2 takes 16 local steps between two syncs of Adasum, with 4 times the rate, and
compares with 1 local step alone. It does not compare with averaging the weights after as many local
steps (local SGD, op="average"), nor does it say what becomes of each worker's momentum. Here both
are varied: op Adasum and Average; the momentum kept by each worker ("local"), averaged over the
workers ("averaged") or set to zero ("reset") at each sync; 1, 4 and 16 local steps; 4, 16 and 32
workers. LeNet-5 on Fashion-MNIST as in `fig6_lenet.py`, but with images of 14 x 14 pixels, the
means of 2 x 2, and kernels of 3 x 3: a training takes a quarter of the time, so there can be more
of them. The rate is searched for each method and number with the same number of trainings
(--budget), on a seed that no reported run has. Epochs stay 2, so workers x local steps make the
number of syncs small: 16 workers with 16 local steps have 14.

This decides the default of `average_inner_state`, and what docs say about when to use which op.

Takes some hours on 2 cores, with --quick 4 minutes. Goes on where it was stopped.

    python benchmarks/local_steps_study.py
    python benchmarks/local_steps_study.py --workers 4 --local-steps 16
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lenet
import report
import runs
import search
import simulation
from lenet import Run

OPS = ("adasum", "average")
SEARCH_SEED = 1000
SIDE = 14


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method at its best rate, over the seeds."""

    workers: int
    local_steps: int
    op: str
    inner_state: str
    rate: float
    accuracy: list[float]
    orthogonality: list[float] | None
    """Of the first seed, in ten parts of the training."""

    @property
    def spread(self) -> runs.Spread:
        return runs.Spread.of(self.accuracy)


Train = Callable[[Run], Mapping[str, Any]]


def methods(options: argparse.Namespace) -> list[tuple[int, int, str, str]]:
    """workers, local_steps, op, inner_state."""
    return [
        (workers, local_steps, op, inner_state)
        for workers in options.workers
        for local_steps in options.local_steps
        for op in OPS
        for inner_state in simulation.INNER_STATES
    ]


def measure(options: argparse.Namespace, train: Train) -> list[Cell]:
    cells = []
    for workers, local_steps, op, inner_state in methods(options):

        def run(rate: float, seed: int, method: tuple = (workers, local_steps, op, inner_state)):
            return Run(
                method[0],
                method[2],
                rate,
                seed,
                data=options.data,
                local_steps=method[1],
                inner_state=method[3],
                train_images=options.train_images,
                side=SIDE,
            )

        def accuracy(rate: float, run: Callable = run) -> float:
            return train(run(rate, SEARCH_SEED))["accuracy"]

        rate = search.best_rate(accuracy, lenet.BASE_RATE, options.budget)
        of = [train(run(rate, seed)) for seed in range(options.seeds)]
        cells.append(
            Cell(
                workers,
                local_steps,
                op,
                inner_state,
                rate,
                [each["accuracy"] for each in of],
                of[0]["orthogonality"],
            )
        )
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Accuracy in percent and, in brackets, the rate; the best of a line is marked."""
    columns = [(op, inner_state) for op in OPS for inner_state in simulation.INNER_STATES]
    headings = ["workers x local steps", *(f"{op}, {state}" for op, state in columns)]
    by = {(c.workers, c.local_steps, c.op, c.inner_state): c for c in cells}
    rows = []
    for workers, local_steps in sorted({(c.workers, c.local_steps) for c in cells}):
        of = [by[workers, local_steps, op, state] for op, state in columns]
        best = max(c.spread.mean for c in of)
        rows.append(
            [
                f"{workers} x {local_steps}",
                *(
                    f"{'*' * (c.spread.mean == best)}{c.spread.percent()} [{c.rate:.3f}]"
                    for c in of
                ),
            ]
        )
    return report.format_table(headings, rows)


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "cells" not in figures:
        return None
    cells = [Cell(**cell) for cell in figures["cells"]]
    return (
        "Test accuracy, percent, mean (least-most) of the seeds, and the rate that was found; the "
        f"best of a line has a star:\n\n```\n{table(cells)}\n```"
    )


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Accuracy over local steps, a panel for each number of workers."""
    from matplotlib.figure import Figure

    of_workers = sorted({c.workers for c in cells})
    figure = Figure(figsize=(4 * len(of_workers), 3.8), layout="constrained")
    panels = figure.subplots(1, len(of_workers), squeeze=False)[0]
    for axes, workers in zip(panels, of_workers, strict=True):
        for op, color in zip(OPS, ("#0072B2", "#D55E00"), strict=True):
            for state, style in zip(simulation.INNER_STATES, ("-", "--", ":"), strict=True):
                of = [c for c in cells if (c.workers, c.op, c.inner_state) == (workers, op, state)]
                spreads = [c.spread for c in of]
                bars = [
                    [100 * (s.mean - s.least) for s in spreads],
                    [100 * (s.most - s.mean) for s in spreads],
                ]
                axes.errorbar(
                    [c.local_steps for c in of],
                    [100 * s.mean for s in spreads],
                    bars,
                    color=color,
                    linestyle=style,
                    marker="o",
                    markersize=3,
                    capsize=2,
                    label=f"{op}, {state}",
                )
        axes.set_xscale("log", base=2)
        steps = sorted({c.local_steps for c in cells})
        axes.set_xticks(steps, map(str, steps))
        axes.set(title=f"{workers} workers", xlabel="local steps")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, percent")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=report.integers, help="(4,16,32; quick: 4)")
    add("--local-steps", type=report.integers, help="(1,4,16; quick: 4)")
    add("--data", default="fashion_mnist", choices=["fashion_mnist", "mnist"])
    add("--train-images", type=int, help="(60000; quick: 4096)")
    add("--budget", type=int, help="rates that each search tries (6; quick: 2)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.workers = options.workers or ([4] if quick else [4, 16, 32])
    options.local_steps = options.local_steps or ([4] if quick else [1, 4, 16])
    options.train_images = options.train_images or (4096 if quick else 60000)
    options.budget = options.budget or (2 if quick else 6)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = lenet.Trainer(lenet.load(options.data))
    name = runs.name_of("local_steps_study", options.quick)
    done = runs.Runs(name, options.output, options.fresh)
    progress = report.Progress(len(methods(options)) * (options.seeds + options.budget))

    def train(run: Run) -> Mapping[str, Any]:
        result = done.get(run, lambda: trainer.train(run))
        progress.advance(
            f"{run.workers} x {run.local_steps}, {run.op}, {run.inner_state}, "
            f"rate {run.rate:.4f}: {result['accuracy']:.1%}"
        )
        return result

    cells = measure(options, train)
    progress.close()
    path = done.write(cells=[dataclasses.asdict(cell) for cell in cells])
    plot(cells, path.with_suffix(".png"))
    print(f"\nTest accuracy, percent [rate]\n{table(cells)}\n\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
