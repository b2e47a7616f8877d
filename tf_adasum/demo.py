"""`python -m tf_adasum demo`: what Adasum does to a training, on data from scikit-learn.

A small convolutional network learns the 1797 handwritten digits of `load_digits`: once on one
worker, then on several with their changes added up (Sum), and with Adasum after each step and every
fourth. All runs start from the same weights and have the same batch size per worker, base learning
rate, schedule and number of epochs, so N workers take 1/N of the steps, each with N times as many
images.

The rate is from the range that serves one worker best (0.06 to 0.1) and was not tuned for several:
the paper's claim is that Adasum does not need that. The network and the batch size were picked so
that it matters. At a lower rate, such as 0.02, Sum does as well as Adasum with four workers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tf_adasum as adasum
from tf_adasum import launch
from tf_adasum.demo_report import Row, Run, Settings, as_json, format_table, plot, runs

if TYPE_CHECKING:
    import keras

# TensorFlow and what imports it are loaded inside functions: the process that only starts mpirun
# needs none of it, and TensorFlow reads its environment variables when it is loaded.

Images = tuple[np.ndarray, np.ndarray]
"""Images, float32 of shape (number, 8, 8, 1) in [0, 1], and their digits, int32."""


def load_data(settings: Settings) -> tuple[Images, Images]:
    """The training and the test images; the split is the same on every rank and in every call."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(settings.seed).permutation(len(digits.target))
    images = (digits.images[order, ..., np.newaxis] / 16).astype(np.float32)
    targets = digits.target[order].astype(np.int32)
    split = settings.train_images
    return (images[:split], targets[:split]), (images[split:], targets[split:])


def build_model() -> keras.Sequential:
    """Two convolutions and two dense layers, 13,706 weights; the ten outputs are logits."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def schedule(settings: Settings, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """A rate that climbs from 0 for the warm-up's part of `steps`, then falls to 0; linearly."""
    import keras

    class WarmUpAndDecay(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            done = (keras.ops.cast(step, "float32") + 1) / (steps + 1)
            climb, fall = done / settings.warmup, (1 - done) / (1 - settings.warmup)
            return settings.learning_rate * keras.ops.minimum(climb, fall)

        def get_config(self) -> dict[str, Any]:
            return {}

    return WarmUpAndDecay()


def compiled_model(run: Run, settings: Settings, images_per_worker: int) -> keras.Sequential:
    """A model with its initial weights and the optimizer that `run` names."""
    import keras

    keras.utils.set_random_seed(settings.seed)
    steps = settings.epochs * math.ceil(images_per_worker / settings.batch_size)
    optimizer = keras.optimizers.SGD(schedule(settings, steps), momentum=settings.momentum)
    if run.op is not None:
        optimizer = adasum.AdasumOptimizer(
            optimizer, local_steps=run.local_steps, op=getattr(adasum, run.op)
        )
    model = build_model()
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # A network this small would be compiled for longer than it is trained.
        jit_compile=False,
    )
    return model


def trace(model: keras.Sequential, fit: Callable[..., Any]) -> None:
    """Makes `fit` trace the model's training step, and puts every weight and counter back."""
    model.optimizer.build(model.trainable_variables)
    variables = [*model.weights, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    fit(epochs=1, steps_per_epoch=1)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)


def train(run: Run, settings: Settings, data: Images, test: Images) -> Row:
    """Trains on this rank's part of `data`. Called by every rank, or for the plain run by rank 0.

    After each epoch, when all ranks hold the same weights, rank 0 tests them; the clock stops.

    Returns:
        The row. On ranks other than 0 it has no test results.
    """
    import keras

    together = run.op is not None
    images, targets = adasum.shard(data) if together else data
    model = compiled_model(run, settings, len(images))
    accuracy: list[float] = []
    loss: list[float] = []
    seconds = started = 0.0

    def start_clock(epoch: int, logs: Any = None) -> None:
        nonlocal started
        if together:
            adasum.barrier()
        started = time.perf_counter()

    def stop_clock_and_test(epoch: int, logs: Any = None) -> None:
        nonlocal seconds
        if together:
            adasum.barrier()
        seconds += time.perf_counter() - started
        if adasum.rank() == 0:
            results = model.evaluate(*test, batch_size=len(test[0]), verbose=0, return_dict=True)
            accuracy.append(results["accuracy"])
            loss.append(results["loss"])
            print("#", end="", flush=True)

    def fit(callbacks: Sequence[keras.callbacks.Callback] = (), **options: Any) -> None:
        standard = adasum.callbacks.standard() if together else []
        model.fit(
            images,
            targets,
            batch_size=settings.batch_size,
            callbacks=[*standard, *callbacks],
            verbose=0,
            **options,
        )

    trace(model, fit)
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=start_clock, on_epoch_end=stop_clock_and_test
    )
    fit([clock], epochs=settings.epochs)
    return Row(
        run=run,
        test_accuracy=accuracy,
        test_loss=loss,
        steps=int(model.optimizer.iterations),
        syncs=int(model.optimizer.syncs) if together else 0,
        seconds=seconds,
        weights=hash_weights(model, together),
    )


def hash_weights(model: keras.Sequential, together: bool) -> list[str]:
    """The SHA-256 of the model's weights on every rank; on this one if not `together`."""
    sha = hashlib.sha256()
    for weight in model.get_weights():
        sha.update(np.ascontiguousarray(weight).tobytes())
    mine = np.frombuffer(sha.digest(), dtype=np.int32)[np.newaxis]
    everyones = np.asarray(adasum.allgather(mine)) if together else mine
    return [one.tobytes().hex() for one in everyones]


def compare(settings: Settings, output: Path, json_file: Path | None) -> int:
    """Makes all runs and, on rank 0, shows them. Called by every rank.

    Returns:
        The exit status: 0 if after each run all ranks held the same weights.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # it is announced whatever the log level
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")  # ranks that share one would each claim its memory

    adasum.init()
    first = adasum.rank() == 0
    data, test = load_data(settings)
    if first:
        print(
            f"{len(data[0])} images of handwritten digits to train on, {len(test[0])} to test; "
            f"{settings.epochs} epochs, {settings.batch_size} images a step and worker"
        )
    rows = []
    for run in runs(adasum.size()):
        if first:
            print(f"{run.label:34} ", end="", flush=True)
        if first or run.op is not None:
            rows.append(train(run, settings, data, test))
        adasum.barrier()
        if first:
            print(flush=True)
    if first:
        ranks, cores = adasum.local_size(), os.cpu_count() or 1
        slower = f", so slower than on {ranks} machines" if ranks > cores else ""
        print(f"\n{format_table(rows)}\n")
        print(f"Seconds are of training steps alone. Ranks: {ranks}, cores: {cores}{slower}.")
        plot(rows, output)
        print(f"Learning curves: {output.resolve()}", flush=True)
        if json_file is not None:
            json_file.write_text(as_json(rows, settings))
    adasum.barrier()
    return 0 if all(row.weights_equal for row in rows) else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder. Received: {text}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo, under mpirun if this process is not.

    Args:
        argv: the options; by default those of the command line after `demo`.

    Returns:
        The exit status. A process that no launcher started does not return: it becomes mpirun.
    """
    argv = list(sys.argv[2:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    epochs, output = Settings.epochs, Path("adasum_demo.png")
    add = parser.add_argument
    add(
        "--np",
        type=_positive,
        default=4,
        help="workers (4); a launcher's number counts if there is one",
    )
    add("--epochs", type=_positive, default=epochs, help=f"passes over the images ({epochs})")
    add("--output", type=_file, default=output, help=f"PNG of the learning curves ({output})")
    add("--json", type=_file, metavar="FILE", help="write the table to this file, too")
    options = parser.parse_args(argv)

    missing = [name for name in ("sklearn", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        names = " and ".join(missing)
        print(f"The demo needs {names}: pip install tf-adasum[demo]", file=sys.stderr)
        return 2

    launcher, _ = launch.launched_by()
    if launcher is not None:
        return compare(Settings(epochs=options.epochs), options.output, options.json)

    try:
        mpirun = launch.mpirun_command(options.np)
    except FileNotFoundError as error:
        print(f"The demo starts itself under MPI, but {error}.", file=sys.stderr)
        return 2
    command = [*mpirun, sys.executable, "-m", "tf_adasum", "demo", *argv]
    print(f"Starting {shlex.join(command)}", flush=True)
    # In place of this process, so that a signal or the exit status needs no passing on.
    os.execve(command[0], command, launch.environment())
