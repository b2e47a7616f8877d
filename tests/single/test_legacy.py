"""The other optimizer families on one rank: each wrapper is the wrapped optimizer."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_adasum as adasum

needs_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)
v1 = tf.compat.v1.train
FAMILIES = [pytest.param(f, marks=needs_tf_keras) for f in ("tf_keras", "tf_keras legacy")]


def _home(family):
    import tf_keras

    return tf_keras.optimizers if family == "tf_keras" else tf_keras.optimizers.legacy


@needs_tf_keras
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("local_steps", [1, 5])
def test_fit_of_tf_keras_is_the_same_bit_for_bit(family, local_steps):
    import tf_keras

    from tf_adasum.legacy import callbacks

    home = _home(family)
    options = {"use_ema": True, "ema_momentum": 0.5} if family == "tf_keras" else {}
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.1, 20)
    for make in (
        lambda: home.SGD(schedule, momentum=0.9, nesterov=True, clipnorm=0.5),
        lambda: home.Adam(0.01, **options),
        lambda: scaling(home.SGD(0.1)),
    ):

        def train(optimizer, **fit_options):
            tf_keras.utils.set_random_seed(3)
            layers = tf_keras.layers
            model = tf_keras.Sequential(
                [layers.Dense(4, "relu", input_shape=(8,)), layers.Dense(3)]
            )
            model.compile(optimizer, "mse")
            rng = np.random.default_rng(0)
            x, y = rng.normal(size=(48, 8)), rng.normal(size=(48, 3))
            model.fit(x, y, batch_size=8, epochs=2, verbose=0, **fit_options)
            return model

        plain = train(make())
        wrapped = train(
            adasum.DistributedOptimizer(make(), backward_passes_per_step=local_steps),
            callbacks=callbacks.standard(),
        )
        for a, b in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
            assert a.tobytes() == b.tobytes()
        assert int(wrapped.optimizer.iterations) == int(plain.optimizer.iterations) == 12


@pytest.mark.parametrize("in_session", [False, True])
def test_version_1_is_the_same_bit_for_bit(in_session):
    def train(optimizer):
        variables = [
            tf.compat.v1.Variable([[1.0, 2.0], [3.0, 4.0]], use_resource=True, name="table"),
            tf.compat.v1.Variable([0.5, 0.25], use_resource=True, name="row"),
        ]
        step = tf.compat.v1.train.get_or_create_global_step()

        def loss():
            return tf.reduce_sum((tf.gather(variables[0], [0, 0]) * variables[1]) ** 2)

        if not in_session:
            for _ in range(7):
                optimizer.minimize(loss, step, variables)
            return [v.numpy() for v in [*variables, step]]
        run = optimizer.minimize(loss(), step, variables)
        with v1.MonitoredTrainingSession(hooks=hooks(optimizer)) as session:
            for _ in range(7):
                session.run(run)
            return session.run([*variables, step])

    def hooks(optimizer):
        return (
            [adasum.SyncHook()] if isinstance(optimizer, adasum.legacy.v1.AdasumOptimizer) else []
        )

    for make in (
        lambda: v1.MomentumOptimizer(0.01, 0.9),
        lambda: v1.AdamOptimizer(0.01),
    ):
        results = []
        for wrap in (lambda o: o, lambda o: adasum.DistributedOptimizer(o, "adasum", 3)):
            if in_session:
                with tf.Graph().as_default():
                    results.append(train(wrap(make())))
            else:
                results.append(train(wrap(make())))
                tf.compat.v1.train.get_global_step().assign(0)
        for a, b in zip(*results, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_surface_of_tf_keras(family):
    import tf_keras

    home = _home(family)
    inner = home.SGD(0.1, momentum=0.75, clipnorm=1.0)
    optimizer = adasum.DistributedOptimizer(inner, backward_passes_per_step=4, name="outer")
    assert isinstance(optimizer, home.Optimizer) and tf_keras.optimizers.get(optimizer) is optimizer
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    optimizer.lr = 0.5
    assert float(inner.learning_rate) == float(optimizer.lr) == 0.5
    assert float(optimizer.momentum) == 0.75 and optimizer.clipnorm == 1.0
    optimizer.momentum = 0.5
    optimizer.clipnorm = None
    assert float(inner.momentum) == 0.5 and inner.clipnorm is None
    with pytest.raises(AttributeError, match="missing"):
        optimizer.missing  # noqa: B018
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    gradients = [tf.constant([1.0, 1.0]), None]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert optimizer.iterations is inner.iterations and int(optimizer.iterations) == 1
    ours = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    theirs = inner.variables() if callable(inner.variables) else inner.variables
    assert {id(v) for v in theirs} < {id(v) for v in ours}
    values = optimizer.get_weights()
    assert len(values) == len(ours)
    optimizer.set_weights([value + 1 for value in values])
    assert int(optimizer.iterations) == 2 and int(optimizer.local_step) == 1
    assert optimizer.sync() is None
    with pytest.raises(ValueError, match="Received later"):
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0, name="late"))])


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_saved_models_of_tf_keras(family, tmp_path):
    import tf_keras

    home = _home(family)
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    for inner in (home.Adam(0.5), scaling(home.Adam(0.5), dynamic=False, initial_scale=8.0)):
        optimizer = adasum.DistributedOptimizer(
            inner, "average", 7, name="mine", algorithm="ring", fusion_threshold=123, overlap=True
        )
        again = tf_keras.optimizers.deserialize(tf_keras.optimizers.serialize(optimizer))
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()
        assert (again.local_steps, again.op) == (7, adasum.Average)
        assert type(again.inner_optimizer) is type(inner)
    for suffix in (".keras", ".h5"):
        if suffix == ".keras" and family == "tf_keras legacy":
            continue  # Keras 2 does not save these optimizers' state in it.
        model = tf_keras.Sequential([tf_keras.layers.Dense(3, input_shape=(8,))])
        optimizer = adasum.DistributedOptimizer(home.SGD(0.1, momentum=0.5), "adasum", 4)
        model.compile(optimizer, "mse")
        x, y = np.ones((8, 8)), np.ones((8, 3))
        model.fit(x, y, verbose=0)
        model.save(tmp_path / f"model{suffix}")
        loaded = tf_keras.models.load_model(tmp_path / f"model{suffix}")
        assert int(loaded.optimizer.iterations) == 1
        for m in (model, loaded):
            m.fit(x, y, verbose=0)
        for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
            assert a.tobytes() == b.tobytes()


def test_which_wrapper():
    import keras

    optimizer = adasum.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=3)
    assert isinstance(optimizer, adasum.AdasumOptimizer) and optimizer.local_steps == 3
    optimizer = adasum.DistributedOptimizer(v1.AdamOptimizer(), adasum.Sum, 3)
    assert isinstance(optimizer, v1.Optimizer) and optimizer.local_steps == 3
    assert optimizer.op == adasum.Sum and optimizer.get_name() == "AdasumAdam"
    for wrong in ("sgd", None, v1.AdamOptimizer, tf.Variable(1.0)):
        with pytest.raises(TypeError, match=r"(?s)instance of keras.*tf_keras.*v1.*Received: "):
            adasum.DistributedOptimizer(wrong)
    with pytest.raises(ValueError, match="is wrapped already"):
        adasum.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="`local_steps` must be a positive integer"):
        adasum.DistributedOptimizer(v1.AdamOptimizer(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="`nonfinite` must be"):
        adasum.DistributedOptimizer(v1.AdamOptimizer(), nonfinite="ignore")


@needs_tf_keras
def test_tf_keras_wrapped_already():
    import tf_keras

    for home in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        wrapped = adasum.DistributedOptimizer(home.SGD())
        scaled = tf_keras.mixed_precision.LossScaleOptimizer(wrapped)
        for optimizer in (wrapped, scaled):
            with pytest.raises(ValueError, match="is wrapped already"):
                adasum.DistributedOptimizer(optimizer)


def test_callbacks_are_there_as_the_documentation_spells_them():
    pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    assert adasum.legacy.callbacks.standard()


def test_tf_keras_is_not_imported_for_others():
    code = """
import sys, tensorflow as tf, tf_adasum as adasum
optimizer = adasum.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
optimizer.minimize(lambda v=tf.Variable(1.0): v * v)
assert "tf_keras" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("family", ["keras", "v1", *FAMILIES])
def test_other_strategies(family):
    import keras

    def make():
        if family == "keras":
            return adasum.AdasumOptimizer(keras.optimizers.SGD())
        inner = v1.GradientDescentOptimizer(0.1) if family == "v1" else _home(family).SGD()
        return adasum.DistributedOptimizer(inner)

    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    message = r"one process for each device, .*mpirun.*Received: MirroredStrategy with 1 replica"
    with strategy.scope(), pytest.raises(ValueError, match=message):
        make()
    optimizer = make()
    with strategy.scope():
        variable = keras.Variable([1.0]) if family == "keras" else tf.Variable([1.0])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients([(tf.constant([1.0]), variable)]))

    with pytest.raises(ValueError, match=message):
        step()


def test_graphs_of_version_1_that_cannot_work():
    with tf.Graph().as_default():
        variable = tf.compat.v1.Variable(1.0, use_resource=False)
        optimizer = adasum.DistributedOptimizer(v1.GradientDescentOptimizer(0.1))
        with pytest.raises(ValueError, match=r"tf\.compat\.v1\.enable_resource_variables\(\)"):
            optimizer.minimize(variable * variable)
        with pytest.raises(ValueError, match="found no optimizer to sync"):
            v1.MonitoredTrainingSession(hooks=[adasum.SyncHook()])
        with pytest.raises(ValueError, match="no variables before its first step"):
            optimizer.sync()
