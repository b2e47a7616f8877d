"""Several workers with plain Keras optimizers in one process: what real ranks must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_adasum import reference

Gradients = Callable[[int, int, Sequence[Any]], list[Any]]
"""(worker, step, variables) -> one gradient, or None, for each variable."""


def simulate(
    make_optimizer: Callable[[], Any],
    start: Sequence[np.ndarray],
    gradients: Gradients,
    *,
    workers: int,
    steps: int,
    local_steps: int,
    average_state: bool = False,
    prepare: Callable[[Any], None] = lambda variable: None,
) -> list[list[np.ndarray]]:
    """The weights, equal on all workers, after each window of `local_steps` updates.

    Every worker has a plain optimizer and variables of its own; between windows NumPy combines the
    changes with `reference.tree`. Updates are counted by the optimizer's `iterations`.
    """
    import keras

    variables = [
        [keras.Variable(w, name=f"w{i}") for i, w in enumerate(start)] for _ in range(workers)
    ]
    optimizers = [make_optimizer() for _ in range(workers)]
    for optimizer, own in zip(optimizers, variables, strict=True):
        for variable in own:
            prepare(variable)
        optimizer.build(own)
    start = [np.array(w) for w in start]
    after, synced_at = [], 0
    for step in range(steps):
        for worker, (optimizer, own) in enumerate(zip(optimizers, variables, strict=True)):
            optimizer.apply(gradients(worker, step, own), own)
        updates = int(optimizers[0].iterations)
        if updates - synced_at < local_steps:
            continue
        synced_at = updates
        for i, begin in enumerate(start):
            deltas = [own[i].numpy() - begin for own in variables]
            start[i] = (begin + reference.tree(deltas)).astype(begin.dtype)
            for own in variables:
                if own[i].constraint is not None:
                    own[i].assign(own[i].constraint(keras.ops.convert_to_tensor(start[i])))
                else:
                    own[i].assign(start[i])
            start[i] = variables[0][i].numpy()
        if average_state:
            for states in zip(*(o.variables for o in optimizers), strict=True):
                if "float" in states[0].dtype:
                    mean = np.mean([s.numpy() for s in states], axis=0)
                    for s in states:
                        s.assign(mean)
        after.append([w.copy() for w in start])
    return after


def run(
    optimizer: Any,
    start: Sequence[np.ndarray],
    gradients: Gradients,
    *,
    steps: int,
    prepare: Callable[[Any], None] = lambda variable: None,
) -> list[list[np.ndarray]]:
    """The weights of this rank after each of the optimizer's syncs; in a tf.function."""
    import keras
    import tensorflow as tf

    from tf_adasum import core

    variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(start)]
    for variable in variables:
        prepare(variable)
    # As fit does: some optimizers start their state from the weights, which is lost in a trace.
    optimizer.build(variables)
    step = tf.function(lambda g: optimizer.apply(g, variables))
    after: list[list[np.ndarray]] = []
    for i in range(steps):
        step(gradients(core.rank(), i, variables))
        if int(optimizer.syncs) > len(after):
            after.append([v.numpy() for v in variables])
    return after


def assert_equal(got: list, want: list, relative: float, what: str) -> None:
    assert len(got) == len(want), f"{what}: {len(got)} syncs instead of {len(want)}"
    for sync, (gots, wants) in enumerate(zip(got, want, strict=True)):
        for i, (g, w) in enumerate(zip(gots, wants, strict=True)):
            error = np.abs(g - w).max() / np.abs(w).max()
            assert error <= relative, f"{what}, sync {sync}, variable {i}: relative error {error}"
