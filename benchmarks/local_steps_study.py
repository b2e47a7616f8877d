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

A combination that wins at several local steps as well was sought: averaging, with the momentum
averaged, and at each sync half of what the last one changed added to the combined change ("outer
momentum"), or joined with it by Adasum, for each unit of a layer by itself, so that what goes the
same way is averaged and what does not is added. That was run for 4 x 16, 16 x 4 and 16 x 16
(workers x local steps).

This decides the default of `average_inner_state`, and what docs say about when to use which op.

Takes some 80 minutes on one core, with --quick 1. Goes on where it was stopped.

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


@dataclasses.dataclass(frozen=True)
class Method:
    op: str
    inner_state: str
    outer_momentum: float = 0.0
    joined_by: str = "sum"

    @property
    def title(self) -> str:
        outer = f", outer momentum by {self.joined_by}" if self.outer_momentum else ""
        return f"{self.op}, {self.inner_state}{outer}"


GRID = [Method(op, inner_state) for op in OPS for inner_state in simulation.INNER_STATES]
COMBINATIONS = [Method("average", "averaged", 0.5, joined_by) for joined_by in simulation.JOINS]
COMBINED_AT = [(4, 16), (16, 4), (16, 16)]
"""Workers and local steps."""
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
    outer_momentum: float = 0.0
    joined_by: str = "sum"

    @property
    def method(self) -> Method:
        return Method(self.op, self.inner_state, self.outer_momentum, self.joined_by)

    @property
    def spread(self) -> runs.Spread:
        return runs.Spread.of(self.accuracy)


Train = Callable[[Run], Mapping[str, Any]]


def configurations(options: argparse.Namespace) -> list[tuple[int, int, Method]]:
    """workers, local_steps, method."""
    return [
        (workers, local_steps, method)
        for workers in options.workers
        for local_steps in options.local_steps
        for method in GRID + COMBINATIONS
        if method in GRID or (workers, local_steps) in COMBINED_AT
    ]


def measure(
    workers: int, local_steps: int, method: Method, options: argparse.Namespace, train: Train
) -> Cell:
    told = dataclasses.asdict(method)

    def trained(rate: float, seed: int) -> Mapping[str, Any]:
        return train(
            Run(
                workers,
                rate=rate,
                seed=seed,
                data=options.data,
                local_steps=local_steps,
                train_images=options.train_images,
                side=SIDE,
                **told,
            )
        )

    def accuracy(rate: float) -> float:
        return trained(rate, SEARCH_SEED)["accuracy"]

    rate = search.best_rate(accuracy, lenet.BASE_RATE, options.budget)
    of = [trained(rate, seed) for seed in range(options.seeds)]
    return Cell(
        workers,
        local_steps,
        rate=rate,
        accuracy=[each["accuracy"] for each in of],
        orthogonality=of[0]["orthogonality"],
        **told,
    )


def table(cells: Sequence[Cell], methods: Sequence[Method]) -> str:
    """Accuracy in percent and, in brackets, the rate; the best of a line is marked."""
    by = {(c.workers, c.local_steps, c.method): c for c in cells}
    rows = []
    for numbers in sorted({(c.workers, c.local_steps) for c in cells}):
        of = [by.get((*numbers, method)) for method in methods]
        if None in of:
            continue
        best = max(c.spread.mean for c in of)
        marked = [f"{'*' * (c.spread.mean == best)}{c.spread.percent()} [{c.rate:.3f}]" for c in of]
        rows.append(["{} x {}".format(*numbers), *marked])
    titles = [method.title for method in methods]
    return report.format_table(["workers x local steps", *titles], rows)


def tables(cells: Sequence[Cell]) -> list[str]:
    """Of the two ops, and of averaging and the combinations."""
    return [table(cells, GRID), table(cells, [Method("average", "averaged"), *COMBINATIONS])]


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "cells" not in figures:
        return None
    cells = [Cell(**cell) for cell in figures["cells"]]
    return (
        "Test accuracy, percent, mean (least-most) of the seeds, and the rate that was found; the "
        "best of a line has a star:\n\n"
        + "\n\n".join(f"```\n{each}\n```" for each in tables(cells))
    )


_COLORS = {"adasum": "#0072B2", "average": "#D55E00"}
_STYLES = {"local": "-", "averaged": "--", "reset": ":", "sum": "--", "adasum": "-."}


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Accuracy over local steps, a panel for each number of workers."""
    from matplotlib.figure import Figure

    of_workers = sorted({c.workers for c in cells})
    figure = Figure(figsize=(4 * len(of_workers), 3.8), layout="constrained")
    panels = figure.subplots(1, len(of_workers), squeeze=False)[0]
    for axes, workers in zip(panels, of_workers, strict=True):
        for method in GRID + COMBINATIONS:
            of = [c for c in cells if (c.workers, c.method) == (workers, method)]
            spreads = [c.spread for c in of]
            bars = [
                [100 * (s.mean - s.least) for s in spreads],
                [100 * (s.most - s.mean) for s in spreads],
            ]
            axes.errorbar(
                [c.local_steps for c in of],
                [100 * s.mean for s in spreads],
                bars,
                color="#009E73" if method.outer_momentum else _COLORS[method.op],
                linestyle=_STYLES[
                    method.joined_by if method.outer_momentum else method.inner_state
                ],
                marker="o",
                markersize=3,
                capsize=2,
                label=method.title,
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
    add("--train-images", type=int, help="(60000; quick: 2048)")
    add("--budget", type=int, help="rates that each search tries (6; quick: 1)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.workers = options.workers or ([4] if quick else [4, 16, 32])
    options.local_steps = options.local_steps or ([4] if quick else [1, 4, 16])
    options.train_images = options.train_images or (2048 if quick else 60000)
    options.budget = options.budget or (1 if quick else 6)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = lenet.Trainer(lenet.load(options.data))
    name = runs.name_of("local_steps_study", options.quick)
    done = runs.Runs(name, options.output, options.fresh)
    wanted = configurations(options)
    progress = report.Progress(len(wanted) * (options.seeds + options.budget))
    cells = []
    for workers, local_steps, method in wanted:
        label = f"{workers} x {local_steps}, {method.title}"

        def train(run: Run, label: str = label) -> Mapping[str, Any]:
            result = done.get(run, lambda: trainer.train(run))
            progress.advance(f"{label}, rate {run.rate:.4f}: {result['accuracy']:.1%}")
            return result

        cells.append(measure(workers, local_steps, method, options, train))
    progress.close()
    path = done.write(cells=[dataclasses.asdict(cell) for cell in cells])
    plot(cells, path.with_suffix(".png"))
    print("\nTest accuracy, percent [rate]\n" + "\n\n".join(tables(cells)))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
