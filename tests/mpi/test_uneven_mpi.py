"""Ranks with different numbers of batches: all finish, with the same weights."""

import numpy as np
import pytest
import worker
from ranks import on_ranks


@pytest.mark.parametrize("local_steps", [1, 4])
@on_ranks(3)
def test_uneven_batches(local_steps):
    import keras

    import tf_adasum as adasum

    rank = adasum.rank()

    def train(batches, callbacks=(), **options):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
        optimizer = adasum.AdasumOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.5), local_steps=local_steps
        )
        model.compile(optimizer, "mse", jit_compile=False)
        data = worker.dataset(rank, batches[rank], "float32")
        history = model.fit(data, verbose=0, callbacks=list(callbacks), **options)
        assert int(optimizer.iterations) == batches[rank] * options["epochs"]
        trained = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
        assert len({row.tobytes() for row in worker.gathered(trained)}) == 1
        assert np.isfinite(trained).all()
        if callbacks:
            assert len(worker.hashes(model)) == 1
            for name, values in history.history.items():
                assert len({row.tobytes() for row in worker.gathered(values)}) == 1, name

    folder = worker.shared_folder()
    validation = worker.dataset(10 + rank, 2 + rank, "float32")
    for batches in ([10, 9, 9], [4, 11, 9]):
        train(batches, epochs=2)
        # Rank 0 saves at each fourth of its batches, also when others have ended their epoch.
        callbacks = [
            *adasum.callbacks.standard(),
            keras.callbacks.ModelCheckpoint(folder / f"{rank}.keras", save_freq=4),
        ]
        train(batches, callbacks, epochs=2, validation_data=validation)
    adasum.barrier()
    assert [path.name for path in folder.iterdir()] == ["0.keras"]
    worker.remove(folder)


@on_ranks(2)
def test_uneven_steps_with_a_constraint():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    variable = keras.Variable([1.0, 0.0, 0.0])
    variable.constraint = keras.constraints.UnitNorm(axis=0)
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.3))
    for step in range(3 + 2 * rank):
        optimizer.apply_gradients([(-tf.one_hot(step % 3, 3) * (1 + rank), variable)])
    optimizer.sync()
    np.testing.assert_allclose(np.linalg.norm(variable.numpy()), 1, rtol=1e-6)
    assert len({row.tobytes() for row in worker.gathered(variable)}) == 1
