"""Save, new processes, load, go on: the same bits as never having stopped."""

import pickle
from pathlib import Path

import numpy as np
import pool
import pytest
import worker
from ranks import on_ranks

BATCHES, SAVED_AFTER, LOCAL_STEPS = 11, 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What training has left behind, whose processes are gone."""
    folder = str(tmp_path_factory.mktemp("saved"))
    save_and_go_on(2, folder=folder)
    interrupt(2, folder=folder)
    pool.close()
    return folder


# Without Dropout: Keras does not save the state of seeds.
def _model(inner, **options):
    import keras

    import tf_adasum as adasum

    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = adasum.AdasumOptimizer(inner, LOCAL_STEPS, **options)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def _state(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


def _assert_same(got, want, what):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"{what}: variable {i}")


@on_ranks(2)
def save_and_go_on(folder):
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    own = Path(folder) / str(adasum.rank())
    own.mkdir()
    keras.utils.set_random_seed(adasum.rank())
    model = _model(keras.optimizers.Adam(0.01))

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == SAVED_AFTER:
                assert 0 < int(model.optimizer.local_step) < LOCAL_STEPS
                model.save(own / "model.keras")
                model.save_weights(own / "model.weights.h5")
                checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
                checkpoint.write(str(own / "checkpoint"))

    data = worker.dataset(adasum.rank(), BATCHES, "float32")
    model.fit(data, verbose=0, callbacks=[*adasum.callbacks.standard(), Save()])
    (own / "end.pickle").write_bytes(pickle.dumps(_state(model)))


@on_ranks(2)
def test_saving_in_the_middle_of_a_window(folder):
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    assert adasum.AdasumOptimizer  # Keras finds the class in a file once it was used
    own = Path(folder) / str(adasum.rank())
    want = pickle.loads((own / "end.pickle").read_bytes())
    rest = worker.dataset(adasum.rank(), BATCHES, "float32").skip(SAVED_AFTER)

    def other():
        keras.utils.set_random_seed(20 + adasum.rank())
        model = _model(keras.optimizers.Adam(0.01))
        model.optimizer.build(model.trainable_variables)
        return model

    def keras_file():
        return keras.models.load_model(own / "model.keras")

    def weights_file():
        model = other()
        model.load_weights(own / "model.weights.h5")
        return model

    def tensorflow_checkpoint():
        model = other()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.read(str(own / "checkpoint")).assert_consumed()
        return model

    for load in (keras_file, weights_file, tensorflow_checkpoint):
        model = load()
        assert int(model.optimizer.local_step) == SAVED_AFTER % LOCAL_STEPS
        model.fit(rest, verbose=0, callbacks=adasum.callbacks.standard())
        _assert_same(_state(model), want, load.__name__)


# Each rank goes on with rank 0's momentum, for rank 0's is what is saved. So only where ranks have
# no momentum of their own is the result the one without an interruption.
CASES = {
    "no state": ({"momentum": 0.0}, {}),
    "averaged state": ({"momentum": 0.5}, {"average_inner_state": True}),
    "own state": ({"momentum": 0.5}, {}),
}


def _train(case, seed, *callbacks):
    import keras

    import tf_adasum as adasum

    inner, options = CASES[case]
    keras.utils.set_random_seed(seed + adasum.rank())
    model = _model(keras.optimizers.SGD(0.01, **inner), **options)
    history = model.fit(
        worker.dataset(adasum.rank(), BATCHES, "float32"),
        epochs=4,
        verbose=0,
        callbacks=[*adasum.callbacks.standard(), *callbacks],
    )
    assert len(worker.hashes(model)) == 1
    return model, history


def _backup(folder, case):
    import keras

    # The same folder on all ranks.
    return keras.callbacks.BackupAndRestore(Path(folder) / case / "backup")


@on_ranks(2)
def interrupt(folder):
    import keras

    import tf_adasum as adasum

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    for case in CASES:
        with pytest.raises(InterruptedError):
            _train(case, 0, _backup(folder, case), Interrupt())
        model, _ = _train(case, 0)
        end = Path(folder) / case / f"{adasum.rank()}.pickle"
        end.write_bytes(pickle.dumps(_state(model)))


@on_ranks(2)
def test_backup_and_restore(folder):
    import tf_adasum as adasum

    for case in CASES:
        # Other weights at first: none of them counts.
        model, history = _train(case, 40, _backup(folder, case))
        assert history.epoch == [2, 3]
        assert not (Path(folder) / case / "backup").exists()
        want = pickle.loads((Path(folder) / case / f"{adasum.rank()}.pickle").read_bytes())
        if case != "own state":
            _assert_same(_state(model), want, case)
