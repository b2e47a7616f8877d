"""Every optimizer that Keras ships, wrapped: on 2 ranks against plain ones and NumPy."""

import numpy as np
import workers
from optimizers import every_optimizer
from ranks import on_ranks


def _gradients(worker, step, variables):
    import tensorflow as tf

    rng = np.random.default_rng([worker, step])
    # They depend on the weights, so that an error in one window shows in all later ones.
    return [tf.constant(rng.normal(size=v.shape)) + 0.1 * v.value for v in variables]


START = [np.random.default_rng(7).normal(size=shape) for shape in [(6, 4), (4,), (4, 3), ()]]


@on_ranks(2, timeout=150)
def test_equals_plainevery_optimizer():
    import keras

    import tf_adasum as adasum

    keras.config.set_floatx("float64")
    made = every_optimizer()
    assert len(made) >= 19, sorted(made)
    for name, make in made.items():
        start = START if name != "Muon" else START[:3]
        options = {"steps": 6, "workers": 2, "local_steps": 2}
        want = workers.simulate(make, start, _gradients, **options)
        optimizer = adasum.AdasumOptimizer(make(), 2)
        got = workers.run(optimizer, start, _gradients, steps=6)
        workers.assert_equal(got, want, 1e-10, name)
        assert int(optimizer.iterations) == 6
        # The change must be one that matters, or the comparison says nothing.
        assert np.abs(want[-1][0] - start[0]).max() > 1e-4, name


@on_ranks(2, timeout=100)
def test_inner_state_local_or_averaged():
    import keras

    import tf_adasum as adasum

    keras.config.set_floatx("float64")
    o = keras.optimizers
    for name, make in {
        "momentum": lambda: o.SGD(0.1, momentum=0.9),
        "Adam": lambda: o.Adam(0.01),
        "Nadam": lambda: o.Nadam(0.01),
    }.items():
        results = {}
        for average in (False, True):
            want = workers.simulate(
                make, START, _gradients, workers=2, steps=6, local_steps=2, average_state=average
            )
            optimizer = adasum.AdasumOptimizer(make(), 2, average_inner_state=average)
            got = workers.run(optimizer, START, _gradients, steps=6)
            workers.assert_equal(got, want, 1e-10, f"{name}, averaged: {average}")
            results[average] = got[-1][0]
        assert np.abs(results[True] - results[False]).max() > 1e-6
