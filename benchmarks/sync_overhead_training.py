"""The part of sync_overhead.py that trains; started by it under mpirun.

`times` takes steps of ResNet-50 with plain SGD and with AdasumOptimizer at several local steps. All
optimizers act on one model, in turns of a window each, from weights that are made equal before.
Rank 0 prints a line of JSON for each window: how long each of its steps took on the slowest rank.

`memory` takes steps with one optimizer and prints how much memory rank 0 has had at most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import report
import tensorflow as tf

import tf_adasum as adasum
from tf_adasum import core

CLASSES = 1000
PLAIN = 0
"""Local steps that stand for the optimizer that is not wrapped."""


class Workload:
    """ResNet-50, a batch of this rank's own random images, and steps on it."""

    def __init__(self, image: int, batch: int):
        keras.utils.set_random_seed(0)
        self.model = keras.applications.ResNet50(
            weights=None, input_shape=(image, image, 3), classes=CLASSES
        )
        random = np.random.default_rng(core.rank())
        images = random.normal(size=(batch, image, image, 3)).astype(np.float32)
        self._images = tf.constant(images)
        self._targets = tf.constant(random.integers(0, CLASSES, batch))

    def gradients(self) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = self.model(self._images, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(self._targets, outputs)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, [v.value for v in self.model.trainable_variables])

    def steps(self, optimizers: list[keras.optimizers.Optimizer]) -> list[Callable[[], None]]:
        """A function for each optimizer. The gradients' part is traced once for all of them."""
        gradients = tf.function(self.gradients, autograph=False)
        variables = self.model.trainable_variables

        def step_of(optimizer: keras.optimizers.Optimizer) -> Callable[[], None]:
            optimizer.build(variables)
            return tf.function(lambda: optimizer.apply(gradients(), variables), autograph=False)

        return [step_of(optimizer) for optimizer in optimizers]

    def make_equal(self) -> None:
        adasum.broadcast_variables(self.model.variables)


def optimizer(local_steps: int) -> keras.optimizers.Optimizer:
    plain = keras.optimizers.SGD(0.01, momentum=0.9)
    if local_steps == PLAIN:
        return plain
    return adasum.AdasumOptimizer(plain, local_steps=local_steps)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, from when all begin."""
    core.barrier()
    begin = time.perf_counter()
    work()
    return float(core.allgather(np.array([time.perf_counter() - begin])).max())


def times(options: argparse.Namespace) -> None:
    workload = Workload(options.image, options.batch)
    optimizers = [optimizer(local_steps) for local_steps in options.local_steps]
    longest = optimizers[int(np.argmax(options.local_steps))]
    steps = dict(zip(options.local_steps, workload.steps(optimizers), strict=True))
    for local_steps, one in zip(options.local_steps, optimizers, strict=True):
        workload.make_equal()
        steps[local_steps]()
        if local_steps != PLAIN:
            one.sync()
    for _ in range(options.rounds):
        for local_steps, step in steps.items():
            workload.make_equal()
            show(local_steps, [timed(step) for _ in range(local_steps or 4)])
        workload.make_equal()
        steps[max(steps)]()
        show("sync()", [timed(longest.sync)])


def show(local_steps: int | str, seconds: list[float]) -> None:
    if core.rank() == 0:
        print(json.dumps({"local_steps": local_steps, "seconds": seconds}), flush=True)


def memory(options: argparse.Namespace) -> None:
    workload = Workload(options.image, options.batch)
    (local_steps,) = options.local_steps
    (step,) = workload.steps([optimizer(local_steps)])
    for _ in range(2 * max(local_steps, 1)):
        step()
    core.barrier()
    if core.rank() == 0:
        weights = sum(4 * int(np.prod(v.shape)) for v in workload.model.trainable_variables)
        figures = {"local_steps": local_steps, "peak_bytes": peak_bytes(), "weight_bytes": weights}
        print(json.dumps(figures), flush=True)


def peak_bytes() -> int:
    """The most that this process has had in memory at a time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["times", "memory"])
    parser.add_argument("--local-steps", type=report.integers, required=True)
    parser.add_argument("--image", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    core.init()
    {"times": times, "memory": memory}[options.what](options)


if __name__ == "__main__":
    main()
