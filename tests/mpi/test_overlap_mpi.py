"""Syncs beside training, against the same workers written out in NumPy."""

import itertools

import numpy as np
import pytest
import worker
from ranks import on_ranks

from tf_adasum import reference


def _simulate(gradients, local_steps, rate):
    """The weights [step][rank] of one variable, and those of all after a sync in the end."""
    steps, ranks, _ = gradients.shape
    agreed = np.zeros(gradients.shape[2:])
    weights = [agreed.copy() for _ in range(ranks)]
    under_way = None
    history = []

    def land():
        nonlocal agreed, weights, under_way
        if under_way is not None:
            combined = reference.tree(under_way)
            agreed = agreed + combined
            weights = [w + combined - d for w, d in zip(weights, under_way, strict=True)]
        under_way = None

    for step in range(steps):
        weights = [w - rate * gradients[step, r] for r, w in enumerate(weights)]
        if (step + 1) % local_steps == 0:
            land()
            under_way = [w - agreed for w in weights]
        history.append(weights)
    land()
    return history, agreed + reference.tree([w - agreed for w in weights])


@on_ranks(2, 3, timeout=120)
def test_equals_the_formula():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    def stepper(optimizer, variable, compiled):
        return tf.function(lambda g: optimizer.apply([g], [variable]), jit_compile=compiled)

    rank, size = adasum.rank(), adasum.size()
    gradients = np.random.default_rng(0).normal(size=(8, size, 5))
    for local_steps, compiled in itertools.product([1, 3], worker.COMPILED):
        variable = keras.Variable(np.zeros(5), dtype="float64")
        optimizer = adasum.AdasumOptimizer(
            keras.optimizers.SGD(0.5), local_steps=local_steps, overlap=True
        )
        optimizer.build([variable])
        step = stepper(optimizer, variable, compiled)
        history, end = _simulate(gradients, local_steps, 0.5)
        for i, want in enumerate(history):
            step(tf.constant(gradients[i, rank]))
            what = f"step {i}, local_steps={local_steps}, compiled={compiled}"
            np.testing.assert_allclose(variable.numpy(), want[rank], atol=1e-12, err_msg=what)
        optimizer.sync()
        np.testing.assert_allclose(variable.numpy(), end, atol=1e-12)
        assert len({row.tobytes() for row in worker.gathered(variable)}) == 1
        # Nothing is left: a second one changes nothing.
        before = variable.numpy()
        optimizer.sync()
        np.testing.assert_array_equal(variable.numpy(), before)


@on_ranks(2, 3, timeout=120)
def test_fit_with_uneven_batches_and_checkpoints():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.5), local_steps=2, overlap=True
    )
    model.compile(optimizer, "mse")
    folder = worker.shared_folder()
    saves = keras.callbacks.ModelCheckpoint(folder / f"{rank}.keras", save_freq=3)
    data = worker.dataset(rank, [9, 4, 7][rank], "float32")
    model.fit(data, epochs=3, verbose=0, callbacks=[*adasum.callbacks.standard(), saves])
    assert len(worker.hashes(model)) == 1
    assert all(np.isfinite(w).all() for w in model.get_weights())
    if rank == 0:
        loaded = keras.models.load_model(folder / "0.keras")
        assert loaded.optimizer.get_config()["overlap"] is True
    adasum.barrier()
    worker.remove(folder)


@on_ranks(3)
def test_a_change_that_is_not_finite():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), overlap=True)
    bad = [np.nan, 1.0] if rank == 1 else [-1.0 - rank, 0.0]
    optimizer.apply([tf.constant(bad)], [variable])
    optimizer.sync()
    want = reference.tree([np.array([1.0, 0.0]), np.zeros(2), np.array([3.0, 0.0])])
    np.testing.assert_allclose(variable.numpy(), want, rtol=1e-6)

    variable = keras.Variable(np.zeros(2, "float32"))
    strict = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), overlap=True, nonfinite="raise")
    strict.apply([tf.constant(bad)], [variable])
    with pytest.raises(tf.errors.InvalidArgumentError, match="tensor 0 of rank 1"):
        strict.sync()


@on_ranks(2)
def test_two_optimizers_and_other_collectives_between():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
    optimizers = [
        adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), overlap=True, op=adasum.Average)
        for _ in variables
    ]
    for _ in range(5):
        for i, (optimizer, variable) in enumerate(zip(optimizers, variables, strict=True)):
            optimizer.apply([tf.fill([3], -float((rank + 1) * (i + 1)))], [variable])
            total = adasum.allreduce(tf.constant([1.0 + rank]), op=adasum.Sum)
            np.testing.assert_array_equal(total, [3.0])
    for i, (optimizer, variable) in enumerate(zip(optimizers, variables, strict=True)):
        optimizer.sync()
        np.testing.assert_allclose(variable.numpy(), 5 * 1.5 * (i + 1), rtol=1e-6)


@on_ranks(2)
def test_ranks_that_disagree_about_it():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), overlap=adasum.rank() == 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"overlap=(True|False)"):
        optimizer.apply([tf.ones(2)], [variable])


@on_ranks(2, fresh=True)
def test_an_exit_with_a_sync_under_way():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    variable = keras.Variable(np.zeros(100_000, "float32"))
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), overlap=True)
    optimizer.apply([tf.fill([100_000], 1.0 + adasum.rank())], [variable])


def test_what_does_not_go_together():
    import keras

    import tf_adasum as adasum

    with pytest.raises(ValueError, match="`overlap` and `average_inner_state` do not go together"):
        adasum.AdasumOptimizer("sgd", overlap=True, average_inner_state=True)
    variable = keras.Variable(np.ones(2))
    variable.constraint = keras.constraints.UnitNorm(axis=0)
    optimizer = adasum.AdasumOptimizer("sgd", overlap=True)
    with pytest.raises(ValueError, match="`overlap` and constraints"):
        optimizer.build([variable])
