"""What the demo's runs are and how their results are shown: as a table, as JSON, as curves."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all runs have in common. `epochs` is passes over the training images."""

    epochs: int = 16
    batch_size: int = 32
    learning_rate: float = 0.08
    momentum: float = 0.9
    warmup: float = 0.17
    """The part of the steps in which the rate climbs, as in the paper's Figure 6."""
    train_images: int = 1408
    """44 whole batches for one worker, 11 for each of four. The other 389 images are the test."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. With `op` None it is the plain Keras optimizer on rank 0 alone."""

    workers: int
    op: str | None = None
    local_steps: int = 1

    @property
    def label(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        steps = f", local_steps={self.local_steps}" if self.op == "Adasum" else ""
        return workers + (f", {self.op}" if self.op else "") + steps


def runs(workers: int) -> list[Run]:
    """The table's rows."""
    several = [("Sum", 1), ("Adasum", 1), ("Adasum", 4)]
    return [Run(1), *(Run(workers, op, local_steps) for op, local_steps in several)]


@dataclasses.dataclass(frozen=True)
class Row:
    """A run and what came of it, as rank 0 saw it."""

    run: Run
    test_accuracy: list[float]
    """After each epoch, from 0 to 1."""
    test_loss: list[float]
    steps: int
    """Optimizer steps of each worker."""
    syncs: int
    seconds: float
    weights: list[str]
    """The SHA-256 of each worker's weights, in hexadecimal."""

    @property
    def weights_equal(self) -> bool:
        return len(set(self.weights)) == 1


def format_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text under a line of headings."""
    cells = [
        ("", "test accuracy", "steps per worker", "syncs", "seconds", "weights equal on all ranks")
    ]
    for row in rows:
        hashes = " ".join(dict.fromkeys(weights[:8] for weights in row.weights))
        equal = f"{'yes' if row.weights_equal else 'NO'} ({hashes})"
        accuracy, seconds = f"{row.test_accuracy[-1]:.1%}", f"{row.seconds:.2f}"
        cells.append((row.run.label, accuracy, str(row.steps), str(row.syncs), seconds, equal))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]])
        for line in cells
    )


def as_json(rows: Sequence[Row], settings: Settings) -> str:
    """The table, and the settings it was made with, as a JSON object. Times are in seconds."""
    table = [
        {
            "label": row.run.label,
            **dataclasses.asdict(row.run),
            "test_accuracy": row.test_accuracy[-1],
            "steps_per_worker": row.steps,
            "syncs": row.syncs,
            "wall_time_seconds": row.seconds,
            "weights_equal": row.weights_equal,
            "weights_sha256": row.weights,
        }
        for row in rows
    ]
    content = {"settings": dataclasses.asdict(settings), "cores": os.cpu_count(), "rows": table}
    return json.dumps(content, indent=2) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes test accuracy and test loss against epochs as a PNG, with one line for each row."""
    from matplotlib.figure import Figure

    # Told apart by the colour-blind (Okabe and Ito's colours) and in black and white.
    styles = [("#000000", "-"), ("#D55E00", ":"), ("#0072B2", "--"), ("#009E73", "-.")]
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for row, (color, line) in zip(rows, styles, strict=True):
        epochs = range(1, len(row.test_accuracy) + 1)
        style: dict[str, Any] = {"color": color, "linestyle": line, "marker": ".", "linewidth": 2}
        percent = [100 * value for value in row.test_accuracy]
        label = f"{row.run.label} ({row.test_accuracy[-1]:.1%})"
        accuracy.plot(epochs, percent, label=label, **style)
        loss.plot(epochs, row.test_loss, **style)
    accuracy.set(title="Test accuracy", ylabel="percent", ylim=(0, 101))
    loss.set(title="Test loss", ylabel="cross-entropy", yscale="log")
    for axes in (accuracy, loss):
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.suptitle("Handwritten digits, the same learning rate for every run")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, format="png", dpi=120)
