"""AdasumOptimizer on real ranks, against the same workers' training written out in NumPy."""

import hashlib

import numpy as np
import pytest
import worker
from ranks import on_ranks, run_ranks

from tf_adasum import reference

# float64 models: what is left is the rounding of a few hundred operations.
EXACT = 1e-12


def _hashes(model):
    """A hash of the weights from every rank."""
    from tf_adasum import core

    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).digest()
    return {row.tobytes() for row in core.allgather(np.frombuffer(digest, np.uint8).reshape(1, -1))}


def _check_each_sync(weights_of_rank, steps, want, *, relative=EXACT, local_steps=3, **options):
    import keras

    import tf_adasum as adasum

    dtype = options.pop("dtype", "float64")
    callbacks = options.pop("callbacks", [])
    model = worker.build_model(weights_of_rank, dtype)
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(worker.RATE, momentum=worker.MOMENTUM),
        local_steps,
        op=options.pop("op", adasum.Adasum),
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, **options)
    seen = []

    class AfterEachSync(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(optimizer.syncs) > len(seen):
                worker.assert_weights(model, want[len(seen)], relative, f"sync {len(seen)}")
                seen.append(batch)

    model.fit(
        worker.dataset(adasum.rank(), steps, dtype),
        callbacks=[*callbacks, AfterEachSync()],
        shuffle=False,
        verbose=0,
    )
    assert seen == [b for b in range(steps) if (b + 1) % local_steps == 0]
    worker.assert_weights(model, want[-1], relative, "after fit")
    assert int(optimizer.syncs) == len(want)
    assert int(optimizer.iterations) == steps
    assert len(_hashes(model)) == 1
    return model


@on_ranks(3)
def test_every_sync_equals_the_simulation():
    import tf_adasum as adasum

    # Different weights on each rank: the standard callbacks give all of them rank 0's.
    weights = [worker.initial_weights(seed) for seed in range(3)]
    mine = weights[adasum.rank()]
    # 10 steps are no multiple of 3: the last one is synced when fit ends.
    want = worker.simulate(weights, 10, 3)
    _check_each_sync(mine, 10, want, callbacks=adasum.callbacks.standard())
    _check_each_sync(mine, 10, want, callbacks=adasum.callbacks.standard(), run_eagerly=True)
    want = worker.simulate(weights, 4, 1)
    _check_each_sync(mine, 4, want, local_steps=1, callbacks=adasum.callbacks.standard())
    # float32: every step rounds, and a step's error is carried along.
    want = worker.simulate(weights, 10, 3)
    standard = adasum.callbacks.standard()
    _check_each_sync(mine, 10, want, callbacks=standard, dtype="float32", relative=1e-5)


@on_ranks(3)
def test_without_callbacks_a_first_gradient_at_other_weights_is_dropped():
    import tf_adasum as adasum

    weights = [worker.initial_weights(seed) for seed in range(3)]
    want = worker.simulate(weights, 7, 3, drop_first=True)
    _check_each_sync(weights[adasum.rank()], 7, want)
    _check_each_sync(weights[adasum.rank()], 7, want, run_eagerly=True)
    # Weights that are equal from the start: nothing is dropped.
    want = worker.simulate([weights[0]] * 3, 7, 3)
    _check_each_sync(weights[0], 7, want)


@on_ranks(3)
def test_other_ops():
    import tf_adasum as adasum

    weights = worker.initial_weights(0)
    for op, combine in (
        (adasum.Sum, lambda v: np.sum(v, axis=0)),
        (adasum.Average, lambda v: np.mean(v, axis=0)),
    ):
        _check_each_sync(weights, 7, worker.simulate([weights] * 3, 7, 3, combine), op=op)


@on_ranks(3)
def test_the_sign_of_the_delta():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    # Every rank goes from 1.0 to 0.9, so the result is 0.9: neither 1.1 nor 0.7.
    variable = keras.Variable([1.0])
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1))
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    np.testing.assert_allclose(variable.numpy(), [0.9], rtol=1e-6)
    # Orthogonal steps are added: nothing of them gets lost, nothing is counted twice.
    variable = keras.Variable([1.0, 1.0, 1.0])
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1))
    optimizer.apply_gradients([(tf.one_hot(adasum.rank(), 3), variable)])
    np.testing.assert_allclose(variable.numpy(), [0.9, 0.9, 0.9], rtol=1e-6)


@on_ranks(2)
def test_custom_loop():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    weights, steps = worker.initial_weights(0), 8
    want = worker.simulate([weights] * 2, steps, 4)
    for compiled in (False, True):
        model = worker.build_model(weights)
        optimizer = adasum.AdasumOptimizer(
            keras.optimizers.SGD(worker.RATE, momentum=worker.MOMENTUM), local_steps=4
        )

        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            # An iterator, as custom loops give it.
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        if compiled:
            step = tf.function(step)
        for i, (x, y) in enumerate(worker.dataset(adasum.rank(), steps)):
            step(x, y)
            if i == 3:
                worker.assert_weights(model, want[0], EXACT, "first sync")
        worker.assert_weights(model, want[1], EXACT, "second sync")
        optimizer.sync()  # nothing is left to do
        worker.assert_weights(model, want[1], EXACT, "sync without local steps")


@on_ranks(2)
def test_sync_in_the_middle_of_a_window():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    for call in (lambda f: f(), lambda f: tf.function(f)()):
        variable = keras.Variable([0.0, 0.0])
        optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=10)
        optimizer.sync()  # not built yet: nothing to do
        for _ in range(3):
            optimizer.apply_gradients([(-tf.one_hot(rank, 2), variable)])
        assert variable.numpy()[1 - rank] == 0
        call(optimizer.sync)
        assert variable.numpy().tolist() == [3, 3] and int(optimizer.local_step) == 0
        call(optimizer.sync)
        assert variable.numpy().tolist() == [3, 3] and int(optimizer.syncs) == 1
        # A rank without a local step in this window brings a delta of zero.
        optimizer.apply_gradients([(-tf.one_hot(rank, 2), variable)])
        if rank == 1:
            variable.assign([3.0, 3.0])
            optimizer.local_step.assign(0)
        call(optimizer.sync)
        assert variable.numpy().tolist() == [4, 3] and int(optimizer.syncs) == 2


@on_ranks(2)
def test_weights_loaded_between_windows():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    variable = keras.Variable([0.0, 0.0])
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0))
    step = tf.function(lambda: optimizer.apply_gradients([(-tf.one_hot(rank, 2), variable)]))
    step()
    assert variable.numpy().tolist() == [1, 1]
    # The jump is not part of anybody's delta.
    variable.assign([50.0, 70.0])
    step()
    assert variable.numpy().tolist() == [51, 71]
    # A sync that has nothing to do does not start a window.
    optimizer.sync()
    variable.assign([5.0, 7.0])
    step()
    assert variable.numpy().tolist() == [6, 8]
    # Loaded on one rank only: an error on every rank instead of weights that differ from then on.
    variable.assign([float(rank), 0.0])
    said = r"(?s)weights at the start of the window.*rank 0 with start of tensor 0, variable, with"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        step()


@on_ranks(2)
def test_ranks_that_disagree_about_the_training():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()

    def step(paths=("a", "b"), local_steps=1, inner="SGD", **options):
        variables = []
        for path in paths:
            with keras.name_scope(path):
                variables.append(keras.Variable([1.0], name="kernel"))
        optimizer = adasum.AdasumOptimizer(
            getattr(keras.optimizers, inner)(), local_steps, **options
        )
        optimizer.apply_gradients([(tf.ones(1), v) for v in variables])

    for option, (different, message) in {
        "paths": (
            (("a", "b"), ("b", "a")),
            "rank 0 with tensor 0: a/kernel float32.*rank 1 with tensor 0: b/kernel",
        ),
        "local_steps": ((1, 2), "rank 0 .*local_steps=1.*rank 1 .*local_steps=2"),
        "inner": (("SGD", "Adam"), r"optimizer\(SGD\).*optimizer\(Adam\)|Adam.*SGD"),
        "nonfinite": (("skip", "raise"), "nonfinite=skip.*nonfinite=raise|raise.*skip"),
    }.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            step(**{option: different[rank]})
    # What Keras has counted on one rank alone is no difference.
    if rank == 0:
        adasum.AdasumOptimizer("sgd")
        keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(adasum.AdasumOptimizer("sgd"), "mse", jit_compile=False)
    x = np.random.default_rng(rank).normal(size=(8, 2))
    model.fit(x, x[:, :1], verbose=0, callbacks=adasum.callbacks.standard())
    assert len(_hashes(model)) == 1


@on_ranks(2)
def test_a_model_that_is_built_by_its_first_batch():
    import keras

    import tf_adasum as adasum

    keras.utils.set_random_seed(adasum.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(adasum.AdasumOptimizer("adam", local_steps=2), "mse", jit_compile=False)
    model.fit(
        worker.dataset(adasum.rank(), 5, "float32"),
        callbacks=adasum.callbacks.standard(),
        verbose=0,
    )
    assert len(_hashes(model)) == 1


@on_ranks(2)
def test_standard_callbacks():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = adasum.AdasumOptimizer("sgd", local_steps=4)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    at_validation = []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            at_validation.append(len(_hashes(model)))

        def on_epoch_end(self, epoch, logs=None):
            at_validation.append(len(_hashes(model)))

    data = worker.dataset(rank, 6, "float32")
    history = model.fit(
        data,
        validation_data=data,
        epochs=2,
        callbacks=[*adasum.callbacks.standard(), Look()],
        verbose=2,  # shown by rank 0 only
    )
    # Weights and moving statistics are equal whenever they are looked at.
    assert at_validation == [1, 1, 1, 1] and len(_hashes(model)) == 1
    # The metrics are the mean over the ranks.
    from tf_adasum import core

    for name, values in history.history.items():
        assert len({row.tobytes() for row in core.allgather(np.array([values]))}) == 1, name
    alone = model.evaluate(data, verbose=0, return_dict=True)["loss"]
    mean = core.allreduce(np.array([alone]), "average")[0]
    np.testing.assert_allclose(history.history["val_loss"][-1], mean, rtol=1e-5)
    # Another fit: the progress bar's setting is each fit's own.
    model.fit(data, epochs=1, callbacks=adasum.callbacks.standard(), verbose=0)
    assert len(_hashes(model)) == 1


def test_what_is_printed():
    source = """
import sys, numpy as np, keras, tf_adasum as adasum

def fit(optimizer, seed, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(seed).normal(size=(64, 2))
    callbacks = adasum.callbacks.standard()
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, callbacks=callbacks, **options)
    print(f"end of {seed} on {adasum.rank()}", file=sys.stderr)

fit(adasum.AdasumOptimizer("sgd"), adasum.rank(), verbose=2)
fit("sgd", 10, verbose=0)
fit(adasum.AdasumOptimizer("sgd"), 20, verbose=0)
fit(adasum.AdasumOptimizer("sgd"), 30, verbose=0)
"""
    ended = run_ranks(3, source, timeout=120)
    assert ended.code == 0, ended.output
    # Rank 0 shows progress, and that alone if each rank has data of its own.
    assert ended.output.count("loss:") == 1
    # An optimizer that is not wrapped gives one warning.
    assert ended.output.count("not wrapped in AdasumOptimizer") == 1
    # So do the same data on all ranks, however often.
    assert ended.output.count("the same change of the weights") == 1
    of_rank_0 = [
        "end of 0 on 0",
        "not wrapped",
        "end of 10 on 0",
        "the same change",
        "end of 20 on 0",
    ]
    places = [ended.output.index(text) for text in of_rank_0]
    assert places == sorted(places)


@on_ranks(2)
def test_averaged_weights_at_the_end_of_fit():
    import keras

    import tf_adasum as adasum

    weights = worker.initial_weights(0)
    model = worker.build_model(weights)
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(adasum.AdasumOptimizer(inner, local_steps=2), "mse", jit_compile=False)
    model.fit(worker.dataset(adasum.rank(), 4), verbose=0)
    assert len(_hashes(model)) == 1


@on_ranks(2)
def test_constraints_hold_after_a_sync():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    variable = keras.Variable([0.5, 0.5])
    variable.constraint = keras.constraints.UnitNorm(axis=0)
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.3))
    optimizer.apply_gradients([(-tf.one_hot(adasum.rank(), 2), variable)])
    np.testing.assert_allclose(np.linalg.norm(variable.numpy()), 1, rtol=1e-6)


def test_the_simulation_is_the_reference_for_one_worker():
    """The yardstick itself: one worker is plain momentum SGD."""
    weights = worker.initial_weights(0)
    (after,) = worker.simulate([weights], 1, 1)
    gradients = worker.gradient(weights, *worker.batches(0, 1)[0])
    for new, old, g in zip(after, weights, gradients, strict=True):
        np.testing.assert_allclose(new, old - worker.RATE * g, rtol=1e-12)
    assert reference.tree([np.ones(2)]).tolist() == [1, 1]
