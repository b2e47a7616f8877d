"""What deltas in half the bytes cost in accuracy: LeNet-5 with wire_dtype and error_feedback.

The paper (section 4.4.1) scales effective gradients in float16 dynamically, and has no figure for
what narrow ones do to the accuracy. Here LeNet-5 is trained on Fashion-MNIST as in `fig6_lenet.py`
(batch 32 a worker, 2 epochs, base rate 0.0328, momentum 0.9, Adasum at each step)
with deltas sent as float32, as float16 and as bfloat16, the latter two with and without error
feedback, by 4 and 16 workers. Everything but the wire is equal for the runs of one seed: the
weights at first and the order of the data. So what is compared is each run with that of its own
seed in float32.

Workers are simulated (`simulation.py`); bytes are counted by the core where messages are sent, each
worker being on a host of its own.

Takes some 15 minutes on 2 cores, with --quick 2. Goes on where it was stopped.

    python benchmarks/wire_accuracy.py
    python benchmarks/wire_accuracy.py --workers 4,8,16,32 --seeds 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lenet
import numpy as np
import report
import runs
from lenet import Run

WIRES = [
    (None, False),
    ("float16", False),
    ("float16", True),
    ("bfloat16", False),
    ("bfloat16", True),
]
"""wire_dtype, error_feedback."""


def wire_name(wire_dtype: str | None, error_feedback: bool) -> str:
    return "float32" if wire_dtype is None else wire_dtype + (", feedback" * error_feedback)


def planned(options: argparse.Namespace) -> list[Run]:
    """Seeds in turn, so that what is there after a while is of all configurations."""
    return [
        Run(
            workers,
            seed=seed,
            data=options.data,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
            train_images=options.train_images,
        )
        for seed in range(options.seeds)
        for workers in options.workers
        for wire_dtype, error_feedback in WIRES
    ]


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each number of workers and each wire, over the seeds."""
    rows = []
    for workers in sorted({result["run"]["workers"] for result in results}):
        of_seed: dict[tuple, dict[int, dict[str, Any]]] = {}
        for result in results:
            run = result["run"]
            if run["workers"] == workers:
                wire = (run["wire_dtype"], run["error_feedback"])
                of_seed.setdefault(wire, {})[run["seed"]] = result
        full = of_seed[WIRES[0]]
        for wire in WIRES:
            of = [of_seed[wire][seed] for seed in sorted(of_seed[wire])]
            differences = [
                result["accuracy"] - full[result["run"]["seed"]]["accuracy"] for result in of
            ]
            rows.append(
                {
                    "workers": workers,
                    "wire_dtype": wire[0],
                    "error_feedback": wire[1],
                    "accuracy": [result["accuracy"] for result in of],
                    "difference": differences,
                    "loss": [result["loss"] for result in of],
                    "bytes_a_worker_and_sync": of[0]["sent_bytes"] / workers,
                }
            )
    return rows


HEADINGS = [
    "workers",
    "wire",
    "accuracy %",
    "less float32's",
    "training loss",
    "KB sent a worker and sync",
]


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Under `HEADINGS`; the difference with the standard error of its mean."""
    table = []
    for row in rows:
        differences = 100 * np.array(row["difference"])
        error = differences.std(ddof=1) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        is_full = row["wire_dtype"] is None
        table.append(
            [
                str(row["workers"]),
                wire_name(row["wire_dtype"], row["error_feedback"]),
                runs.Spread.of(row["accuracy"]).percent(2),
                "" if is_full else f"{differences.mean():+.2f} ± {error:.2f}",
                f"{np.mean(row['loss']):.4f}",
                f"{row['bytes_a_worker_and_sync'] / 1e3:.0f}",
            ]
        )
    return table


def feedback_effect(rows: Sequence[dict[str, Any]]) -> str:
    """What error feedback adds to the accuracy, over all pairs of runs that differ in it alone."""
    by = {(row["workers"], row["wire_dtype"], row["error_feedback"]): row for row in rows}
    points = [
        100 * (fed - plain)
        for (workers, wire_dtype, is_fed), row in by.items()
        if is_fed
        for fed, plain in zip(
            row["accuracy"], by[workers, wire_dtype, False]["accuracy"], strict=True
        )
    ]
    error = np.std(points, ddof=1) / len(points) ** 0.5
    return (
        f"Error feedback adds {np.mean(points):+.2f} ± {error:.2f} points of accuracy (mean of "
        f"{len(points)} pairs of runs that differ in it alone, and its standard error)."
    )


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "summary" not in figures:
        return None
    rows = figures["summary"]
    return f"```\n{report.format_table(HEADINGS, cells(rows))}\n```\n\n{feedback_effect(rows)}"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Each seed's accuracy less that of its run in float32."""
    from matplotlib.figure import Figure

    of_workers = sorted({row["workers"] for row in rows})
    figure = Figure(figsize=(4.2 * len(of_workers), 3.6), layout="constrained")
    for axes, workers in zip(
        np.atleast_1d(figure.subplots(1, len(of_workers), sharey=True)), of_workers, strict=True
    ):
        narrow = [row for row in rows if row["workers"] == workers and row["wire_dtype"]]
        for place, row in enumerate(narrow):
            points = 100 * np.array(row["difference"])
            axes.plot([place] * len(points), points, "o", color="#0072B2", alpha=0.7)
            axes.plot([place - 0.2, place + 0.2], [points.mean()] * 2, color="#D55E00")
        axes.axhline(0, color="#999999", linestyle=":")
        names = [wire_name(row["wire_dtype"], row["error_feedback"]) for row in narrow]
        axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
        axes.set(title=f"{workers} workers")
        axes.grid(alpha=0.3)
    figure.supylabel("test accuracy less float32's, points")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=report.integers, default=[4, 16], help="(4,16)")
    add("--data", default="fashion_mnist", choices=["fashion_mnist", "mnist"])
    add("--train-images", type=int, help="(60000; quick: 2000)")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.train_images = options.train_images or (2000 if options.quick else 60000)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = lenet.Trainer(lenet.load(options.data))
    name = runs.name_of("wire_accuracy", options.quick)
    done = runs.Runs(name, options.output, options.fresh)
    plan = planned(options)
    progress = report.Progress(sum(not done.has(run) for run in plan))
    results = []
    for run in plan:
        is_new = not done.has(run)
        results.append(done.get(run, lambda run=run: trainer.train(run)))
        if is_new:
            wire = wire_name(run.wire_dtype, run.error_feedback)
            progress.advance(
                f"{run.workers} workers, {wire}, seed {run.seed}: {results[-1]['accuracy']:.2%}"
            )
    progress.close()
    rows = summary(results)
    path = done.write(summary=rows)
    plot(rows, path.with_suffix(".png"))
    print(f"\n{report.format_table(HEADINGS, cells(rows))}\n\n{feedback_effect(rows)}")
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
