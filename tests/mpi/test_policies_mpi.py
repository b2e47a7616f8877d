"""What happens to all else that an optimizer does: each policy on real ranks, by an oracle."""

import numpy as np
import pytest
import workers
from ranks import on_ranks

from tf_adasum import reference

START = [np.random.default_rng(7).normal(size=shape) for shape in [(6, 4), (4,), (4, 3)]]


def _gradients(worker, step, variables):
    import tensorflow as tf

    rng = np.random.default_rng([worker, step])
    return [tf.constant(rng.normal(size=v.shape)) + 0.1 * v.value for v in variables]


def _check(make, what, steps=6, local_steps=2, prepare=lambda variable: None, start=START):
    import tf_adasum as adasum

    want = workers.simulate(
        make,
        start,
        _gradients,
        workers=adasum.size(),
        steps=steps,
        local_steps=local_steps,
        prepare=prepare,
    )
    optimizer = adasum.AdasumOptimizer(make(), local_steps)
    got = workers.run(optimizer, start, _gradients, steps=steps, prepare=prepare)
    workers.assert_equal(got, want, 1e-10, what)
    return optimizer, got


@on_ranks(2, timeout=120)
def test_clipping_decay_constraints_averages_and_accumulation():
    import keras

    keras.config.set_floatx("float64")
    sgd = keras.optimizers.SGD
    for clip in ({"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.3}):
        _, clipped = _check(lambda c=clip: sgd(0.1, momentum=0.9, **c), f"{clip}")
    _, plain = _check(lambda: sgd(0.1, momentum=0.9), "no clipping")
    assert np.abs(clipped[-1][0] - plain[-1][0]).max() > 0.01

    # Weight decay is the wrapped optimizer's, with its exclusions.
    def decaying():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["w1"])
        return optimizer

    _check(decaying, "weight decay with exclusions")

    # Averages that overwrite the weights are part of what a local step does.
    _check(
        lambda: sgd(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        "ema_overwrite_frequency",
    )

    # A constraint holds after a sync, not only after a local step.
    def unit_norm(variable):
        variable.constraint = keras.constraints.UnitNorm(axis=0)

    unit = [w / np.linalg.norm(w, axis=0) for w in START]
    _, got = _check(lambda: sgd(0.1), "constraint", prepare=unit_norm, start=unit)
    for weights in got:
        for w in weights:
            # The constraint divides by the norm plus 1e-7.
            np.testing.assert_allclose(np.linalg.norm(w, axis=0), 1, rtol=1e-6)

    # Only real updates are counted: 12 gradients are 4 updates, which are 2 windows.
    optimizer, got = _check(
        lambda: sgd(0.1, momentum=0.9, gradient_accumulation_steps=3), "accumulation", steps=12
    )
    assert len(got) == 2 and int(optimizer.iterations) == 4
    # In none of the windows was the change zero: that would show as an undefined orthogonality.
    assert np.isfinite(optimizer.orthogonality.numpy()).all()


@on_ranks(2, timeout=100)
def test_gradients_that_are_only_accumulated_do_not_move_the_start():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(40, 3))

    def fit(optimizer, batches, **dense):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, **dense)])
        model.compile(adasum.AdasumOptimizer(optimizer, 2), "mse", jit_compile=False)
        n = 4 * batches
        model.fit(
            x[:n], y[:n], batch_size=4, epochs=2, verbose=0, callbacks=adasum.callbacks.standard()
        )
        kernels = adasum.allgather(model.get_weights()[0][np.newaxis]).numpy()
        assert kernels[0].tobytes() == kernels[1].tobytes()

    accumulating = {"gradient_accumulation_steps": 2}
    # Averages overwrite the weights, and constraints move them, on batches without a step too.
    averages = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    fit(keras.optimizers.SGD(0.05, **averages, **accumulating), 10)
    fit(keras.optimizers.Adam(0.01, **accumulating), 10 - rank, kernel_constraint="max_norm")


@on_ranks(3, timeout=100)
def test_averaged_weights_when_fit_ends():
    import keras

    import tf_adasum as adasum

    keras.config.set_floatx("float64")

    def make():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    # Each rank's average of its own path, then the mean of the ranks'.
    start = [w.copy() for w in START]
    paths = [[w.copy() for w in START] for _ in range(3)]
    emas = [[np.zeros_like(w) for w in START] for _ in range(3)]
    for step in range(4):
        for r in range(3):
            rng = np.random.default_rng([r, step])
            for w in paths[r]:
                w -= 0.1 * (rng.normal(size=w.shape) + 0.1 * w)
            for i, w in enumerate(paths[r]):
                momentum = 0.5 if step else 0.0  # Keras starts the average at the first weights
                emas[r][i] = momentum * emas[r][i] + (1 - momentum) * w
        if step % 2 == 1:
            for i in range(len(start)):
                start[i] = start[i] + reference.tree([paths[r][i] - start[i] for r in range(3)])
                for r in range(3):
                    paths[r][i] = start[i].copy()
    averages = [np.mean([emas[r][i] for r in range(3)], axis=0) for i in range(len(START))]

    variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(START)]
    optimizer = adasum.AdasumOptimizer(make(), 2)
    for step in range(4):
        optimizer.apply(_gradients(adasum.rank(), step, variables), variables)
    for variable, w in zip(variables, start, strict=True):
        np.testing.assert_allclose(variable.numpy(), w, rtol=1e-12)
    optimizer.finalize_variable_values(variables)
    for variable, w in zip(variables, averages, strict=True):
        np.testing.assert_allclose(variable.numpy(), w, rtol=1e-12)


@on_ranks(2)
def test_missing_gradients_embeddings_and_frozen_layers():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    # A variable without a gradient stays, and does not disturb the others.
    used, unused = keras.Variable([1.0, 1.0]), keras.Variable([5.0])
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0))
    step = tf.function(lambda g: optimizer.apply([g, None], [used, unused]))
    step(-tf.one_hot(rank, 2))
    assert used.numpy().tolist() == [2, 2] and unused.numpy().tolist() == [5]

    # Rows of an embedding that one rank has touched reach all ranks; others stay.
    table = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=2)

    @tf.function
    def look_up(row):
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(tf.gather(table.value, [row]))
        gradient = tape.gradient(loss, table.value)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], [table])

    for _ in range(2):
        look_up(tf.constant(rank))  # orthogonal changes: added
    assert table.numpy()[:, 0].tolist() == [2, 2, 0, 0]
    for _ in range(2):
        look_up(tf.constant(3))  # equal changes: averaged
    assert table.numpy()[:, 0].tolist() == [2, 2, 0, 2]

    # Frozen layers and embeddings in a model.
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(10, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(5, trainable=False),
            keras.layers.Dense(2),
        ]
    )
    frozen = model.layers[2].get_weights()[0].copy()
    model.compile(adasum.AdasumOptimizer("adam", local_steps=2), "mse", jit_compile=False)
    x = np.random.default_rng(rank).integers(0, 10, (20, 3))
    y = np.random.default_rng(rank).normal(size=(20, 2))
    model.fit(x, y, batch_size=4, verbose=0, callbacks=adasum.callbacks.standard())
    for w in model.get_weights():
        gathered = adasum.allgather(w[np.newaxis]).numpy()
        assert gathered[0].tobytes() == gathered[1].tobytes()
    assert (model.layers[2].get_weights()[0] == frozen).all() == (rank == 0)


@on_ranks(2)
def test_two_models_and_optimizers_in_one_function():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    first, second = keras.Variable([0.0, 0.0]), keras.Variable([0.0, 0.0, 0.0])
    one = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=1)
    two = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=2)

    @tf.function
    def step():
        # Nothing but the order of the program connects the two.
        one.apply([-tf.one_hot(rank, 2)], [first])
        two.apply([-tf.one_hot(rank, 3)], [second])

    for _ in range(4):
        step()
    assert first.numpy().tolist() == [4, 4] and second.numpy().tolist() == [4, 4, 0]
    # A second compile and a second fit of one model.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.random.default_rng(rank).normal(size=(24, 2))
    for local_steps in (1, 4):
        model.compile(adasum.AdasumOptimizer("sgd", local_steps), "mse", jit_compile=False)
        for _ in range(2):
            model.fit(x, x[:, :1], batch_size=8, verbose=0)
        kernels = adasum.allgather(model.get_weights()[0]).numpy()
        assert kernels[:2].tobytes() == kernels[2:].tobytes()
    # Several steps in one call of the compiled function.
    model.compile(adasum.AdasumOptimizer("sgd", 4), "mse", jit_compile=False, steps_per_execution=3)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 12 and int(model.optimizer.syncs) == 3
    kernels = adasum.allgather(model.get_weights()[0]).numpy()
    assert kernels[:2].tobytes() == kernels[2:].tobytes()


@on_ranks(2)
def test_a_change_that_is_not_finite():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()

    def steps(nonfinite, bad_steps, number=4, compiled=True):
        variable = keras.Variable([0.0, 0.0])
        optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), nonfinite=nonfinite)
        optimizer.build([variable])
        step = lambda g: optimizer.apply([g], [variable])  # noqa: E731
        step = tf.function(step) if compiled else step
        after = []
        for i in range(number):
            bad = rank == 1 and i in bad_steps
            step(tf.constant([np.inf, np.nan]) if bad else -tf.one_hot(rank, 2))
            after.append(variable.numpy().tolist())
        return after

    for compiled in (False, True):
        # Rank 1's bad windows count as zero, and it goes on from rank 0's weights.
        after = steps("skip", {1, 2}, compiled=compiled)
        assert after == [[1, 1], [2, 1], [3, 1], [4, 2]]
        # Not three in a row: the counter starts again.
        assert steps("skip", {0, 1, 3, 4}, 6, compiled)[-1] == [6, 2]
    # A healthy rank's state does not get NaN from the other's; in the next sync all is averaged
    # again.
    variable = keras.Variable([0.0, 0.0])
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(1.0, momentum=0.5), average_inner_state=True
    )
    optimizer.build([variable])
    (momentum,) = optimizer.inner_optimizer.momentums
    optimizer.apply([tf.constant([np.inf, 0.0]) if rank else tf.constant([-2.0, 0.0])], [variable])
    assert variable.numpy().tolist() == [2, 0]
    if rank == 0:
        assert momentum.numpy().tolist() == [2, 0]
    momentum.assign([4.0 * rank, 0.0])
    optimizer.apply([tf.zeros(2)], [variable])
    assert momentum.numpy().tolist() == [1, 0]  # half of 0 and 4, averaged
    named = r"NaN or infinity in tensor 0 of rank 1 \(variable\)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{named}, the 3rd time in a row"):
        steps("skip", {1, 2, 3})
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        steps("raise", {2})
    # Nothing is stuck after that.
    assert steps("raise", set()) == [[1, 1], [2, 2], [3, 3], [4, 4]]


@on_ranks(2, timeout=150)
def test_mixed_precision():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    scaled = keras.optimizers.LossScaleOptimizer

    def build(policy):
        keras.utils.set_random_seed(rank)
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        )
        keras.config.set_dtype_policy("float32")
        return model

    rng = np.random.default_rng(rank)
    x = rng.normal(size=(80, 4)).astype("f")
    y = x.sum(1, keepdims=True)
    # On rank 1 only: one batch whose gradient overflows float16.
    if rank == 1:
        y[20:24] = 1e30
    momentum = lambda: keras.optimizers.SGD(0.02, momentum=0.5)  # noqa: E731
    outside = adasum.AdasumOptimizer(momentum(), 4)
    inside = adasum.AdasumOptimizer(scaled(momentum(), initial_scale=2.0**10), 4)
    cases = {
        "outside": ("mixed_float16", outside, {}),
        "inside": ("mixed_float16", inside, {"auto_scale_loss": False}),
        "both": ("mixed_float16", adasum.AdasumOptimizer(scaled(momentum()), 4), {}),
        "bfloat16": ("mixed_bfloat16", adasum.AdasumOptimizer(momentum(), 4), {}),
    }
    for what, (policy, optimizer, options) in cases.items():
        model = build(policy)
        model.compile(optimizer, "mse", jit_compile=False, **options)
        if what == "bfloat16" and rank == 1:
            y[20:24] = 1.0  # nothing skips a step there, so the weights would be ruined
        history = model.fit(
            x, y, batch_size=4, epochs=3, shuffle=False, verbose=0,
            callbacks=[adasum.callbacks.BroadcastState(), adasum.callbacks.SyncBeforeCheckpoint()],
        )  # fmt: skip
        assert isinstance(model.optimizer, scaled) == (what in ("outside", "both"))
        assert adasum.optimizer.find(model.optimizer) is optimizer
        for w in model.get_weights():
            gathered = adasum.allgather(w[np.newaxis]).numpy()
            assert gathered[0].tobytes() == gathered[1].tobytes(), what
            assert np.isfinite(w).all(), what
        loss = adasum.broadcast(tf.constant(history.history["loss"]), 0).numpy()
        assert loss[-1] < 0.5 * loss[0], (what, loss)
        taken = adasum.allgather(tf.reshape(tf.cast(optimizer.iterations, tf.int64), [1])).numpy()
        # Rank 1 skips its bad batch in each epoch, and both a few until the scale fits.
        if what == "bfloat16":
            assert taken.tolist() == [60, 60]
        else:
            assert taken[1] <= 57 and taken[0] > taken[1], (what, taken)
    # Taken over from outside: the inner scaling is gone, so the gradients are not divided twice.
    assert isinstance(cases["both"][1].inner_optimizer, keras.optimizers.SGD)
    with pytest.raises(ValueError, match="scaled outside as well"):
        scaled(inside)


@on_ranks(2)
def test_learning_rates_set_by_callbacks():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    x = np.random.default_rng(rank).normal(size=(40, 2))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(adasum.AdasumOptimizer("sgd", 2), "mse", jit_compile=False)
    rates = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(round(float(self.model.optimizer.inner_optimizer.learning_rate), 6))

    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0)
    set_rate = keras.callbacks.LearningRateScheduler(lambda e, rate: 0.4 if e == 0 else rate)
    model.fit(
        x, x[:, :1], batch_size=8, epochs=4, verbose=0,
        callbacks=[*adasum.callbacks.standard(), set_rate, reduce, Look()],
    )  # fmt: skip
    # The first epoch is the best so far; each later one is no better by 100, so the rate is halved.
    assert rates == [0.4, 0.2, 0.1, 0.05]
    assert int(model.optimizer.iterations) == 20  # steps, not syncs
