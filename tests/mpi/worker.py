"""A small model, its data, and the same workers' training written out in NumPy."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from tf_adasum import native, reference

# What `jit_compile` may be: TensorFlow before 2.21 comes without what XLA needs.
COMPILED = (False, True) if native.build_info()["xla"] else (False,)

# Keras rounds both to float32, so they are numbers that float32 holds exactly.
RATE, MOMENTUM = 0.0625, 0.875
LAYERS = ((6, 5), (5, 2))


def initial_weights(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        w
        for shape in LAYERS
        for w in (rng.normal(size=shape) * 0.5, rng.normal(size=shape[1:]) * 0.1)
    ]


def batches(rank: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(100 + rank)
    return [(rng.normal(size=(4, 6)), rng.normal(size=(4, 2))) for _ in range(steps)]


def gradient(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean squared error of a tanh layer and a linear one."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    error = 2 * (hidden @ w2 + b2 - y) / y.size
    back = (error @ w2.T) * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


def simulate(
    weights: list[list[np.ndarray]],
    steps: int,
    local_steps: int,
    combine=reference.tree,
    drop_first: bool = False,
) -> list[list[np.ndarray]]:
    """The weights, equal on all workers, after each sync.

    Each worker takes steps of SGD with momentum, its own, on its own batches; then the changes
    since the last sync are combined for each variable. `weights` are each worker's at its first
    gradient: worker 0's count, and with `drop_first` the other workers' first gradients do not.
    """
    workers = len(weights)
    start = weights[0]
    own = [[w.copy() for w in start] for _ in range(workers)]
    momenta = [[np.zeros_like(w) for w in start] for _ in range(workers)]
    data = [batches(rank, steps) for rank in range(workers)]
    after_syncs = []
    for step in range(steps):
        for r in range(workers):
            if drop_first and step == 0 and r > 0:
                continue
            for i, g in enumerate(gradient(own[r], *data[r][step])):
                momenta[r][i] = MOMENTUM * momenta[r][i] - RATE * g
                own[r][i] = own[r][i] + momenta[r][i]
        if (step + 1) % local_steps == 0 or step + 1 == steps:
            deltas = [[own[r][i] - start[i] for r in range(workers)] for i in range(len(start))]
            start = [s + combine(d) for s, d in zip(start, deltas, strict=True)]
            own = [[w.copy() for w in start] for _ in range(workers)]
            after_syncs.append(start)
    return after_syncs


def build_model(weights: list[np.ndarray] | None = None, dtype: str = "float64"):
    import keras

    # Not only the layers: losses are computed in this type too.
    keras.config.set_floatx(dtype)
    model = keras.Sequential(
        [
            keras.Input((LAYERS[0][0],)),
            keras.layers.Dense(LAYERS[0][1], activation="tanh"),
            keras.layers.Dense(LAYERS[1][1]),
        ]
    )
    if weights is not None:
        model.set_weights(weights)
    return model


def dataset(rank: int, steps: int, dtype: str = "float64"):
    import tensorflow as tf

    xs, ys = (np.stack(part).astype(dtype) for part in zip(*batches(rank, steps), strict=True))
    return tf.data.Dataset.from_tensor_slices((xs, ys))


def assert_weights(model, want: list[np.ndarray], relative: float, what: str) -> None:
    for got, expected in zip(model.get_weights(), want, strict=True):
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error < relative, f"{what}: relative error {error}"


def gathered(array) -> list[np.ndarray]:
    """Each rank's array, of one shape on all."""
    from tf_adasum import core

    return list(core.allgather(np.asarray(array)[np.newaxis]))


def hashes(model) -> set[bytes]:
    """A hash of the weights from every rank: one element where all ranks' are equal."""
    import hashlib

    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).digest()
    return {row.tobytes() for row in gathered(np.frombuffer(digest, np.uint8))}


def shared_folder() -> Path:
    """A new folder that all ranks know; to be removed by `remove`."""
    from tf_adasum import core

    name = tempfile.mkdtemp() if core.rank() == 0 else ""
    letters = core.broadcast(np.frombuffer(name.encode().ljust(200), np.uint8))
    return Path(letters.tobytes().decode().strip())


def remove(folder: Path) -> None:
    """Removes a folder once no rank looks at it any more."""
    from tf_adasum import core

    core.barrier()
    if core.rank() == 0:
        shutil.rmtree(folder)
