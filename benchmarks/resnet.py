"""The ResNet of the example resnet50_imagenet.py, narrow and shallow, trained by simulated workers
on LeNet's images, with the schedule of MLPerf v0.5 and a test after each epoch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import keras
import lenet
import report
import runs
import simulation
from lenet import Images

sys.path.append(str(report.ROOT / "examples"))
from resnet50.model import resnet
from resnet50.schedule import WarmUpAndSteps

BASE_RATE = 0.05
TEST_IMAGES = 2000
"""Of each test, at most."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: what it is told by in a file of results."""

    workers: int
    batch: int
    op: str
    rate: float
    """The highest rate of the schedule."""
    seed: int
    """Of the weights at first and of the order of the data."""
    local_steps: int = 1
    epochs: int = 12
    train_images: int = 8192
    momentum: float = 0.9


def model(width: int = 8, blocks: Sequence[int] = (1, 1, 1)) -> keras.Model:
    """ResNet v1.5 for 28 x 28 pixels, to 10 classes' logits: by default 33,410 weights.

    Args:
        width: filters of the first stage; each later stage has twice as many.
        blocks: how many bottlenecks each stage has.
    """
    return resnet(28, 10, width=width, blocks=blocks, weight_decay=0.0, channels=1)


def schedule(steps_per_epoch: int, epochs: int) -> WarmUpAndSteps:
    """MLPerf's 90 epochs in so many: a warm-up in 5, then tenths from the epochs 30, 60 and 80 on.

    Its rate is a variable, so that a traced step can be used with another one.
    """
    rate = keras.Variable(BASE_RATE, trainable=False, name="rate")
    decays = [epochs * epoch / 90 for epoch in (30, 60, 80)]
    return WarmUpAndSteps(rate, steps_per_epoch, epochs * 5 / 90, decays)


PROGRAMS = ("fig5_resnet_large_batch", "table2_local_steps")


def runs_of(program: str, options: argparse.Namespace) -> runs.Runs:
    """Of one of `PROGRAMS`, with the other's: trainings that both need are made once."""
    others = [runs.name_of(each, options.quick) for each in PROGRAMS if each != program]
    name = runs.name_of(program, options.quick)
    return runs.Runs(name, options.output, options.fresh, others)


class Trainer:
    """Trains on some data, by simulated workers.

    Args:
        data: training and test images, of `lenet.load`.
    """

    def __init__(self, data: tuple[Images, Images]):
        self._train, (images, labels) = data
        self._test = images[:TEST_IMAGES], labels[:TEST_IMAGES]
        # By what the traced step depends on.
        self._simulations: dict[tuple, tuple[simulation.Simulation, WarmUpAndSteps]] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """Trains and tests.

        Returns:
            accuracy: on the test images after each epoch, from 0 to 1. Fewer than the epochs where
                the training stopped because a worker's change was not finite three times in a row.
        """
        simulated, rates = self._simulation(run)
        rates.rate.assign(run.rate)
        keras.utils.set_random_seed(run.seed)
        simulated.start([v.numpy() for v in model().trainable_variables], op=run.op)
        accuracy = []
        try:
            for epoch in range(run.epochs):
                # Each ends with a sync, as `callbacks.standard()` has it before a test.
                for examples in simulation.windows(
                    run.train_images,
                    run.workers,
                    run.batch,
                    epochs=1,
                    local_steps=run.local_steps,
                    seed=[run.seed, epoch],
                ):
                    simulated.window(examples)
                accuracy.append(lenet.accuracy(simulated.load(), self._test))
        except ValueError:
            pass
        return {"accuracy": accuracy}

    def _simulation(self, run: Run) -> tuple[simulation.Simulation, WarmUpAndSteps]:
        key = (run.workers, run.batch, run.epochs, run.train_images, run.momentum)
        if key not in self._simulations:
            steps = simulation.steps(run.train_images, run.workers, run.batch, epochs=1)
            rates = schedule(steps, run.epochs)
            images, labels = self._train
            simulated = simulation.Simulation(
                model(),
                keras.optimizers.SGD(rates, momentum=run.momentum),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                (images[: run.train_images], labels[: run.train_images]),
                run.workers,
            )
            self._simulations[key] = simulated, rates
        return self._simulations[key]


def score(accuracy: Sequence[float], target: float) -> float:
    """For `search.best_rate`: above 1 where the target was reached, the higher the sooner, and else
    the highest accuracy.

    Between two tests the accuracy counts as a straight line: of rates that reach the target in the
    same epoch one has to be chosen.
    """
    reached = runs.first_epoch(accuracy, target)
    if reached is None:
        return max(accuracy, default=0.0)
    after = accuracy[reached - 1]
    before = accuracy[reached - 2] if reached > 1 else 0.0
    return 1 + 1 / (reached - (after - target) / (after - before))
