"""The other optimizer families on real ranks, against the training written out in NumPy."""

import importlib.util

import numpy as np
import pytest
import worker
from ranks import on_ranks

# float64 models: what is left is the rounding of a few hundred operations.
EXACT = 1e-12
FAMILIES = ("keras", "tf_keras", "tf_keras legacy", "v1")

needs_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)


def _sgd(family, local_steps, rate=worker.RATE, momentum=worker.MOMENTUM, **options):
    """SGD with momentum of one of the FAMILIES, made distributed."""
    import tensorflow as tf

    import tf_adasum as adasum

    if family == "keras":
        import keras

        inner = keras.optimizers.SGD(rate, momentum=momentum)
    elif family == "v1":
        inner = tf.compat.v1.train.MomentumOptimizer(rate, momentum)
    else:
        import tf_keras

        home = tf_keras.optimizers if family == "tf_keras" else tf_keras.optimizers.legacy
        inner = home.SGD(rate, momentum=momentum)
    return adasum.DistributedOptimizer(inner, backward_passes_per_step=local_steps, **options)


def _variables(weights):
    import tensorflow as tf

    return [tf.Variable(w, name=f"w{i}") for i, w in enumerate(weights)]


def _loss(variables, x, y):
    import tensorflow as tf

    w1, b1, w2, b2 = variables
    return tf.reduce_mean((tf.tanh(x @ w1 + b1) @ w2 + b2 - y) ** 2)


def _gradients(variables, x, y):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = _loss(variables, x, y)
    return tape.gradient(loss, variables)


def _close(got, want, what):
    for a, b in zip(got, want, strict=True):
        error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        assert error < EXACT, f"{what}: relative error {error}"


def _check_loop(family, step, variables, optimizer, want, steps, local_steps):
    """Runs the steps and compares the weights after each sync and at the end."""
    from tf_adasum import core

    syncs = 0
    for i, (x, y) in enumerate(worker.dataset(core.rank(), steps)):
        step(x, y)
        if (i + 1) % local_steps == 0:
            _close(variables, want[syncs], f"{family}: sync {syncs}")
            syncs += 1
    optimizer.sync()
    _close(variables, want[-1], f"{family}: end")
    optimizer.sync()  # nothing is left to do
    _close(variables, want[-1], f"{family}: second sync")
    assert int(optimizer.syncs) == len(want)


@on_ranks(2)
@needs_tf_keras
def test_loops_with_a_tape():
    import tensorflow as tf

    from tf_adasum import core

    # Different weights on each rank: the other rank's first gradient is dropped.
    weights = [worker.initial_weights(seed) for seed in range(2)]
    want = worker.simulate(weights, 8, 3, drop_first=True)
    for family in FAMILIES[1:]:
        for compiled in (False, True):
            variables, optimizer = _variables(weights[core.rank()]), _sgd(family, 3)
            extra = tf.Variable(1.0)  # without a gradient

            def step(x, y, variables=variables, optimizer=optimizer, extra=extra):
                gradients = [*_gradients(variables, x, y), None]
                # An iterator, as custom loops give it.
                optimizer.apply_gradients(zip(gradients, [*variables, extra], strict=True))

            if compiled:
                step = tf.function(step)
            _check_loop(f"{family}, {compiled}", step, variables, optimizer, want, 8, 3)
            if family != "v1":
                assert int(optimizer.iterations) == 8


@on_ranks(2)
def test_other_ops_and_the_sign():
    import tensorflow as tf

    import tf_adasum as adasum

    weights = worker.initial_weights(0)
    for op, combine in (
        (adasum.Sum, lambda v: np.sum(v, axis=0)),
        (adasum.Average, lambda v: np.mean(v, axis=0)),
    ):
        variables, optimizer = _variables(weights), _sgd("v1", 3, op=op)

        def step(x, y, variables=variables, optimizer=optimizer):
            optimizer.minimize(lambda: _loss(variables, x, y), var_list=variables)

        want = worker.simulate([weights] * 2, 7, 3, combine)
        _check_loop(op.value, step, variables, optimizer, want, 7, 3)
    # Every rank goes from 1.0 to 0.9, so the result is 0.9: neither 1.1 nor 0.8.
    variable, optimizer = tf.Variable([1.0]), _sgd("v1", 1, 0.1)
    optimizer.sync()  # no step yet: nothing to do
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    np.testing.assert_allclose(variable.numpy(), [0.9], rtol=1e-6)
    # What the wrapped optimizer keeps is averaged if that is asked for.
    variable = tf.Variable([1.0, 1.0])
    optimizer = _sgd("v1", 1, average_inner_state=True)
    optimizer.apply_gradients([(tf.one_hot(adasum.rank(), 2), variable)])
    assert optimizer.get_slot(variable, "momentum").numpy().tolist() == [0.5, 0.5]


def _graph(weights, rank, steps, local_steps):
    """A version 1 program up to its session; the data end after `steps` steps."""
    import tensorflow as tf

    v1 = tf.compat.v1
    x, y = v1.data.make_one_shot_iterator(worker.dataset(rank, steps)).get_next()
    variables = [v1.get_variable(f"w{i}", initializer=w) for i, w in enumerate(weights)]
    v1.get_variable("integers", initializer=np.int32([1, 2]))
    global_step = v1.train.get_or_create_global_step()
    # A rate that depends on the step, as in version 1's programs; here it stays what it was.
    rate = v1.train.piecewise_constant(global_step, [10**6], [worker.RATE, 1.0])
    rate = tf.cast(rate, tf.float64)
    optimizer = _sgd("v1", local_steps, rate)
    return variables, optimizer, optimizer.minimize(_loss(variables, x, y), global_step)


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("behaviour", ["v1", "v2"])
def test_sessions(behaviour):
    import tempfile

    import tensorflow as tf

    import tf_adasum as adasum

    v1, rank = tf.compat.v1, adasum.rank()
    if behaviour == "v1":
        v1.disable_v2_behavior()
        v1.enable_resource_variables()
    weights = [worker.initial_weights(seed) for seed in range(2)]
    folder = tempfile.mkdtemp()

    # A plain session. Its first gradient was at other weights than rank 0's.
    want = worker.simulate(weights, 8, 3, drop_first=True)
    with tf.Graph().as_default():
        variables, optimizer, train = _graph(weights[rank], rank, 8, 3)
        sync, global_step = optimizer.sync(), v1.train.get_global_step()
        assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [train]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for i in range(8):
                session.run(train)
                if i in (2, 5):
                    _close(session.run(variables), want[i // 3], f"step {i}")
                if i == 3:
                    v1.train.Saver().save(session, f"{folder}/half-way")
            session.run(sync)
            _close(session.run(variables), want[-1], "end")
            session.run(sync)
            _close(session.run(variables), want[-1], "second sync")
            assert session.run([global_step, optimizer.syncs]) == [8, 3]

    # It goes on from the middle of a window as if it had never stopped.
    with tf.Graph().as_default():
        variables, optimizer, train = _graph(weights[rank], rank, 8, 3)
        saver, sync = v1.train.Saver(), optimizer.sync()
        get_batch = train.graph.get_operation_by_name("IteratorGetNext")
        with v1.Session() as session:
            saver.restore(session, f"{folder}/half-way")
            for _ in range(4):
                session.run(get_batch)
            for _ in range(4):
                session.run(train)
            session.run(sync)
            _close(session.run(variables), want[-1], "restored")

    # Hooks: equal weights before the first gradient, and a last checkpoint of what all ranks have.
    # Rank 1's data end two steps earlier than rank 0's.
    steps = [10, 8][rank]
    with tf.Graph().as_default():
        variables, _, train = _graph(weights[rank], rank, steps, 3)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=f"{folder}/hooks", chief_only_hooks=[adasum.SyncHook()]
        ) as session:
            while not session.should_stop():
                session.run(train)
    reader = tf.train.load_checkpoint(f"{folder}/hooks")
    saved = [reader.get_tensor(f"w{i}") for i in range(4)]
    assert reader.get_tensor("global_step") == steps
    _close(saved, _with_uneven_steps(weights[0], (10, 8), 3), "last checkpoint")


def _with_uneven_steps(start, steps, local_steps):
    """What comes out if worker r takes only steps[r] steps: then its changes are zero."""
    from tf_adasum import reference

    momenta = [[np.zeros_like(w) for w in start] for _ in steps]
    data = [worker.batches(r, n) for r, n in enumerate(steps)]
    for first in range(0, max(steps), local_steps):
        deltas = []
        for r, n in enumerate(steps):
            own = [w.copy() for w in start]
            for step in range(first, min(first + local_steps, n)):
                for i, g in enumerate(worker.gradient(own, *data[r][step])):
                    momenta[r][i] = worker.MOMENTUM * momenta[r][i] - worker.RATE * g
                    own[i] = own[i] + momenta[r][i]
            deltas.append([w - s for w, s in zip(own, start, strict=True)])
        start = [s + reference.tree(list(d)) for s, *d in zip(start, *deltas, strict=True)]
    return start


@on_ranks(2)
@needs_tf_keras
def test_fit_of_tf_keras():
    import tf_keras

    from tf_adasum import core
    from tf_adasum.legacy import callbacks

    tf_keras.backend.set_floatx("float64")
    rank = core.rank()
    weights = [worker.initial_weights(seed) for seed in range(2)]
    want = worker.simulate([weights[0]] * 2, 7, 3)
    data = worker.dataset(rank, 7)
    for family in FAMILIES[1:3]:
        for eagerly in (False, True):
            layers = tf_keras.layers
            model = tf_keras.Sequential(
                [layers.Dense(5, "tanh", input_shape=(6,)), layers.Dense(2)]
            )
            model.set_weights(weights[rank])
            optimizer = _sgd(family, 3)
            model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eagerly)
            assert model.optimizer is optimizer
            history = model.fit(
                data,
                validation_data=data,
                callbacks=callbacks.standard(),
                shuffle=False,
                verbose=0,
            )
            _close(model.get_weights(), want[-1], f"{family}, {eagerly}")
            assert int(optimizer.syncs) == 3 and int(optimizer.iterations) == 7
            # Validation was at the synced weights, and its loss is the ranks' mean.
            alone = model.evaluate(data, verbose=0, return_dict=True)["loss"]
            mean = core.allreduce(np.array([alone]), "average")[0]
            np.testing.assert_allclose(history.history["val_loss"], [mean], rtol=1e-9)
        # Without callbacks the new optimizers are told when fit ends.
        if family == "tf_keras":
            model.set_weights(weights[0])
            model.compile(_sgd(family, 3), "mse")
            model.fit(data, shuffle=False, verbose=0)
            _close(model.get_weights(), want[-1], "without callbacks")
        # Moving statistics are averaged; progress is shown by rank 0 only.
        layers = tf_keras.layers
        model = tf_keras.Sequential([layers.BatchNormalization(input_shape=(6,)), layers.Dense(2)])
        model.compile(_sgd(family, 3), "mse")
        standard = callbacks.standard()
        model.fit(data, callbacks=standard, verbose=2)
        assert standard[0].params["verbose"] == (2 if rank == 0 else 0)
        for weight in model.get_weights():
            assert len({row.tobytes() for row in core.allgather(weight[np.newaxis])}) == 1


@on_ranks(2)
@needs_tf_keras
def test_loss_scaling_of_tf_keras():
    import tensorflow as tf
    import tf_keras

    import tf_adasum as adasum

    rank = adasum.rank()
    scaling = tf_keras.mixed_precision.LossScaleOptimizer
    for home in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        for outside in (True, False):
            for dynamic in (True, False):
                what = f"{home.__name__}, outside={outside}, dynamic={dynamic}"
                options = {"dynamic": dynamic, "initial_scale": 128.0}
                inner = home.SGD(1.0)
                if not outside:
                    inner = scaling(inner, **options)
                wrapper = adasum.DistributedOptimizer(inner, backward_passes_per_step=2)
                optimizer = scaling(wrapper, **options) if outside else wrapper
                variable = tf.Variable([0.0, 0.0])

                @tf.function
                def step(slope, variable=variable, optimizer=optimizer):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(variable * slope)
                        loss = optimizer.get_scaled_loss(loss)
                    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
                    optimizer.apply_gradients(zip(gradients, [variable], strict=True))

                good = -tf.one_hot(rank, 2)
                bad = good * np.inf if rank == 1 and dynamic else good
                step(good)
                step(bad)
                # Outside, rank 1 took one step and rank 0 waits for its second one: not yet here.
                if not outside:
                    assert variable.numpy().tolist() == [2, 1 if dynamic else 2], what
                    assert int(wrapper.syncs) == 1, what
                step(good)
                wrapper.sync()
                assert variable.numpy().tolist() == [3, 2 if dynamic else 3], what
                if dynamic:
                    assert float(optimizer.loss_scale) == (64 if rank == 1 else 128), what
                # `minimize` scales the loss and unscales the gradient, each once.
                slopes = []

                @tf.custom_gradient
                def noted(loss, slopes=slopes):
                    return tf.identity(loss), lambda slope: slopes.append(float(slope)) or slope

                scale = float(optimizer.loss_scale)
                optimizer.minimize(lambda v=variable, f=noted: f(-v[adasum.rank()]), [variable])
                assert slopes == [scale], what
                wrapper.sync()
                assert variable.numpy().tolist() == [4, 3 if dynamic else 4], what
    # The policy makes `compile` wrap once more, also if there is loss scaling inside.
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    for home in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        for inside in (False, True):
            model = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(6,))])
            inner = scaling(home.SGD(0.01)) if inside else home.SGD(0.01)
            wrapper = adasum.DistributedOptimizer(inner, backward_passes_per_step=2)
            model.compile(wrapper, "mse")
            before = model.get_weights()
            model.fit(worker.dataset(rank, 30, "float32"), verbose=0)
            wrapper.sync()
            after = model.get_weights()
            assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in after)
            assert np.abs(after[0] - before[0]).max() > 0
            for w in after:
                rows = adasum.allgather(w[np.newaxis]).numpy()
                assert rows[0].tobytes() == rows[1].tobytes()


@on_ranks(2)
@pytest.mark.parametrize(
    "families",
    [["keras", "v1"], pytest.param(["tf_keras", "tf_keras legacy"], marks=needs_tf_keras)],
)
def test_one_device_strategy(families):
    for family in families:
        _check_one_device_strategy(family)


def _check_one_device_strategy(family):
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    weights = worker.initial_weights(0)
    xs, ys = (np.stack(part) for part in zip(*worker.batches(adasum.rank(), 8), strict=True))
    want = worker.simulate([weights] * 2, 8, 3)
    keras.config.set_floatx("float64")
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")

    def make():
        with strategy.scope():
            if family == "keras":
                trained = [keras.Variable(w) for w in weights]
                variables = [v.value for v in trained]
            else:
                variables = trained = _variables(weights)
            return variables, trained, _sgd(family, 3)

    # A loop on the device, as in MLPerf's TF2 program.
    variables, trained, optimizer = make()

    def step(x, y):
        optimizer.apply_gradients(zip(_gradients(variables, x, y), trained, strict=True))

    @tf.function
    def loop():
        for i in tf.range(8):
            strategy.run(step, args=(tf.constant(xs)[i], tf.constant(ys)[i]))

    loop()
    strategy.run(optimizer.sync)
    _close(variables, want[-1], "loop")

    # Gradients of two calls are accumulated, and applied in a branch in cross-replica context.
    variables, trained, optimizer = make()
    sums = [tf.Variable(tf.zeros_like(v)) for v in variables]
    calls = tf.Variable(0)

    def accumulate(x, y):
        for s, g in zip(sums, _gradients(variables, x, y), strict=True):
            s.assign_add(g / 2)
        calls.assign_add(1)
        tf.distribute.get_replica_context().merge_call(maybe_apply)

    def maybe_apply(distribution):
        def apply():
            optimizer.apply_gradients(zip(list(sums), trained, strict=True))
            for s in sums:
                s.assign(tf.zeros_like(s))

        tf.cond(
            calls % 2 == 0,
            lambda: distribution.extended.call_for_each_replica(apply),
            lambda: None,
        )

    @tf.function
    def accumulating_loop():
        for i in tf.range(16):
            strategy.run(accumulate, args=(tf.constant(xs)[i // 2], tf.constant(ys)[i // 2]))

    accumulating_loop()
    optimizer.sync()
    _close(variables, want[-1], "accumulating loop")


@on_ranks(2)
@needs_tf_keras
def test_checkpoint_in_the_middle_of_a_window():
    import tempfile

    import tensorflow as tf

    import tf_adasum as adasum

    weights = worker.initial_weights(0)
    want = worker.simulate([weights] * 2, 8, 3)
    data = list(worker.dataset(adasum.rank(), 8))

    def make(family):
        variables, optimizer = _variables(weights), _sgd(family, 3)
        named = {f"w{i}": v for i, v in enumerate(variables)}
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, **named)

        @tf.function
        def step(x, y):
            gradients = _gradients(variables, x, y)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        return variables, optimizer, checkpoint, step

    for family in FAMILIES[1:]:
        _, _, checkpoint, step = make(family)
        checkpoint.write(f"{tempfile.mkdtemp()}/at-first")
        for x, y in data[:4]:
            step(x, y)
        path = checkpoint.write(f"{tempfile.mkdtemp()}/half-way")
        # Restored before the state is there, as programs do it.
        variables, optimizer, checkpoint, step = make(family)
        status = checkpoint.read(path)
        for x, y in data[4:]:
            step(x, y)
        status.assert_consumed()
        assert int(optimizer.syncs) == 2 and int(optimizer.local_step) == 2
        optimizer.sync()
        _close(variables, want[-1], family)
