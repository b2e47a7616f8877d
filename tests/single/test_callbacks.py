"""The callbacks where there is only one process: they change nothing. And what they measure."""

import keras
import numpy as np
import pytest

import tf_adasum as adasum


def _train(*callbacks):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(adasum.AdasumOptimizer("adam", local_steps=4), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": (x, x[:, :1])}
    history = model.fit(x, x[:, 1:2], callbacks=list(callbacks), **options).history
    return history, [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def test_on_one_rank_nothing_changes(tmp_path):
    plain, variables = _train()
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    # A writer may stand anywhere: there is nobody else who would write.
    history, same = _train(log, *adasum.callbacks.standard(), adasum.callbacks.Orthogonality())
    for a, b in zip(variables, same, strict=True):
        np.testing.assert_array_equal(a, b)
    measured = {name: history.pop(name) for name in list(history) if "orthogonality" in name}
    assert history == plain
    assert len(measured) == 7 and np.isnan(list(measured.values())).all()


def test_orthogonality():
    a, b = np.array([3.0, 0.0]), np.array([0.0, 4.0])
    zero = np.zeros(2)
    per_rank = [[a, a, zero, a], [b, a, zero, zero]]
    np.testing.assert_allclose(adasum.orthogonality(per_rank), [1, 0.5, np.nan, 1])
    for wrong in ([], [[a], [a, b]]):
        with pytest.raises(ValueError, match="as many tensors for each"):
            adasum.orthogonality(wrong)
