"""What MLPerf's two ResNet-50 references do with an optimizer, in programs of our own.

`examples/mlperf/README.md` names their functions. The weights are compared with NumPy's.
"""

import importlib.util

import numpy as np
import pytest
import worker
from ranks import on_ranks

from tf_adasum import reference

# float64 models: what is left is the rounding of a few hundred operations.
EXACT = 1e-12
LOCAL_STEPS = 3

needs_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)


def _close(got, want, what):
    for a, b in zip(got, want, strict=True):
        error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        assert error < EXACT, f"{what}: relative error {error}"


def _loss(variables, x, y):
    import tensorflow as tf

    w1, b1, w2, b2 = variables
    return tf.reduce_mean((tf.tanh(x @ w1 + b1) @ w2 + b2 - y) ** 2)


class _CustomLoop:
    """The form for TensorFlow 2.

    Gradients come from a function of their own that XLA compiles. Those of two calls are summed up
    in weights of the optimizer and applied in a branch, by a count of calls that is the optimizer's
    `iterations`. A checkpoint is restored before there is any state.
    """

    def __init__(self, folder, loss_scale):
        import tensorflow as tf
        import tf_keras

        import tf_adasum as adasum

        self.strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        with self.strategy.scope():
            self.variables = [tf.Variable(w, name="w") for w in worker.initial_weights(0)]
            schedules = tf_keras.optimizers.schedules
            rate = schedules.PiecewiseConstantDecay([10**6], [worker.RATE, 1.0])
            optimizer = tf_keras.optimizers.legacy.SGD(rate, momentum=worker.MOMENTUM)
            if loss_scale is not None:
                optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
                    optimizer, dynamic=False, initial_scale=loss_scale
                )
            self.loss_scale = loss_scale
            self.optimizer = adasum.DistributedOptimizer(
                optimizer, backward_passes_per_step=LOCAL_STEPS
            )
            self.sums = [
                self.optimizer.add_weight(
                    name=f"sum_{i}",
                    shape=v.shape,
                    dtype=tf.float64,
                    initializer="zeros",
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                for i, v in enumerate(self.variables)
            ]
        named = {f"w{i}": v for i, v in enumerate(self.variables)}
        self.manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(optimizer=self.optimizer, **named),
            folder,
            max_to_keep=2,
            step_counter=self.optimizer.iterations,
            checkpoint_interval=1,
        )
        self.restored = self.manager.restore_or_initialize()
        batches = worker.batches(adasum.rank(), 8)
        self.xs, self.ys = (tf.constant(np.stack(part)) for part in zip(*batches, strict=True))
        self.gradients = tf.function(self._gradients, jit_compile=True)
        self.train = tf.function(self._train)

    def _gradients(self, x, y):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = _loss(self.variables, x, y) / 2
            if self.loss_scale is not None:
                loss = self.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, self.variables)
        if self.loss_scale is not None:
            # The scaling is there, and it has to be taken back: this is no step without it.
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        return gradients

    def _train(self, first, last):
        import tensorflow as tf

        for call in tf.range(first, last):
            self.strategy.run(self._call, args=(self.xs[call // 2], self.ys[call // 2]))

    def _call(self, x, y):
        import tensorflow as tf

        for total, gradient in zip(self.sums, self.gradients(x, y), strict=True):
            total.assign_add(gradient, read_value=False)
        tf.distribute.get_replica_context().merge_call(self._maybe_apply)

    def _maybe_apply(self, distribution):
        import tensorflow as tf

        iterations = self.optimizer.iterations

        def apply_in_replica():
            self.optimizer.apply_gradients(zip(list(self.sums), self.variables, strict=True))
            for total in self.sums:
                total.assign(tf.zeros_like(total), read_value=False)

        def apply():
            distribution.extended.call_for_each_replica(apply_in_replica)
            return iterations.assign_add(0, read_value=False)

        tf.cond(
            tf.equal(iterations % 2, 1), apply, lambda: iterations.assign_add(1, read_value=False)
        )


@on_ranks(2)
@needs_tf_keras
def test_the_custom_loop_form():
    import tempfile

    import tensorflow as tf

    # Of each step's gradient each call gives half.
    want = worker.simulate([worker.initial_weights(0)] * 2, 8, LOCAL_STEPS)
    for loss_scale in (None, 128.0):
        what = f"loss scale {loss_scale}"
        folder = tempfile.mkdtemp()
        program = _CustomLoop(folder, loss_scale)
        assert program.restored is None
        program.train(tf.constant(0), tf.constant(6))
        _close(program.variables, want[0], f"{what}, first sync")
        program.train(tf.constant(6), tf.constant(10))
        program.manager.save(checkpoint_number=program.optimizer.iterations)
        program.train(tf.constant(10), tf.constant(16))
        program.optimizer.sync()
        _close(program.variables, want[-1], what)
        assert int(program.optimizer.iterations) == 16 and int(program.optimizer.syncs) == 3

        program = _CustomLoop(folder, loss_scale)
        assert program.restored is not None and int(program.optimizer.iterations) == 10
        program.train(tf.constant(10), tf.constant(16))
        assert int(program.optimizer.syncs) == 2
        program.optimizer.sync()
        _close(program.variables, want[-1], f"{what}, restored")


@on_ranks(2)
@needs_tf_keras
def test_the_custom_loop_forms_evaluation():
    import tensorflow as tf
    import tf_keras

    import tf_adasum as adasum

    rank = adasum.rank()
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        accuracy = tf_keras.metrics.SparseCategoricalAccuracy()
        normalization = tf_keras.layers.BatchNormalization(momentum=0.0)
    # Of four examples three are right, and of two one: two thirds of all, not the mean of the two.
    labels = [[0, 1, 1, 1], [0, 1]][rank]
    guesses = [[0, 1, 1, 0], [0, 0]][rank]
    accuracy.update_state(labels, tf.one_hot(guesses, 2))
    for variable in accuracy.variables:
        variable.assign(adasum.allreduce(variable, op=adasum.Sum))
    np.testing.assert_allclose(float(accuracy.result()), 4 / 6, rtol=1e-6)
    # Both of rank 0's are 0, and rank 1's 4 and 1.
    normalization(tf.constant([[rank * 3.0], [rank * 5.0]]), training=True)
    for variable in normalization.non_trainable_variables:
        variable.assign(adasum.allreduce(variable, op=adasum.Average))
    assert [float(v[0]) for v in normalization.non_trainable_variables] == [2.0, 0.5]


@on_ranks(2, fresh=True)
def test_the_estimator_form():
    """Each call of `train` makes a graph and a session of its own and goes on from a checkpoint.

    An Estimator's own saver would come before the hooks that it is given, so the last checkpoint
    would hold the rank's own last steps; it makes none if a saver is among those.
    """
    import tempfile

    import tensorflow as tf

    import tf_adasum as adasum

    v1, rank = tf.compat.v1, adasum.rank()
    v1.disable_v2_behavior()
    v1.enable_resource_variables()
    folder = tempfile.mkdtemp()
    weights = [worker.initial_weights(seed) for seed in range(2)]
    batches = worker.batches(rank, 9)

    def model(x, y):
        variables = [v1.get_variable(f"w{i}", initializer=w) for i, w in enumerate(weights[rank])]
        v1.get_variable("count", initializer=np.int32(0))  # its gradient is None
        global_step = v1.train.get_or_create_global_step()
        rate = tf.cast(
            v1.train.piecewise_constant(global_step, [10**6], [worker.RATE, 1.0]), tf.float64
        )
        optimizer = adasum.DistributedOptimizer(
            v1.train.MomentumOptimizer(rate, worker.MOMENTUM), backward_passes_per_step=LOCAL_STEPS
        )
        loss = _loss(variables, x, y)
        return optimizer, loss, global_step

    def minimize(x, y):
        optimizer, loss, global_step = model(x, y)
        return optimizer.minimize(loss, global_step)

    def scale(x, y):
        optimizer, loss, global_step = model(x, y)
        pairs = optimizer.compute_gradients(loss * 128)
        pairs = [(g if g is None else g / 128, v) for g, v in pairs]
        return optimizer.apply_gradients(pairs, global_step)

    def train(train_op_of, first, last):
        with tf.Graph().as_default():
            xs, ys = (np.stack(part) for part in zip(*batches[first:last], strict=True))
            data = tf.data.Dataset.from_tensor_slices((xs, ys))
            x, y = v1.data.make_one_shot_iterator(data).get_next()
            strategy = v1.distribute.OneDeviceStrategy("/cpu:0")
            with strategy.scope():
                train_op = strategy.extended.call_for_each_replica(train_op_of, args=(x, y))
            hooks = [
                adasum.SyncHook(),
                v1.train.CheckpointSaverHook(folder, save_steps=10**6),
            ]
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=folder,
                hooks=hooks,
                save_checkpoint_secs=0,
                save_summaries_steps=0,
            ) as session:
                while not session.should_stop():
                    session.run(train_op)
        reader = tf.train.load_checkpoint(folder)
        assert reader.get_tensor("global_step") == last
        return [reader.get_tensor(f"w{i}") for i in range(4)]

    # Between the two calls a window ends early, and all ranks get rank 0's momenta.
    data = [worker.batches(r, 9) for r in range(2)]
    want, momenta = weights[0], [[np.zeros_like(w) for w in weights[0]] for _ in range(2)]
    for train_op_of, first, last in ((minimize, 0, 5), (scale, 5, 9)):
        for begin in range(first, last, LOCAL_STEPS):
            deltas = []
            for r in range(2):
                own = [w.copy() for w in want]
                for step in range(begin, min(begin + LOCAL_STEPS, last)):
                    for i, g in enumerate(worker.gradient(own, *data[r][step])):
                        momenta[r][i] = worker.MOMENTUM * momenta[r][i] - worker.RATE * g
                        own[i] = own[i] + momenta[r][i]
                deltas.append([w - s for w, s in zip(own, want, strict=True)])
            want = [s + reference.tree(list(d)) for s, *d in zip(want, *deltas, strict=True)]
        momenta = [[m.copy() for m in momenta[0]] for _ in range(2)]
        _close(train(train_op_of, first, last), want, train_op_of.__name__)
