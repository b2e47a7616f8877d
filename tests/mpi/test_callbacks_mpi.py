"""The callbacks on real ranks: who starts from what, who writes, who decides, what is measured."""

import csv
import importlib.util

import numpy as np
import pytest
import worker
from ranks import on_ranks


def _model(inputs=6, **compile_options):
    import keras

    model = keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(2),
        ]
    )
    model.compile(jit_compile=False, loss="mse", **compile_options)
    return model


def _tensorboard(folder):
    import keras

    # Keras's callback needs the package, which does not come with TensorFlow.
    if importlib.util.find_spec("tensorboard") is None:
        return []
    return [keras.callbacks.TensorBoard(folder, histogram_freq=1)]


@on_ranks(2)
def test_only_rank_0_writes_and_all_ranks_are_synced_when_it_does():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    keras.utils.set_random_seed(rank)
    folder = worker.shared_folder()
    own = folder / f"rank{rank}"
    saved = []

    class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            saved.append(batch)

    class Look(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.equal = []

        def on_train_batch_end(self, batch, logs=None):
            self.equal.append(len(worker.hashes(self.model)) == 1)

    model = _model(
        optimizer=adasum.AdasumOptimizer(keras.optimizers.SGD(0.01), local_steps=4),
        metrics=["mae"],
    )
    data = worker.dataset(rank, 8, "float32")
    look = Look()
    mine = [
        keras.callbacks.ModelCheckpoint(own / "best.keras", save_best_only=True),
        OwnCheckpoint(own / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3),
        keras.callbacks.CSVLogger(folder / f"rank{rank}.csv"),
        *_tensorboard(own / "board"),
        keras.callbacks.BackupAndRestore(own / "backup", save_freq=5, delete_checkpoint=False),
        keras.callbacks.EarlyStopping(),
        look,
    ]
    history = model.fit(
        data,
        validation_data=data,
        epochs=2,
        verbose=0,
        callbacks=[*adasum.callbacks.standard(), *mine],
    )
    # Saves: every third and every fifth batch of 16. Between the saves and the ends of windows the
    # ranks differ. The sync at a save starts a new window of 4: none of them gets that far.
    saves = {2, 4, 5, 8, 9, 11, 14}
    assert [batch for batch in range(16) if look.equal[batch]] == sorted(saves)
    assert (saved != []) == (rank == 0)
    adasum.barrier()
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert not [name for name in files if name.startswith("rank1")]
    assert {f"rank0/{name}.weights.h5" for name in ("1-3", "1-6", "2-1", "2-4", "2-7")} <= files
    assert {"rank0/best.keras", "rank0/backup/latest.weights.h5", "rank0.csv"} <= files
    boards = [name for name in files if "tfevents" in name]
    if _tensorboard(own):
        assert {name.split("/")[2] for name in boards} == {"train", "validation"}
    # What is written are the averages.
    rows = list(csv.DictReader((folder / "rank0.csv").open()))
    for name, values in history.history.items():
        assert [float(row[name]) for row in rows] == values
        assert len({row.tobytes() for row in worker.gathered(values)}) == 1
    # What was saved last is what all ranks held: the best of two epochs.
    best = keras.models.load_model(folder / "rank0/best.keras")
    if np.argmin(history.history["val_loss"]) == 1:
        for a, b in zip(best.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    assert tf.io.gfile.exists(str(folder / "rank0/backup/training_metadata.json"))

    # The same writer before the standard callbacks: an error on all ranks.
    with pytest.raises(ValueError, match=r"must stand before .* Received: CSVLogger before it"):
        model.fit(data, callbacks=[mine[2], *adasum.callbacks.standard()], verbose=0)
    # Other classes may be named.
    lines = []

    class Print(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            lines.append(epoch)

    output = adasum.callbacks.RankZeroOutput(writers=[Print])
    model.fit(data, callbacks=[output, Print()], verbose=0)
    assert lines == ([0] if rank == 0 else [])
    worker.remove(folder)


@on_ranks(2)
def test_metrics_are_those_of_all_data():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import core

    rank = adasum.rank()
    keras.utils.set_random_seed(0)

    def compiled():
        model = worker.build_model(worker.initial_weights(0), "float32")
        metrics = ["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
        model.compile(adasum.AdasumOptimizer("sgd"), "mse", metrics=metrics, jit_compile=False)
        return model

    # Rank 0 has 10 batches, rank 1 has 7.
    numbers = [10, 7]
    parts = [worker.dataset(r, n, "float32") for r, n in enumerate(numbers)]
    standard = adasum.callbacks.standard
    model = compiled()
    # As one process finds them, but for R2, which is averaged.
    together = parts[0].concatenate(parts[1])
    want = model.evaluate(together, verbose=0, return_dict=True)
    alone = [model.evaluate(part, verbose=0, return_dict=True) for part in parts]
    assert abs(alone[0]["loss"] - alone[1]["loss"]) > 1e-3
    want["r2_score"] = (alone[0]["r2_score"] + alone[1]["r2_score"]) / 2
    seen = {}
    look = keras.callbacks.LambdaCallback(on_test_end=lambda logs: seen.update(logs))
    got = model.evaluate(parts[rank], verbose=0, return_dict=True, callbacks=[*standard(), look])
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)
    assert seen == got
    # The metrics themselves still hold what this rank has seen.
    assert float(model.metrics[0].result()) == alone[rank]["loss"]
    listed = model.evaluate(parts[rank], verbose=0, callbacks=standard())
    assert listed == [got[name] for name in model.metrics_names[:1]] + [
        got[name] for name in ("mae", "root_mean_squared_error", "r2_score")
    ]

    # In fit: with a learning rate of zero the weights stay, so the same numbers come out.
    model.optimizer.learning_rate = 0.0
    at_end = {}
    look = keras.callbacks.LambdaCallback(on_train_end=lambda logs: at_end.update(logs))
    for validation in ({}, {"validation_data": parts[1 - rank]}):
        history = model.fit(
            parts[rank],
            epochs=2,
            verbose=0,
            callbacks=[*standard(), look],
            **validation,
        ).history
        for name, value in want.items():
            np.testing.assert_allclose(history[name], [value] * 2, rtol=1e-6, err_msg=name)
            if validation:
                np.testing.assert_allclose(history[f"val_{name}"], [value] * 2, rtol=1e-6)
        assert at_end == {name: values[-1] for name, values in history.items()}

    # A step of one's own that logs something else under a metric's name: the plain mean.
    class Own(keras.Model):
        def train_step(self, data):
            super().train_step(data)
            return {"loss": tf.constant(float(rank)), "mine": tf.constant(2.0 * rank)}

    inputs = keras.Input((6,))
    own = Own(inputs, keras.layers.Dense(2)(inputs))
    own.compile(adasum.AdasumOptimizer("sgd"), "mse", jit_compile=False)
    history = own.fit(parts[rank], verbose=0, callbacks=standard()).history
    assert history == {"loss": [0.5], "mine": [1.0]}

    # A name that only one rank has.
    class Extra(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 1:
                logs["only here"] = 1.0

    with pytest.raises(core.DisagreementError, match=r"rank 1 .*only here"):
        model.fit(parts[rank], verbose=0, callbacks=[Extra(), *standard()])


@on_ranks(2)
def test_a_decision_of_one_rank_is_made_on_all():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    keras.utils.set_random_seed(rank)

    class StopAtBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = rank == 1 and self.epoch == 1 and batch == 2

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    class StopAtEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 1 and epoch == 1:
                self.model.stop_training = True

    model = _model(optimizer=adasum.AdasumOptimizer("sgd", local_steps=3))
    data = worker.dataset(rank, 8, "float32")
    for local_steps, stop in ((1, StopAtBatch), (3, StopAtBatch), (3, StopAtEpoch)):
        model.optimizer.local_steps = local_steps
        model.make_train_function(force=True)
        for validation in ({}, {"validation_data": data}):
            callbacks = [*adasum.callbacks.standard(), stop()]
            history = model.fit(data, epochs=5, verbose=0, callbacks=callbacks, **validation)
            assert len(history.epoch) == 2
            assert len(worker.hashes(model)) == 1

    # A loss that is not finite, in the middle of an epoch of one rank.
    xs, ys = (np.stack([part.numpy() for part in parts]) for parts in zip(*data, strict=True))
    xs, ys = xs.reshape(-1, 6), ys.reshape(-1, 2)
    if rank == 1:
        ys[5 * 4] = np.inf
    callbacks = [*adasum.callbacks.standard(), keras.callbacks.TerminateOnNaN()]
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = model.fit(xs, ys, epochs=5, **options)
    assert len(history.epoch) == 1 and not np.isfinite(history.history["loss"][0])
    assert len(worker.hashes(model)) == 1 and np.isfinite(model.get_weights()[0]).all()

    # Early stopping by a loss that falls on one rank and rises on the other.
    model.optimizer.learning_rate = 0.0
    falling = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(mine=epoch * (1.0 if rank else -3.0))
    )
    stopping = keras.callbacks.EarlyStopping("mine", mode="max", patience=1)
    callbacks = [falling, *adasum.callbacks.standard(), stopping]
    history = model.fit(data, epochs=6, verbose=0, callbacks=callbacks)
    assert history.epoch == [0, 1] and history.history["mine"] == [0.0, -1.0]


@on_ranks(2)
def test_state_at_the_start():
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()
    data = worker.dataset(rank, 5, "float32")
    standard = adasum.callbacks.standard

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            variables = [*self.model.variables, *self.model.optimizer.variables]
            # The start weights of all windows have one path.
            self.seen = {f"{v.path} {i}": v.numpy() for i, v in enumerate(variables)}

    def at_start(model, callbacks):
        look = Look()
        model.fit(data, verbose=0, callbacks=[*callbacks, look])
        return {path: worker.gathered(value) for path, value in look.seen.items()}

    def is_seed(path):
        return "seed_generator_state" in path

    def fill(model, what):
        for variable in [*model.variables, *model.optimizer.variables]:
            if "float" in variable.dtype:
                variable.assign(keras.ops.full(variable.shape, what))

    # Everything is rank 0's, in the model and in the optimizer; seeds follow from rank 0's.
    keras.utils.set_random_seed(10 + rank)
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    model = _model(optimizer=adasum.AdasumOptimizer(inner, local_steps=2))
    model.optimizer.build(model.trainable_variables)
    fill(model, 0.001 * (1 + rank))
    seed = next(v for v in model.variables if v.name == "seed_generator_state")
    seed.assign([77 + rank, 5 + rank])
    seen = at_start(model, standard())
    assert len(seen) > 20
    for path, (of_0, of_1) in seen.items():
        if is_seed(path):
            assert of_0.tolist() == [77, 5] and of_1[1] == 5 and of_1[0] != 77
        else:
            np.testing.assert_array_equal(of_0, of_1, err_msg=path)
            if "float" in str(of_0.dtype):
                assert (of_0 == np.float32(0.001)).all(), path

    # In a second fit each rank keeps its momentum and seeds: nothing has to be made equal.
    momentum = inner.variables[2]
    before = momentum.numpy()
    assert len({row.tobytes() for row in worker.gathered(before)}) == 2
    seed.assign([7, 9 * rank])
    seen = at_start(model, standard())
    (path,) = [path for path in seen if path.startswith(momentum.path + " ")]
    np.testing.assert_array_equal(seen[path][rank], before)
    (path,) = [path for path in seen if is_seed(path)]
    assert [state.tolist() for state in seen[path]] == [[7, 0], [7, 9]]
    # Not so after something was loaded on rank 0, or only its learning rate changed.
    for change in (lambda: fill(model, 0.002), lambda: inner.learning_rate.assign(0.01)):
        if rank == 0:
            change()
        for path, (of_0, of_1) in at_start(model, standard()).items():
            assert is_seed(path) or (of_0 == of_1).all(), path

    # The state of an optimizer is created, so that there is something to be made equal.
    model = _model(optimizer=adasum.AdasumOptimizer("adam", local_steps=2))
    assert any("momentum" in path for path in at_start(model, standard()))

    # A model that is built by its first batch: what is frozen becomes equal after that.
    frozen = keras.layers.Dense(4, trainable=False)
    layers = [frozen, keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    deferred = keras.Sequential(layers)
    deferred.compile(adasum.AdasumOptimizer("sgd", local_steps=3), "mse", jit_compile=False)
    kernels = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: kernels.append(frozen.kernel.numpy())
    )
    # One batch in the first epoch of rank 1.
    few = data.take(1) if rank else data
    deferred.fit(few, epochs=2, verbose=0, callbacks=[*standard(), look])
    assert (kernels[0] == kernels[-1]).all() == (rank == 0)
    of_0, of_1 = worker.gathered(frozen.kernel)
    np.testing.assert_array_equal(of_0, of_1)
    assert len(worker.hashes(deferred)) == 1
    # A frozen weight is never averaged: it stays to the bit.
    np.testing.assert_array_equal(kernels[-1], frozen.kernel)

    # Built on one rank only.
    half = keras.Sequential([keras.layers.Dense(2)])
    half.compile(adasum.AdasumOptimizer("sgd"), "mse", jit_compile=False)
    if rank == 0:
        half.build((None, 6))
    with pytest.raises(ValueError, match=r"not built on ranks \[1\]"):
        half.fit(data, verbose=0, callbacks=standard())


@on_ranks(3, 4)
def test_orthogonality():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank, size = adasum.rank(), adasum.size()
    everyone = [np.random.default_rng(50 + r) for r in range(size)]
    shapes = ((3, 2), (4,), ())
    gradients = [[[g.normal(size=s) for s in shapes] for _ in range(4)] for g in everyone]

    # Known gradients, of which two make a delta.
    variables = [keras.Variable(np.zeros(shape), dtype="float64") for shape in shapes]
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=2)
    for first in (0, 2):
        deltas = [[a + b for a, b in zip(*g[first : first + 2], strict=True)] for g in gradients]
        want = adasum.orthogonality(deltas)
        for step in (first, first + 1):
            own = map(tf.constant, gradients[rank][step])
            optimizer.apply_gradients(zip(own, variables, strict=True))
        np.testing.assert_allclose(optimizer.orthogonality, want, rtol=1e-5)

    # In fit: the loss is x . w, so its gradient is x, whatever w is.
    folder = worker.shared_folder()
    inputs = [keras.Input((3,)), keras.Input((5,))]
    dense = [keras.layers.Dense(1, use_bias=False, name=name) for name in ("a", "b")]
    model = keras.Model(inputs, dense[0](inputs[0]) + dense[1](inputs[1]))
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), local_steps=2)
    model.compile(optimizer, loss=lambda y, p: tf.reduce_sum(p), jit_compile=False)
    data = [[r.normal(size=(5, 1, n)).astype("float32") for n in (3, 5)] for r in everyone]
    own = tf.data.Dataset.from_tensor_slices((tuple(data[rank]), np.zeros((5, 1))))

    def of_batches(batches):
        values = adasum.orthogonality([[x[batches].sum(0) for x in xs] for xs in data])
        names = ["orthogonality/a/kernel", "orthogonality/b/kernel", "orthogonality"]
        return dict(zip(names, [*values, np.mean(values)], strict=True))

    at_batches = {}
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: at_batches.update({batch: dict(logs)})
    )
    measure = adasum.callbacks.Orthogonality(folder / f"rank{rank}", every=2)
    callbacks = [*adasum.callbacks.standard(), measure, look]
    history = model.fit(own, verbose=0, callbacks=callbacks).history
    want = {2: of_batches([0, 1]), 4: of_batches([2, 3]), 5: of_batches([4])}
    for name in want[2]:
        np.testing.assert_allclose(history[name], [want[5][name]], rtol=1e-5)
        np.testing.assert_allclose(at_batches[1][name], want[2][name], rtol=1e-5)
        np.testing.assert_allclose(at_batches[3][name], want[4][name], rtol=1e-5)
        assert name not in at_batches[2]
    # In TensorBoard's files, which are rank 0's and complete when it is here.
    adasum.barrier()
    files = [str(path) for path in sorted(folder.rglob("*tfevents*"))]
    assert len(files) == 1 and "rank0" in files[0]
    written = {}
    for record in tf.data.TFRecordDataset(files):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            written.setdefault(event.step, {})[value.tag] = float(tf.make_ndarray(value.tensor))
    for step, values in want.items():
        assert written[step].keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_allclose(written[step][name], value, rtol=1e-5)

    plain = worker.build_model()
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with an AdasumOptimizer"):
        plain.fit(np.zeros((2, 6)), np.zeros((2, 2)), callbacks=[measure], verbose=0)
    with pytest.raises(ValueError, match="Received: every=0"):
        adasum.callbacks.Orthogonality(every=0)
    with pytest.raises(ValueError, match=r"Received: \[1, 2\] tensors"):
        adasum.orthogonality([[np.ones(2)], [np.ones(2)] * 2])
    worker.remove(folder)
