"""`partition_state`: a host's ranks as one worker, against plain optimizers and NumPy."""

import os

import numpy as np
import pytest
import workers
from optimizers import every_optimizer
from ranks import on_ranks

START = [np.random.default_rng(7).normal(size=shape) for shape in [(6, 4), (4,), (4, 3), (), (9,)]]


def _gradients(rank, step, variables):
    import tensorflow as tf

    rng = np.random.default_rng([rank, step])
    return [tf.constant(rng.normal(size=v.shape)) + 0.1 * v.value for v in variables]


def _of_hosts(hosts, scale=1.0):
    """The gradients of workers that are hosts: the mean of their ranks'."""

    def gradients(host, step, variables):
        of_ranks = [_gradients(rank, step, variables) for rank in hosts[host]]
        mean = [sum(each) / len(hosts[host]) for each in zip(*of_ranks, strict=True)]
        return [scale * grad for grad in mean]

    return gradients


def _pretend(ranks_per_host):
    """Before this process is initialized: so many of this host's ranks are taken for a host."""
    os.environ["TF_ADASUM_RANKS_PER_HOST"] = str(ranks_per_host)


def _split(size, ranks_per_host):
    ranks = list(range(size))
    return [ranks[i : i + ranks_per_host] for i in range(0, size, ranks_per_host)]


def _elements(variables):
    return sum(int(np.prod(v.shape)) for v in variables)


_OPTIMIZERS = (
    "momentum",
    "Adam",
    "Adafactor",
    "Lamb",
    "Muon",
    "MultiOptimizer",
    "ScheduleFreeAdamW",
)


def _check(make, optimizer, hosts, start=START, steps=4, scale=1.0, local_steps=2, relative=1e-10):
    want = workers.simulate(
        make,
        start,
        _of_hosts(hosts, scale),
        workers=len(hosts),
        steps=steps,
        local_steps=local_steps,
    )
    got = workers.run(optimizer, start, _gradients, steps=steps)
    workers.assert_equal(got, want, relative, type(optimizer.inner_optimizer).__name__)
    accumulated = optimizer.inner_optimizer.gradient_accumulation_steps or 1
    assert int(optimizer.iterations) == steps / accumulated
    # The change must be one that matters, or the comparison says nothing.
    assert np.abs(want[-1][0] - start[0]).max() > 1e-4


@on_ranks(4, timeout=200)
def test_equals_hosts_that_are_workers():
    import keras

    import tf_adasum as adasum
    from tf_adasum import core

    keras.config.set_floatx("float64")
    _pretend(2)
    hosts = _split(4, 2)
    made = {name: make for name, make in every_optimizer().items() if name in _OPTIMIZERS}
    for name, make in made.items():
        start = [w for w in START if name != "Muon" or w.ndim > 0]
        optimizer = adasum.AdasumOptimizer(make(), 2, partition_state=True)
        _check(make, optimizer, hosts, start)
        # All ranks of a host together have what one would have, and each about half of it.
        own = _elements(optimizer._starts)
        whole = sum(w.size for w in start)
        assert own <= whole / 2 + max(w.size for w in start) + len(start), (name, own, whole)
    # The sum of a host's gradients instead of the mean.
    optimizer = adasum.AdasumOptimizer(
        made["Adam"](), 1, partition_state=True, algorithm="hierarchical_sum"
    )
    _check(made["Adam"], optimizer, hosts, scale=2.0, local_steps=1)
    assert core.local_size() == 2 and core.cross_size() == 2


@on_ranks(3, timeout=120)
def test_hosts_of_different_sizes_and_one_host():
    import keras

    import tf_adasum as adasum
    from tf_adasum import core

    keras.config.set_floatx("float64")
    for ranks_per_host in (2, 3, 1):
        _pretend(ranks_per_host)
        hosts = _split(3, ranks_per_host)
        make = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
        optimizer = adasum.AdasumOptimizer(make(), 2, partition_state=True)
        if len(hosts) > 1:
            _check(make, optimizer, hosts)
        else:
            # One worker: there is nothing to combine.
            want = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(START)]
            plain = make()
            for step in range(4):
                plain.apply(_of_hosts(hosts)(0, step, want), want)
            got = workers.run(optimizer, START, _gradients, steps=4)
            workers.assert_equal(got[-1:], [[w.numpy() for w in want]], 1e-10, "one host")
        core.shutdown()


def _digest(variables):
    from tf_adasum import core

    mine = np.concatenate([v.numpy().ravel() for v in variables])
    return len({row.tobytes() for row in core.allgather(mine[None])})


@on_ranks(4, timeout=120)
def test_uneven_numbers_of_steps_and_other_first_weights():
    """A rank without data takes part in its host's steps, and its host in the others' syncs."""
    import keras

    import tf_adasum as adasum
    from tf_adasum import core

    keras.config.set_floatx("float64")
    _pretend(2)
    steps = (3, 5, 2, 2)  # of each rank; two of a host's are of hosts 0 and 1
    rank = core.rank()
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1), 2, partition_state=True)
    variables = [keras.Variable(w + rank, name=f"w{i}") for i, w in enumerate(START)]
    constant = [[np.full(w.shape, 0.25 * (r + 1)) for w in START] for r in range(4)]
    for _ in range(steps[rank]):
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in constant[rank]], variables)
    optimizer.sync()
    assert _digest(variables) == 1

    # By hand. Rank 0's weights count, and the other ranks' first gradients are dropped.
    gradients = [
        [[0.25], [0.375], [0.375], [0.5], [0.5]],  # host 0: ranks 0 and 1, from step 3 on rank 1
        [None, [0.875]],  # host 1: both were at other weights in step 0
    ]
    from tf_adasum import reference

    now = [w.copy() for w in START]
    for window in range(3):
        deltas = []
        for host in gradients:
            taken = host[2 * window : 2 * window + 2]
            deltas.append(-0.1 * sum(g[0] for g in taken if g))
        now = [w + reference.tree([np.full(w.shape, delta) for delta in deltas]) for w in now]
    for variable, want in zip(variables, now, strict=True):
        np.testing.assert_allclose(variable.numpy(), want, rtol=1e-12)
    assert int(optimizer.iterations) == (5 if rank < 2 else 2)
    # Nothing is pending any more.
    before = [v.numpy() for v in variables]
    optimizer.sync()
    assert all((v.numpy() == b).all() for v, b in zip(variables, before, strict=True))


@on_ranks(4, timeout=120)
def test_what_depends_on_all_gradients():
    """Clipping by the norm of all, loss scaling, accumulation, averages of the weights."""
    import keras

    import tf_adasum as adasum

    keras.config.set_floatx("float64")
    _pretend(2)
    hosts = _split(4, 2)
    o = keras.optimizers
    for make in (
        lambda: o.Adam(0.01, global_clipnorm=0.5),
        lambda: o.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        lambda: o.SGD(0.1, momentum=0.9, clipnorm=0.3),
        lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    ):
        optimizer = adasum.AdasumOptimizer(make(), 1, partition_state=True)
        _check(make, optimizer, hosts, local_steps=1, relative=1e-7)
    scaled = o.LossScaleOptimizer(o.SGD(0.1, global_clipnorm=0.5), initial_scale=8.0)
    optimizer = adasum.AdasumOptimizer(scaled, 1, partition_state=True)
    variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(START)]
    optimizer.build(variables)
    rank = adasum.rank()
    bad = [np.full(w.shape, np.nan if rank == 1 and i == 2 else 1.0) for i, w in enumerate(START)]
    # One rank's overflow in one layer: no rank of its host takes the step, and all lower the scale.
    optimizer.apply([keras.ops.convert_to_tensor(g) for g in bad])
    assert float(scaled.dynamic_scale) == (4.0 if rank < 2 else 8.0)
    assert int(optimizer.iterations) == (0 if rank < 2 else 1)
    optimizer.sync()
    assert _digest(variables) == 1
    # Gradients of 1/8, of which the loss was 8 times as large: clipped by the norm of all of them.
    count = sum(w.size for w in START)
    assert np.sqrt(count) / 8 > 0.5
    want = [w - 0.1 * 0.5 / np.sqrt(count) for w in START]
    for variable, w in zip(variables, want, strict=True):
        np.testing.assert_allclose(variable.numpy(), w, rtol=1e-6)


@on_ranks(4, timeout=120)
def test_a_change_that_is_not_finite():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    keras.config.set_floatx("float64")
    _pretend(2)
    rank = adasum.rank()
    for nonfinite in ("skip", "raise"):
        optimizer = adasum.AdasumOptimizer(
            keras.optimizers.SGD(0.5), 1, partition_state=True, nonfinite=nonfinite
        )
        variables = [keras.Variable(w, name=f"w{i}") for i, w in enumerate(START)]
        grads = [keras.ops.ones(w.shape) for w in START]
        if rank == 3:
            grads[0] *= np.inf
        if nonfinite == "raise":
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"tensor 0 .*of host 1"):
                optimizer.apply(grads, variables)
            continue
        optimizer.apply(grads, variables)
        # All of host 1's change counts as zero, in layers of both of its ranks.
        for variable, w in zip(variables, START, strict=True):
            np.testing.assert_allclose(variable.numpy(), w - 0.5, rtol=1e-12)
        assert int(optimizer._window.skips) == (0 if rank < 2 else 1)


def _fit(epochs, callbacks=(), model=None):
    import keras
    import worker

    import tf_adasum as adasum

    if model is None:
        # Of each rank its own: the standard callbacks give all of them rank 0's.
        model = worker.build_model(worker.initial_weights(adasum.rank()), "float64")
        model.compile(
            optimizer=adasum.AdasumOptimizer(keras.optimizers.Adam(0.05), 2, partition_state=True),
            loss="mse",
            jit_compile=False,
        )
    model.fit(
        worker.dataset(adasum.rank(), 5, "float64"),
        epochs=epochs,
        callbacks=[*adasum.callbacks.standard(), *callbacks],
        shuffle=False,
        verbose=0,
    )
    return model


@on_ranks(4, timeout=150)
def test_saving_gathers_the_state_and_loading_spreads_it():
    import keras
    import worker

    from tf_adasum import core

    keras.config.set_floatx("float64")
    # One host, since only the first one's state is saved, and the others go on with that.
    _pretend(4)
    with worker.shared_folder() as folder:
        whole = _fit(4)
        saves = keras.callbacks.ModelCheckpoint(f"{folder}/m{{epoch}}.keras")
        first = _fit(2, callbacks=[saves])
        core.barrier()
        assert keras.ops.convert_to_numpy(first.optimizer.iterations) == 10

        # Each rank loads the file and takes what it owns.
        again = keras.models.load_model(f"{folder}/m2.keras")
        adam = again.optimizer.inner_optimizer
        # Momentum and velocity of the largest of the layers, or of all others; and stand-ins.
        assert _elements(adam.variables) == 2 + 2 * ((30, 10, 5, 2)[core.rank()] + 3)
        _fit(2, model=again)
        for got, want in zip(again.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)

        # Rank 0 alone loads it, and the callbacks spread it.
        other = keras.models.load_model(f"{folder}/m{2 if core.rank() == 0 else 1}.keras")
        _fit(2, model=other)
        for got, want in zip(other.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)

        # On another number of ranks a host: as one would have it that was never partitioned.
        core.shutdown()
        _pretend(2)
        third = keras.models.load_model(f"{folder}/m2.keras")
        parts = [v.numpy().ravel() for v in third.optimizer.inner_optimizer.variables[2:]]
        sizes = core.allgather(np.array([[p.size for p in parts]]))
        whole_sizes = np.repeat([30, 5, 10, 2], 2)
        for host in (sizes[:2], sizes[2:]):  # of each variable one rank of a host has it in full
            assert (np.sort(host, axis=0) == [np.ones(8), whole_sizes]).all()
        core.shutdown()
        _pretend(4)
        core.init()

        # What no rank has in full is not saved.
        if core.rank() == 0:
            with pytest.raises(RuntimeError, match="gather_state"):
                whole.save(f"{folder}/no.keras")
        whole.optimizer.gather_state()
        if core.rank() == 0:
            whole.save(f"{folder}/yes.keras")
            saved = [int(v.size) for v in whole.optimizer._gathered[1]]
            assert saved[-8:] == [30, 30, 5, 5, 10, 10, 2, 2]
        core.barrier()


def _functional_model(seed, outputs=2):
    """Unlike a Sequential, it has the same names after `load_model`."""
    import keras

    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs)(hidden))


def _compile(model, inner):
    import tf_adasum as adasum

    optimizer = adasum.AdasumOptimizer(inner, 2, partition_state=True)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


@on_ranks(2, timeout=120)
def test_a_state_that_rank_0_alone_loads():
    import keras
    import worker

    from tf_adasum import core

    keras.config.set_floatx("float64")
    adam = lambda: keras.optimizers.Adam(0.05)  # noqa: E731
    with worker.shared_folder() as folder:
        whole = _fit(2, model=_compile(_functional_model(1), adam()))
        saves = keras.callbacks.ModelCheckpoint(f"{folder}/m.keras")
        _fit(1, [saves], model=_compile(_functional_model(1), adam()))
        core.shutdown()
        # As a job that has just started does, whose other ranks have no optimizer yet.
        if core.rank() == 0:
            model = keras.models.load_model(f"{folder}/m.keras")
        else:
            model = _compile(_functional_model(2), adam())
        _fit(1, model=model)
        for got, want in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


@on_ranks(2, timeout=120)
def test_what_is_saved_is_of_one_moment():
    import keras
    import worker

    from tf_adasum import core

    keras.config.set_floatx("float64")
    with worker.shared_folder() as folder:

        class Slower(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.optimizer.learning_rate = 0.25

        # After the state was gathered, before it is saved.
        callbacks = [Slower(), keras.callbacks.ModelCheckpoint(f"{folder}/m.keras")]
        model = _fit(1, callbacks, _compile(_functional_model(1), keras.optimizers.Adam(0.05)))
        core.barrier()
        assert float(keras.models.load_model(f"{folder}/m.keras").optimizer.learning_rate) == 0.25

        # In mid-window, and no more after the sync.
        model.optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables])
        model.optimizer.gather_state()
        if core.rank() == 0:
            model.save(f"{folder}/m.keras")
        model.optimizer.sync()
        if core.rank() == 0:
            with pytest.raises(RuntimeError, match="gather_state"):
                model.save(f"{folder}/m.keras")


@on_ranks(2, timeout=120)
def test_state_that_looks_like_a_stand_in_of_ones():
    """Adafactor's sums over the rows of a layer with one output are of one element."""
    import keras
    import worker

    from tf_adasum import core

    keras.config.set_floatx("float64")
    with worker.shared_folder() as folder:
        model = _compile(_functional_model(1, outputs=1), keras.optimizers.Adafactor(0.05))
        optimizer, variables = model.optimizer, model.trainable_variables
        optimizer.build(variables)
        optimizer.apply([keras.ops.ones(v.shape) * 0.5 for v in variables])
        optimizer.gather_state()
        if core.rank() == 0:
            model.save(f"{folder}/m.keras")
        core.barrier()
        loaded = keras.models.load_model(f"{folder}/m.keras").optimizer
        own = [v.numpy() for v in optimizer.inner_optimizer._c]
        again = [v.numpy() for v in loaded.inner_optimizer._c]
        mine = optimizer._layout.mine(range(len(variables)))
        assert core.allgather(np.array([2 in mine])).sum() == 1
        for i in mine:
            assert again[i].shape == own[i].shape
            np.testing.assert_array_equal(again[i], own[i])
        if 2 in mine:
            assert own[2].shape == (1,) and own[2][0] > 0 and core.rank() == 1


@on_ranks(2, timeout=120)
def test_an_end_of_the_data_that_is_found_in_the_step():
    """Where Keras does not know how many batches there are, its step's function runs once more."""
    import keras
    import tensorflow as tf
    import worker

    import tf_adasum as adasum

    keras.config.set_floatx("float64")
    rank = adasum.rank()
    model = _compile(_functional_model(1), keras.optimizers.SGD(0.05))
    with worker.shared_folder() as folder:
        # Also a save that one rank comes to in mid-epoch, where the other has come to its end.
        saves = keras.callbacks.ModelCheckpoint(f"{folder}/m.keras", save_freq=2)
        for batches in ((1, 3), (4, 2)):
            data = worker.dataset(rank, batches[rank], "float64").filter(lambda x, y: True)
            assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
            callbacks = [*adasum.callbacks.standard(), saves]
            model.fit(data, epochs=2, callbacks=callbacks, verbose=0)
            assert _digest(model.variables) == 1
    assert int(model.optimizer.iterations) == 2 * (3 + 4)


@on_ranks(2)
def test_refused():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    make = lambda **options: adasum.AdasumOptimizer(  # noqa: E731
        keras.optimizers.SGD(0.1, **options), partition_state=True
    )
    variable = keras.Variable(np.ones(3), name="w", trainable=True)
    variable.constraint = keras.constraints.NonNeg()
    with pytest.raises(ValueError, match="constraints"):
        make().build([variable])
    variable.constraint = None
    with pytest.raises(ValueError, match="global_clipnorm"):
        make(global_clipnorm=1.0, gradient_accumulation_steps=2).build([variable])
    optimizer = make()
    optimizer.build([variable])
    with pytest.raises(NotImplementedError, match="gather_state"):
        tf.train.Checkpoint(optimizer=optimizer).write("unused")
    with pytest.raises(ValueError, match="not given"):
        optimizer.apply([tf.ones(3)], [keras.Variable(np.ones(3), name="other")])
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply([None], [variable])
    step = tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]), jit_compile=True)
    with pytest.raises(tf.errors.UnimplementedError, match=r"partition_state.*jit_compile=False"):
        step()
    with pytest.raises(ValueError, match="LossScaleOptimizer has to be inside"):
        keras.optimizers.LossScaleOptimizer(make())
    # Ranks that do not agree are told so.
    rank = adasum.rank()
    other = adasum.AdasumOptimizer(
        keras.optimizers.SGD(0.1), local_steps=1 + rank, partition_state=True
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"local_steps={1 + rank}"):
        other.apply([tf.ones(3)], [keras.Variable(np.ones(3), name="w")])
    model = _functional_model(1)
    unlike = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1), partition_state=rank == 0)
    model.compile(optimizer=unlike, loss="mse", jit_compile=False)
    with pytest.raises(adasum.core.DisagreementError, match=f"partition_state={rank == 0}"):
        _fit(1, model=model)
