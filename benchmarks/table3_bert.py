"""The paper's Table 3: BERT at a large batch by Adam and by LAMB, with and without Adasum.

What the paper did (section 5.2): BERT-Large on 64 GPUs, an effective batch of 64K sequences in the
first phase and 32K in the second, and counted the iterations to an F1 score of 90.5 in SQuAD. LAMB
needed 7039 and 1563. Adam has not been seen to scale to such batches; with Adasum it got there in
as many iterations as LAMB. LAMB with Adasum got there in 20% fewer of both phases, or in 30% fewer
of the first.

What is scaled down here: a BERT of one block, 32 wide, of 30,849 weights; its tokens are bytes, its
text the sources of Python's standard library, cut into sequences of 8 bytes of which one is hidden;
one phase; 16 simulated workers (`simulation.py`) with 16 sequences each, and no sequence twice in a
training. The rate climbs linearly in the first 28% of the steps, as in LAMB's recipe for a batch of
64K, and falls linearly to zero. Instead of a score in another task there is a loss: the target is
the cross-entropy of sequences that are held out which LAMB alone comes to in --steps steps, with
the least lucky seed.

Without Adasum all workers' gradients are averaged, then the optimizer takes one step: that is one
worker with the whole batch. With Adasum each worker takes a step with its own gradient and its own
moments. In each step all methods see the same sequences. Of each method the highest rate is
searched among --budget, for the loss at the end, on a seed that no reported run has. The shorter
schedules have the rate that was found for the whole one.

Not tested is what makes a difference to the paper. Two things may: a training of 240 steps is to a
larger part its beginning, in which changes are parallel and Adasum averages them; and a gradient of
16 bytes leaves each worker's moments with more noise than the paper's of a thousand sequences.

Takes 12 minutes on one core, with --quick 1. Goes on where it was stopped.

    python benchmarks/table3_bert.py
    python benchmarks/table3_bert.py --workers 32 --steps 600
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import masked_language
import numpy as np
import report
import runs
import search
import simulation
import tensorflow as tf
from lenet import WarmupAndDecay

METHODS = [("adam", "mean"), ("lamb", "mean"), ("adam", "adasum"), ("lamb", "adasum")]
SHORTER = (0.8, 0.7)
"""Of the steps, for LAMB with Adasum."""
START_RATE = 0.01
WARMUP = 0.28
SEARCH_SEED = 1000
HELD_OUT = 4096
"""Sequences that the loss is of."""
TESTS = 20
"""In a training, at least."""

PAPER = {
    ("adam", "mean", 1.0): "never",
    ("lamb", "mean", 1.0): "7039 + 1563",
    ("adam", "adasum", 1.0): "7039 + 1563",
    ("lamb", "adasum", 0.8): "5639 + 1250",
    ("lamb", "adasum", 0.7): "5039 + 1563",
}
"""The iterations of the two phases, by method and the part of the steps."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: what it is told by in a file of results."""

    optimizer: str
    op: str
    """ "adasum" of the workers' changes, or "mean" of their gradients."""
    rate: float
    """The highest rate of the schedule."""
    seed: int
    """Of the weights at first and of the order of the data."""
    steps: int
    workers: int = 16
    batch: int = 16


def tested(steps: int) -> list[int]:
    """After which of so many steps there is a test."""
    every = max(1, steps // TESTS)
    return sorted({*range(every, steps + 1, every), steps})


@dataclasses.dataclass(frozen=True)
class Row:
    """A method and a number of steps, over the seeds."""

    optimizer: str
    op: str
    part: float
    """Of the steps that the other methods have."""
    steps: int
    rate: float
    losses: list[list[float | None]]
    """Of each seed, at the tests."""

    @property
    def name(self) -> str:
        name = {"adam": "Adam", "lamb": "LAMB"}[self.optimizer]
        return f"Adasum-{name}" if self.op == "adasum" else name

    @property
    def at_the_end(self) -> list[float]:
        """Of each seed."""
        return [end_loss(losses, self.steps) for losses in self.losses]

    def reached(self, target: float) -> list[int | None]:
        """Of each seed, the first tested step after which the loss is at most that."""
        return [
            next(
                (
                    step
                    for step, loss in zip(tested(self.steps), losses, strict=False)
                    if loss is not None and loss <= target
                ),
                None,
            )
            for losses in self.losses
        ]


def end_loss(losses: Sequence[float | None], steps: int) -> float:
    """Infinite where the training did not come to its end, or not with a finite one."""
    if len(losses) < len(tested(steps)) or losses[-1] is None:
        return math.inf
    return losses[-1]


class Trainer:
    """Trains by simulated workers.

    Args:
        sequences: how many to train on there are to be.
    """

    def __init__(self, sequences: int):
        inputs, targets = masked_language.data(HELD_OUT + sequences)
        self._held_out = inputs[:HELD_OUT], targets[:HELD_OUT]
        self._train = inputs[HELD_OUT:], targets[HELD_OUT:]
        # By what the traced steps depend on.
        self._made: dict[tuple, tuple] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """Trains and tests.

        Returns:
            loss: of what is held out, at the tests; None where it is not finite. Fewer where the
                training stopped because a worker's change was not finite three times in a row.
        """
        # Gradients' mean is the gradient of the whole batch.
        workers = run.workers if run.op == "adasum" else 1
        batch = run.workers * run.batch // workers
        simulated, schedule, test = self._make(run.optimizer, workers)
        schedule.steps.assign(run.steps)
        schedule.peak.assign(run.rate)
        keras.utils.set_random_seed(run.seed)
        simulated.start([v.numpy() for v in masked_language.model().trainable_variables])
        order = simulation.windows(run.steps * workers * batch, workers, batch, 1, 1, run.seed)
        losses: list[float | None] = []
        tests = tested(run.steps)
        for step, examples in enumerate(order, 1):
            try:
                simulated.window(examples)
            except ValueError:
                break
            if step in tests:
                simulated.load()
                loss = float(test())
                losses.append(round(loss, 4) if math.isfinite(loss) else None)
        return {"loss": losses}

    def _make(self, optimizer: str, workers: int) -> tuple:
        key = (optimizer, workers)
        if key not in self._made:
            # A variable, as its rate is: a traced step can be used with another number.
            schedule = WarmupAndDecay(keras.Variable(1.0, trainable=False, name="steps"), WARMUP)
            of_class = {"adam": keras.optimizers.Adam, "lamb": keras.optimizers.Lamb}[optimizer]
            simulated = simulation.Simulation(
                masked_language.model(),
                of_class(schedule),
                masked_language.loss,
                self._train,
                workers,
            )
            inputs, targets = map(tf.constant, self._held_out)

            @tf.function
            def test() -> tf.Tensor:
                return masked_language.loss(targets, simulated.model(inputs))

            self._made[key] = simulated, schedule, test
        return self._made[key]


Train = Callable[[Run], Mapping[str, Any]]


def measure(options: argparse.Namespace, train: Train) -> tuple[list[Row], float]:
    """The rows of the table, and the target loss."""

    def run(method: tuple[str, str], rate: float, seed: int, part: float = 1.0) -> Run:
        steps = round(part * options.steps)
        return Run(*method, rate, seed, steps, options.workers, options.batch)

    rows = []
    for method in METHODS:

        def score(rate: float, method: tuple[str, str] = method) -> float:
            losses = train(run(method, rate, SEARCH_SEED))["loss"]
            return -end_loss(losses, options.steps)

        # A high loss may be that of a low rate: only where none is finite the rate has failed.
        rate = search.best_rate(score, START_RATE, options.budget, failed=-math.inf)
        for part in (1.0, *(SHORTER if method == METHODS[-1] else ())):
            of = [run(method, rate, seed, part) for seed in range(options.seeds)]
            losses = [train(each)["loss"] for each in of]
            rows.append(Row(*method, part, of[0].steps, rate, losses))
    by = {(row.optimizer, row.op): row for row in rows}
    return rows, max(by["lamb", "mean"].at_the_end)


HEADINGS = ["method", "rate", "steps", "loss at the end", "target reached after", "in the paper"]


def cells(rows: Sequence[Row], target: float) -> list[list[str]]:
    """Under `HEADINGS`; mean (least - most) of the seeds."""
    return [
        [
            row.name,
            f"{row.rate:.4f}",
            str(row.steps),
            runs.Spread.of(row.at_the_end).text(3),
            _when(row.reached(target)),
            PAPER.get((row.optimizer, row.op, row.part), ""),
        ]
        for row in rows
    ]


def _when(reached: Sequence[int | None]) -> str:
    if None not in reached:
        return runs.Spread.of(reached).text(0)
    seeds = sum(step is not None for step in reached)
    return f"by {seeds} of {len(reached)} seeds" if seeds else "never"


def findings(rows: Sequence[Row], target: float) -> list[str]:
    """What the paper says, and whether it is so here."""
    by = {(row.optimizer, row.op, row.part): row for row in rows}

    def say(claim: str, row: Row, is_to_reach: bool = True) -> str:
        has_reached = None not in row.reached(target)
        loss = runs.Spread.of(row.at_the_end).text(3)
        return f"{'yes' if has_reached == is_to_reach else 'NO'}: {claim} ({loss} at the end)"

    said = [
        say("Adam alone does not come to LAMB's loss", by["adam", "mean", 1.0], False),
        say("Adam with Adasum does, in as many steps", by["adam", "adasum", 1.0]),
    ]
    for part in SHORTER:
        claim = f"LAMB with Adasum does so with {1 - part:.0%} fewer steps"
        said.append(say(claim, by["lamb", "adasum", part]))
    return said


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "rows" not in figures:
        return None
    rows, target = [Row(**row) for row in figures["rows"]], figures["target"]
    said = "\n".join(f"- {line}" for line in figures["findings"])
    return (
        f"Steps to the loss that LAMB comes to, {target:.3f}; mean (least-most) of the seeds:\n\n"
        f"```\n{report.format_table(HEADINGS, cells(rows, target))}\n```\n\n"
        f"What the paper found, and whether it is so here:\n\n{said}"
    )


def plot(rows: Sequence[Row], target: float, path: Path) -> None:
    """The loss over the steps: the seeds' mean, and from the least to the most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    colors = {"adam": "#D55E00", "lamb": "#0072B2"}
    for row in rows:
        whole = [losses for losses in row.losses if math.isfinite(end_loss(losses, row.steps))]
        if not whole:
            continue
        losses = np.array(whole, float)
        steps, color = tested(row.steps), colors[row.optimizer]
        axes.plot(
            steps,
            losses.mean(0),
            color=color,
            linestyle="-" if row.op == "adasum" else "--",
            alpha=row.part,
            label=f"{row.name}, {row.steps} steps",
        )
        axes.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.15)
    axes.axhline(target, color="#999999", linestyle=":")
    axes.set(xlabel="steps", ylabel="loss of what is held out, nats", ylim=(None, target + 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=16, help="(16)")
    add("--batch", type=int, default=16, help="sequences of a worker in a step (16)")
    add("--steps", type=int, help="of a schedule that is not shortened (240; quick: 15)")
    add("--budget", type=int, help="rates that each search tries (5; quick: 1)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.steps = options.steps or (15 if quick else 240)
    options.budget = options.budget or (1 if quick else 5)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = Trainer(options.steps * options.workers * options.batch)
    name = runs.name_of("table3_bert", options.quick)
    done = runs.Runs(name, options.output, options.fresh)
    rows_of_seeds = len(METHODS) + len(SHORTER)
    progress = report.Progress(options.seeds * rows_of_seeds + options.budget * len(METHODS))

    def train(run: Run) -> Mapping[str, Any]:
        result = done.get(run, lambda: trainer.train(run))
        progress.advance(
            f"{run.optimizer}, {run.op}, rate {run.rate:.4f}, {run.steps} steps: "
            f"{end_loss(result['loss'], run.steps):.3f}"
        )
        return result

    rows, target = measure(options, train)
    progress.close()
    said = findings(rows, target)
    path = done.write(
        target=target,
        rows=[dataclasses.asdict(row) for row in rows],
        findings=said,
    )
    plot(rows, target, path.with_suffix(".png"))
    print(f"\n{report.format_table(HEADINGS, cells(rows, target))}\n\nTarget: {target:.3f}")
    print("What the paper found, and whether it is so here\n" + "\n".join(said))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
