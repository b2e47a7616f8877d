"""The part of two_hosts.py that trains; started by it under mpirun.

A network of two dense hidden layers learns scikit-learn's handwritten digits, once for each of
--local-steps; these trainings take turns, an epoch each. 0 local steps stands for ranks that train
apart: what an epoch costs without any communication. Rank 0 prints a line of JSON for each epoch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import report
import tensorflow as tf

import tf_adasum as adasum
from tf_adasum import demo
from tf_adasum.demo_report import Settings

HIDDEN = 1024


@dataclasses.dataclass
class Training:
    """A model, and its `fit` without what is the same in every epoch."""

    local_steps: int
    model: keras.Model
    fit: Callable[..., Any]


def build_model() -> keras.Sequential:
    layers = keras.layers
    hidden = [layers.Dense(HIDDEN, activation="relu") for _ in range(2)]
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def prepare(
    local_steps: int,
    data: demo.Images,
    settings: Settings,
    build: Callable[[], keras.Model] = build_model,
) -> Training:
    """A model with its initial weights, traced, and this rank's part of the data."""
    keras.utils.set_random_seed(settings.seed)
    model = build()
    optimizer = keras.optimizers.SGD(settings.learning_rate, momentum=settings.momentum)
    standard = []
    if local_steps:
        optimizer = adasum.AdasumOptimizer(optimizer, local_steps=local_steps)
        standard = adasum.callbacks.standard()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    images, targets = adasum.shard(data)

    def fit(callbacks: Any = (), **options: Any) -> None:
        model.fit(
            images,
            targets,
            batch_size=settings.batch_size,
            callbacks=[*standard, *callbacks],
            verbose=0,
            **options,
        )

    demo.trace(model, fit)
    return Training(local_steps, model, fit)


def train(training: Training, epoch: int) -> float:
    """One epoch; the seconds from when all ranks begin until all are done."""
    times = []

    def note(_epoch: int, _logs: Any = None) -> None:
        adasum.barrier()
        times.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_epoch_begin=note, on_epoch_end=note)
    training.fit([clock], initial_epoch=epoch, epochs=epoch + 1)
    return times[1] - times[0]


def show(training: Training, epoch: int, seconds: float, test: demo.Images) -> None:
    """Tests this rank's weights and prints the line."""
    images, targets = test
    results = training.model.evaluate(
        images, targets, batch_size=len(images), verbose=0, return_dict=True
    )
    line = {
        "ranks": adasum.size(),
        "local_steps": training.local_steps,
        "parameters": training.model.count_params(),
        "steps": int(training.model.optimizer.iterations) // (epoch + 1),
        "epoch": epoch,
        "seconds": seconds,
        "accuracy": results["accuracy"],
    }
    print(json.dumps(line), flush=True)


def take_turns(trainings: Sequence[Training], epochs: int, test: demo.Images) -> None:
    """An epoch of each, so many times; rank 0 prints."""
    for epoch in range(epochs):
        for training in trainings:
            seconds = train(training, epoch)
            if adasum.rank() == 0:
                show(training, epoch, seconds, test)


def start() -> None:
    """Each rank computes with one thread, on a CPU."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    adasum.init()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local-steps", type=report.integers, default=[0, 1, 16])
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    options = parser.parse_args()
    start()
    settings = Settings(epochs=options.epochs, learning_rate=options.learning_rate)
    data, test = demo.load_data(settings)
    trainings = [prepare(local_steps, data, settings) for local_steps in options.local_steps]
    take_turns(trainings, options.epochs, test)


if __name__ == "__main__":
    main()
