"""jit_compile=True where the ops were built without XLA."""

import pytest

from tf_adasum import native


def test_built_without_xla(monkeypatch):
    import keras
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import core

    info = {**native.build_info(), "xla": False}
    monkeypatch.setattr(native, "build_info", lambda: info)
    calls = [
        adasum.barrier,
        lambda: adasum.allgather(tf.zeros(2)),
        # In a branch, and in a function of its own.
        lambda: tf.cond(tf.constant(1) > 0, adasum.barrier, lambda: None),
        lambda: tf.function(adasum.barrier)(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"built without XLA.*jit_compile=False"):
            tf.function(call, jit_compile=True)()
        tf.function(call)()

    # As on one of several ranks: while the first step is traced, before anything waits for others.
    monkeypatch.setattr(core, "size", lambda: 2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(adasum.AdasumOptimizer("sgd"), "mse", jit_compile=True)
    with pytest.raises(RuntimeError, match=r"built without XLA.*jit_compile=False"):
        model.fit(tf.zeros([4, 2]), tf.zeros([4, 1]), verbose=0)
