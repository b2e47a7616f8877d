"""What benchmarks/simulation.py makes of many workers in one process, against ranks that train with
AdasumOptimizer: the same data in the same order ends at the same weights."""

import numpy as np
import pytest
from ranks import on_ranks

from tf_adasum import core

EXAMPLES, BATCH, EPOCHS, LOCAL_STEPS, SEED = 64, 4, 1, 3, 5

# Options of AdasumOptimizer, and what the simulation calls them.
CASES = {
    "momentum": ({}, {}),
    "adam, float16": ({"wire_dtype": "float16"}, {"wire_dtype": "float16"}),
    "averaged momentum of local SGD": (
        {"op": "average", "average_inner_state": True},
        {"op": "average", "inner_state": "averaged"},
    ),
}


def _model():
    import keras

    keras.utils.set_random_seed(SEED)
    layers = [
        # A bias before a batch normalization has no gradient but rounding.
        keras.layers.Conv2D(3, 3, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def _data():
    rng = np.random.default_rng(SEED)
    images = rng.normal(size=(EXAMPLES, 8, 8, 1)).astype("float32")
    return images, rng.integers(0, 10, EXAMPLES).astype("int32")


def _optimizer(case):
    import keras

    # The rate is a schedule, as in the programs that simulate.
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, 10)
    if "adam" in case:
        return keras.optimizers.Adam(rate)
    return keras.optimizers.SGD(rate, momentum=0.9)


def _trained(case, loss):
    """This rank's model, trained as users do, what its optimizer keeps, and what the callback
    Orthogonality logs of each sync."""
    import simulation
    import tensorflow as tf

    import tf_adasum as adasum

    model, (images, labels) = _model(), _data()
    optimizer = adasum.AdasumOptimizer(_optimizer(case), LOCAL_STEPS, **CASES[case][0])
    model.compile(optimizer)
    callback, logs = adasum.callbacks.Orthogonality(every=1), []
    callback.set_model(model)
    callback.on_train_begin()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    order = simulation.windows(EXAMPLES, core.size(), BATCH, EPOCHS, LOCAL_STEPS, SEED)
    for window in order:
        for examples in window[core.rank()]:
            step(tf.constant(images[examples]), tf.constant(labels[examples]))
        optimizer.sync()
        logs.append({})
        callback.on_train_batch_end(len(logs), logs[-1])
    return model, [v.numpy() for v in optimizer.inner_optimizer.variables], logs


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_simulation_equals_ranks(case):
    import keras
    import simulation

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model, state, logs = _trained(case, loss)
    mean = [core.allreduce(v.numpy(), "average") for v in model.non_trainable_variables]
    states = [core.allgather(np.asarray(each)[None]) for each in state]
    if core.rank() > 0:
        return
    of_model = _model()
    before = [v.numpy() for v in of_model.trainable_variables]
    simulated = simulation.Simulation(of_model, _optimizer(case), loss, _data(), core.size())
    simulated.start(before, **CASES[case][1])
    order = list(simulation.windows(EXAMPLES, core.size(), BATCH, EPOCHS, LOCAL_STEPS, SEED))
    # A window that is cut short is among them.
    assert len({window.shape[1] for window in order}) > 1
    near = 2e-3 if "float16" in case else 1e-4
    for window, of_rank in zip(order, logs, strict=True):
        simulated.window(window)
        # float32 on ranks. That of other ops is not known.
        of_all = of_rank.pop("orthogonality")
        np.testing.assert_allclose(simulated.orthogonality, list(of_rank.values()), near)
        np.testing.assert_allclose(np.mean(simulated.orthogonality), of_all, near)
        assert np.isnan(of_all) == (CASES[case][0].get("op") == "average")
    # The same operations in another graph: rounded otherwise here and there, with 24 bits, and
    # float16's 11 may round one of two neighbours another way.
    unit = 2.0**-11 if "float16" in case else 2.0**-20
    for start, mine, got in zip(before, model.trainable_variables, simulated.weights, strict=True):
        change = np.abs(got - start).max()
        assert change > 0
        np.testing.assert_allclose(got, mine.numpy(), rtol=0, atol=unit * change)
    for want, got in zip(mean, simulated.load().non_trainable_variables, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    for want, got in zip(states, simulated.states(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
