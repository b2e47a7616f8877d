"""AdasumOptimizer on one rank: it is the wrapped optimizer."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizers import every_optimizer

import tf_adasum as adasum

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20)),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
}


def _train(optimizer, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer, "mse", **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 8, 8, 1)), rng.normal(size=(48, 3))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("local_steps", [1, 5])
def test_one_rank_equals_the_wrapped_optimizer_bit_for_bit(make, local_steps):
    plain = _train(make(), jit_compile=False)
    wrapped = _train(adasum.AdasumOptimizer(make(), local_steps), jit_compile=False)
    for a, b in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
        assert a.tobytes() == b.tobytes()
    assert int(wrapped.optimizer.iterations) == int(plain.optimizer.iterations) == 12
    assert float(wrapped.optimizer.learning_rate) == float(plain.optimizer.learning_rate)


def _take_steps(optimizer, variables, gradients):
    step = tf.function(lambda g: optimizer.apply(g, variables))
    for gradient in gradients:
        step([tf.constant(g) for g in gradient])


def test_one_rank_equals_every_optimizer_bit_for_bit():
    for name, make in every_optimizer().items():
        rng = np.random.default_rng(0)
        shapes = [(6, 4), (4,), (4, 3)]
        start = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        gradients = [[rng.normal(size=shape).astype(np.float32) for shape in shapes]] * 5
        ends = []
        for optimizer in (make(), adasum.AdasumOptimizer(make(), 2)):
            variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(start)]
            optimizer.build(variables)
            _take_steps(optimizer, variables, gradients)
            ends.append([v.numpy().tobytes() for v in variables])
        assert ends[0] == ends[1], name
        assert ends[0][0] != start[0].tobytes(), name


def test_one_rank_with_xla():
    plain = _train(OPTIMIZERS["momentum"](), jit_compile=True)
    wrapped = _train(adasum.AdasumOptimizer(OPTIMIZERS["momentum"](), 5), jit_compile=True)
    for a, b in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_surface_of_the_wrapped_optimizer():
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = adasum.AdasumOptimizer(inner, 4, name="outer")
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    variable = keras.Variable([1.0, 2.0])
    assert int(optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])) == 1
    assert optimizer.iterations is inner.iterations and optimizer.name == "outer"
    names = {v.path for v in optimizer.variables}
    assert {v.path for v in inner.variables} < names
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.sync()
    assert keras.optimizers.get(optimizer) is optimizer
    assert isinstance(adasum.AdasumOptimizer("adam").inner_optimizer, keras.optimizers.Adam)
    scaled = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    assert float(scaled.scale_loss(2.0)) == 16


def test_config():
    options = {"algorithm": "ring", "fusion_threshold": 123, "overlap": True, "nonfinite": "raise"}
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.Adam(0.5), 7, op="average", name="mine", **options
    )
    assert options.items() <= optimizer.get_config().items()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, adasum.AdasumOptimizer)
    assert again.get_config() == optimizer.get_config()
    assert (again.local_steps, again.op, again.name) == (7, adasum.Average, "mine")
    assert isinstance(again.inner_optimizer, keras.optimizers.Adam)
    # What the environment chooses is not written down.
    assert adasum.AdasumOptimizer("sgd").get_config()["algorithm"] is None
    assert keras.saving.get_registered_name(adasum.AdasumOptimizer) == "tf_adasum>AdasumOptimizer"


def test_saved_model_goes_on_where_it_was(tmp_path):
    model = _train(adasum.AdasumOptimizer(OPTIMIZERS["momentum"](), 5), jit_compile=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 12
    for m in (model, loaded):
        m.fit(np.ones((8, 8, 8, 1)), np.ones((8, 3)), verbose=0)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_model_can_be_loaded_where_the_optimizer_was_not_named(tmp_path):
    model = _train(adasum.AdasumOptimizer("sgd"), jit_compile=False)
    model.save(tmp_path / "model.keras")
    code = f"import keras, tf_adasum; keras.saving.load_model({str(tmp_path / 'model.keras')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sgd", 0), "`local_steps` must be a positive integer. Received: local_steps=0"),
        (("sgd", 1.5), "Received: local_steps=1.5"),
        (("sgd", True), "Received: local_steps=True"),
        ((adasum.AdasumOptimizer("sgd"),), "`inner_optimizer` is wrapped already"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        adasum.AdasumOptimizer(*arguments)


def test_bad_op():
    with pytest.raises(ValueError, match=r"`op` must be one of .*Received: op='max'"):
        adasum.AdasumOptimizer("sgd", op="max")
