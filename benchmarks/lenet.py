"""LeNet-5 and how the paper's section 5.4 trains it, scaled to what `simulation` can carry."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import keras
import numpy as np
import simulation

BASE_RATE = 0.0328
"""The paper's highest rate for one worker that still reaches the accuracy in 2 epochs."""
WARMUP = 0.17

# Debian's package dataset-fashion-mnist.
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: what it is told by in a file of results."""

    workers: int
    op: str = "adasum"
    rate: float = BASE_RATE
    """The highest rate of the schedule."""
    seed: int = 0
    """Of the weights at first and of the order of the data."""
    data: str = "fashion_mnist"
    local_steps: int = 1
    inner_state: str = "local"
    wire_dtype: str | None = None
    error_feedback: bool = False
    batch: int = 32
    epochs: int = 2
    momentum: float = 0.9
    train_images: int = 60000
    side: int = 28
    """Of the images, in pixels: 28 as they are; with 14 a step takes a quarter of the time."""
    outer_momentum: float = 0.0
    joined_by: str = "sum"

    @property
    def steps(self) -> int:
        """Of each worker."""
        return simulation.steps(self.train_images, self.workers, self.batch, self.epochs)


class WarmupAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Up from zero to `peak` in the first part `warmup` of the steps, then down to zero.

    `peak` is a variable, so that a traced step can be used with another one.
    """

    def __init__(self, steps: int, warmup: float = WARMUP):
        self.peak = keras.Variable(BASE_RATE, trainable=False, name="peak")
        self.steps, self.warmup = steps, warmup

    def __call__(self, step: Any) -> Any:
        # Of the steps 0, ..., steps - 1 neither end has a rate of zero.
        done = (keras.ops.cast(step, "float32") + 1) / (self.steps + 1)
        return self.peak * keras.ops.minimum(done / self.warmup, (1 - done) / (1 - self.warmup))

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "warmup": self.warmup}


def model(side: int = 28) -> keras.Model:
    """LeNet-5 with ReLU and max pooling: images of one channel to 10 classes' logits.

    28 x 28 pixels, 44,426 weights; or 14 x 14, kernels of 3 x 3 in place of 5 x 5, 19,754 weights.
    """
    layers = keras.layers
    kernel = {28: 5, 14: 3}[side]
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(6, kernel, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, kernel, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )


Images = tuple[np.ndarray, np.ndarray]


def load(data: str) -> tuple[Images, Images]:
    """Training and test images, float32 with mean 0 and deviation 1 over all pixels, and labels.

    Args:
        data: "fashion_mnist", of Debian's package dataset-fashion-mnist if that is installed and
            else as Keras finds it; or "mnist", as Keras finds it.

    Raises:
        RuntimeError: where the data is not on this machine and cannot be got.
    """
    if data == "fashion_mnist" and _DEBIAN.is_dir():
        parts = [_idx(name, _DEBIAN) for name in ("train", "t10k")]
    else:
        try:
            parts = list(getattr(keras.datasets, data).load_data())
        except Exception as error:
            raise RuntimeError(
                f"{data} cannot be loaded ({error}). For Fashion-MNIST without a network install "
                "Debian's package dataset-fashion-mnist."
            ) from error
    mean, deviation = parts[0][0].mean(), parts[0][0].std()
    return tuple(
        (((x - mean) / deviation).astype(np.float32)[..., None], y.astype(np.int32))
        for x, y in parts
    )


def resized(images: np.ndarray, side: int) -> np.ndarray:
    """Images whose pixels are means of 1 x 1 or 2 x 2 (or more) pixels of these."""
    by = images.shape[1] // side
    return images.reshape(-1, side, by, side, by, 1).mean((2, 4))


def _idx(name: str, folder: Path) -> Images:
    images = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(
        labels, np.uint8, offset=8
    )


class Trainer:
    """Trains on some data, by simulated workers.

    Args:
        data: training and test images, of `load`.
    """

    def __init__(self, data: tuple[Images, Images]):
        self._train, self._test = data
        # By what the traced step depends on.
        self._simulations: dict[tuple, tuple[simulation.Simulation, WarmupAndDecay]] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """Trains and tests.

        Returns:
            accuracy: on the test images, from 0 to 1. Where the training stopped because a worker's
                change was not finite three times in a row, that of the weights until then.
            stopped_at: the sync at which it did, or None.
            loss: mean over the last tenth of the syncs, of the training batches.
            orthogonality: the weights' mean, in ten parts of the training.
            sent_bytes: by all workers together in a sync, with each on a host of its own.
        """
        simulated, schedule = self._simulation(run)
        schedule.peak.assign(run.rate)
        keras.utils.set_random_seed(run.seed)
        simulated.start(
            [v.numpy() for v in model(run.side).trainable_variables],
            op=run.op,
            inner_state=run.inner_state,
            outer_momentum=run.outer_momentum,
            joined_by=run.joined_by,
            wire_dtype=run.wire_dtype,
            error_feedback=run.error_feedback,
            hosts=range(run.workers),
        )
        losses, orthogonality, stopped_at = [], [], None
        order = simulation.windows(
            run.train_images, run.workers, run.batch, run.epochs, run.local_steps, run.seed
        )
        for examples in order:
            try:
                losses.append(simulated.window(examples))
            except ValueError:
                stopped_at = len(losses)
                break
            orthogonality.append(np.mean(simulated.orthogonality))
        tenth = max(1, len(losses) // 10)
        measured = run.op == "adasum" and run.workers > 1 and len(orthogonality) >= 10
        return {
            "accuracy": accuracy(
                simulated.load(), (resized(self._test[0], run.side), self._test[1])
            ),
            "stopped_at": stopped_at,
            "loss": _finite(np.mean(losses[-tenth:])),
            "orthogonality": [
                _finite(np.nanmean(part)) for part in np.array_split(orthogonality, 10)
            ]
            if measured
            else None,
            "sent_bytes": simulated.sent_bytes // max(1, len(losses)),
        }

    def _simulation(self, run: Run) -> tuple[simulation.Simulation, WarmupAndDecay]:
        key = (run.workers, run.steps, run.momentum, run.train_images, run.side)
        if key not in self._simulations:
            schedule = WarmupAndDecay(run.steps)
            images, labels = self._train
            simulated = simulation.Simulation(
                model(run.side),
                keras.optimizers.SGD(schedule, momentum=run.momentum),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                (resized(images[: run.train_images], run.side), labels[: run.train_images]),
                run.workers,
            )
            self._simulations[key] = simulated, schedule
        return self._simulations[key]


def accuracy(of: keras.Model, test: Images) -> float:
    """The part of the images whose class it names right."""
    named = np.argmax(of.predict(test[0], batch_size=1000, verbose=0), axis=1)
    return float(np.mean(named == test[1]))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
