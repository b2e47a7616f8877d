"""Numbers that are none, denormal ones and odd dtypes, through TensorFlow on real ranks."""

import contextlib
import math
import os
import sys
import tempfile

import numpy as np
import pytest
from cases import DTYPES
from ranks import on_ranks

SUPPORTED = "float16, bfloat16, float32 or float64"


@contextlib.contextmanager
def _stderr(lines):
    """Adds what the process, not Python alone, writes meanwhile."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().splitlines()


@on_ranks(2, timeout=150)
def test_an_optimizer_with_a_change_that_is_not_finite():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()
    shapes = {"first": (5,), "middle": (301, 7), "last": ()}
    places = {"first": 4, "middle": (300, 6), "last": ()}
    algorithms = ["rvh", "ring", "rvh", "hierarchical_sum"]
    kinds = [math.nan, math.inf, -math.inf]

    def start(nonfinite, dtype, algorithm):
        variables = [
            keras.Variable(np.ones(shape), dtype=dtype, name=name) for name, shape in shapes.items()
        ]
        optimizer = adasum.AdasumOptimizer(
            keras.optimizers.SGD(1.0), nonfinite=nonfinite, algorithm=algorithm
        )
        optimizer.build(variables)
        step = lambda g: optimizer.apply(g, variables)  # noqa: E731
        return optimizer, variables, tf.function(step) if dtype == "float16" else step

    def gradients(dtype, bad, name):
        # Exact in every dtype: the weights grow by 1 on rank 0, by 2 on rank 1.
        gradients = [np.full(shape, -1.0 - rank) for shape in shapes.values()]
        if rank == 1:
            gradients[list(shapes).index(name)][places[name]] = bad
        return [tf.cast(g, dtype) for g in gradients]

    def skips(optimizer):
        return int(optimizer._counters["skips"])

    def weights(variables):
        return [np.unique(np.asarray(v.numpy(), np.float64)).tolist() for v in variables]

    for (dtype, algorithm), (case, name) in zip(
        zip(DTYPES, algorithms, strict=True), enumerate([*shapes, "middle"]), strict=True
    ):
        what = f"{dtype} {algorithm} {name}"
        optimizer, variables, step = start("skip", dtype, algorithm)
        for count, bad in enumerate([kinds[case % 3], kinds[(case + 1) % 3]], 1):
            said = []
            with _stderr(said):
                step(gradients(dtype, bad, name))
            # Rank 1's change counts as zero in every variable, and it has rank 0's weights now.
            assert weights(variables) == [[1.0 + count]] * 3, what
            assert int(optimizer.syncs) == count and int(optimizer.local_step) == 0, what
            assert skips(optimizer) == count * rank, what
            warning = (
                "tf_adasum: warning: rank 1's change of the weights since the last sync is not"
            )
            assert [line.startswith(warning) for line in said] == [True] * rank, (what, said)
        named = rf"NaN or infinity in tensor {list(shapes).index(name)} of rank 1 \({name}\)"
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{named}, the 3rd time in a row"):
            step(gradients(dtype, kinds[(case + 2) % 3], name))
        # As after the local step: nothing came of the sync.
        assert rank == 1 or weights(variables) == [[4.0]] * 3, what
        assert (int(optimizer.syncs), skips(optimizer)) == (2, 2 * rank), what

        optimizer, variables, step = start("raise", dtype, algorithm)
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{named}(?!, the)"):
            step(gradients(dtype, kinds[case % 3], name))
        assert rank == 1 or weights(variables) == [[2.0]] * 3, what
        assert (int(optimizer.syncs), skips(optimizer)) == (0, 0), what

    # Beside training, the error comes when the change is due.
    variable = keras.Variable([1.0, 1.0])
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0), nonfinite="raise", overlap=True)
    optimizer.apply([tf.constant([math.inf if rank else -1.0, -1.0])], [variable])
    before = variable.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="in tensor 0 of rank 1"):
        optimizer.sync()
    np.testing.assert_array_equal(variable.numpy(), before)


@on_ranks(2, timeout=150)
def test_denormals_and_dtypes():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()

    # TensorFlow's threads take denormal numbers for zero. 21: a remainder for every register.
    for dtype in DTYPES.values():
        as_bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
        tensor = tf.constant(np.full(21, 3, as_bits).view(dtype))
        for op, want in {"sum": 6, "average": 3, "adasum": 3}.items():
            for reduce in (adasum.allreduce, tf.function(adasum.allreduce)):
                assert reduce(tensor, op=op).numpy().view(as_bits).tolist() == [want] * 21, dtype

    # Tensors of every shape, and what can be moved but not reduced.
    mixed = [tf.constant(x) for x in (1.5 + rank, np.zeros((0, 3)), np.ones((2, 0)))]
    got = tf.function(lambda: adasum.grouped_allreduce(mixed, op="sum"))()
    assert float(got[0]) == 4 and [g.shape for g in got] == [(), (0, 3), (2, 0)]
    assert adasum.allgather(tf.zeros((0, 3), tf.int8)).shape == (0, 3)
    for dtype in (tf.int8, tf.int32, tf.int64, tf.uint16, tf.bool, tf.complex64, tf.complex128):
        tensor = tf.cast([rank, 1 - rank], dtype)
        refused = rf"allreduce takes {SUPPORTED}. Received: tensors\[1\] of dtype {dtype.name}"
        for op in ("adasum", "average"):
            with pytest.raises(TypeError, match=refused):
                adasum.grouped_allreduce([tf.ones(2), tensor], op=op)
        np.testing.assert_array_equal(adasum.broadcast(tensor, 1), np.array([1, 0]))
        np.testing.assert_array_equal(adasum.allgather(tensor), np.array([0, 1, 1, 0]))
    variant = tf.raw_ops.TensorListReserve(
        element_shape=[2], num_elements=3, element_dtype=tf.float32
    )
    for tensor, name in [(tf.constant("text"), "string"), (variant, "variant")]:
        with pytest.raises(TypeError, match=f"{SUPPORTED}. Received: .* of dtype {name}"):
            adasum.allreduce(tensor)
        moves = f"moves numbers and booleans. Received: {name}"
        for move in (adasum.broadcast, lambda t: adasum.allgather(tf.reshape(t, [1]))):
            with pytest.raises(tf.errors.InvalidArgumentError, match=moves):
                move(tensor)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received: string"):
        adasum.broadcast_variables([tf.Variable(["text"])])

    # Variables that cannot be combined are refused before the first step, not trained apart.
    for dtype in ("int32", "uint8", "complex64"):
        gradients = [tf.ones(2), tf.cast(tf.ones(2), dtype)]
        pair = [
            keras.Variable([1, 2], dtype=d, name=n) for d, n in (("float32", "w"), (dtype, "x"))
        ]
        optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(1.0))
        for apply in (optimizer.apply, tf.function(lambda g, o=optimizer, p=pair: o.apply(g, p))):
            with pytest.raises(
                ValueError, match=f"{SUPPORTED} together. Received: 'x' of dtype {dtype}"
            ):
                apply(gradients, *([pair] if apply == optimizer.apply else []))
        assert pair[0].numpy().tolist() == [1, 2]
    v1 = tf.compat.v1.train
    optimizer = adasum.DistributedOptimizer(v1.GradientDescentOptimizer(1.0))
    pair = [tf.Variable([1.0, 2.0]), tf.Variable([1j, 2j], name="x")]
    with pytest.raises(ValueError, match="Received: 'x:0' of dtype complex128"):
        optimizer.apply_gradients([(tf.ones(2, v.dtype), v) for v in pair])
