"""The ops compiled by XLA, against the same ops in graphs."""

import numpy as np
import pytest
import worker
from cases import DTYPES, vectors
from ranks import on_ranks

from tf_adasum import native

pytestmark = pytest.mark.skipif(
    not native.build_info()["xla"], reason="built without XLA, as for TensorFlow before 2.21"
)

# float64 models: XLA fuses and reorders operations, so each may round differently. What is left of
# that after a few hundred of them; the collectives themselves are compared bit for bit.
EXACT = 1e-12

# Anything may stand in a name, and has to get through the text of XLA's program.
NAME = "\"quotes\" 'and' \\backslashes\\n, {braces} = %d;\n\ttabs, \x01, äöü 你好 🙂"


def _bytes(tensors):
    return [tensor.numpy().tobytes() for tensor in tensors]


@on_ranks(2, fresh=True)
def test_every_collective_gives_the_bits_of_the_graph():
    import tensorflow as tf

    import tf_adasum as adasum

    rank, size = adasum.rank(), adasum.size()
    # XLA's kernels must be found although XLA was in use before the ops are loaded.
    assert tf.function(lambda x: x + 1, jit_compile=True)(1) == 2
    shapes = [(31, 33), (), (0, 2), (700,)]
    for dtype in DTYPES.values():
        mine = [tf.constant(array) for array in vectors(shapes, dtype, size)[rank]]

        def every_op(tensors, numbers, flags):
            adasum.barrier(name=NAME)
            outputs = []
            for op in adasum.Adasum, adasum.Sum, adasum.Average:
                outputs += adasum.grouped_allreduce(tensors, op=op, name=NAME)
                outputs.append(adasum.allreduce(tensors[0] @ tf.transpose(tensors[0]), op=op))
            outputs += [adasum.broadcast(x, size - 1) for x in (*tensors, numbers, flags)]
            # What was an operand before is as it was.
            return outputs + [x + x for x in tensors] + [numbers, flags]

        arguments = mine, tf.range(5) * rank, tf.constant([rank == 0, True])
        graph = tf.function(every_op)(*arguments)
        compiled = tf.function(every_op, jit_compile=True)(*arguments)
        products = range(len(shapes), 3 * (len(shapes) + 1), len(shapes) + 1)
        for i, (g, c) in enumerate(zip(graph, compiled, strict=True)):
            if i not in products:  # XLA's matrix product rounds otherwise
                assert g.numpy().tobytes() == c.numpy().tobytes(), (dtype, i)

    # Each size gets a program of its own.
    reduce = tf.function(
        lambda x: adasum.allreduce(x, op=adasum.Sum),
        input_signature=[tf.TensorSpec([None, 2])],
        jit_compile=True,
    )
    for rows in (3, 0, 5):
        assert reduce(tf.ones([rows, 2])).numpy().tolist() == [[size] * 2] * rows

    for variables in (
        [tf.Variable(tf.fill([2, 3], float(rank))), tf.Variable(rank), tf.Variable(rank == 1)],
        [tf.Variable(tf.fill([1 + i % 7], float(rank))) for i in range(160)],
    ):
        broadcast = tf.function(
            lambda v=variables: adasum.broadcast_variables(v, root_rank=1, name=NAME),
            jit_compile=True,
        )
        assert bool(broadcast()) == (rank != 1)
        assert not broadcast()
        assert all((v.numpy() == 1).all() for v in variables)


@on_ranks(3)
def test_a_sync_gives_the_bits_of_the_graph():
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import collectives

    rank = adasum.rank()
    for name, dtype in DTYPES.items():
        shapes = [(31, 5), (), (0, 2)]
        if name == "float32":
            shapes += [(1 + i % 11,) for i in range(160)]
        starts = vectors(shapes, dtype, 1, seed=1)[0]
        values = vectors(shapes, dtype, 3)[rank]
        states = vectors([(4,), ()], dtype, 3, seed=2)[rank]
        broken = [np.full_like(v, np.nan) for v in values] if rank == 2 else values

        def sync(jit_compile, values, pending, starts=starts, states=states, **options):
            residuals = [v * 0 for v in starts] if "wire_dtype" in options else []
            all_values = (values, starts, states, residuals)
            groups = [[tf.Variable(v) for v in group] for group in all_values]

            def call(pending, skips):
                return collectives.ops().adasum_sync(
                    *[collectives.handles(group) for group in groups],
                    pending,
                    skips,
                    tf.constant([4, 7], tf.int64),
                    collectives.order(),
                    call_name=NAME,
                    **options,
                )

            arguments = tf.constant(pending), tf.constant(0, tf.int64)
            results = tf.function(call, jit_compile=jit_compile, autograph=False)(*arguments)
            return _bytes([*results, *(variable for group in groups for variable in group)])

        for mine, pending, options in (
            (values, True, {"op": "adasum"}),
            (starts if rank == 1 else values, rank != 1, {"op": "average", "flush": True}),
            (broken, True, {"op": "adasum"}),
            (starts, False, {"op": "sum"}),
            (values, True, {"op": "adasum", "wire_dtype": "bfloat16", "flush": True}),
        ):
            compiled, graph = (sync(j, mine, pending, **options) for j in (True, False))
            assert compiled == graph, (dtype, options)


@on_ranks(3)
def test_calls_keep_the_order_of_the_program():
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()

    # Traced before anybody knows that it will be compiled.
    @tf.function
    def traced_before(x):
        adasum.barrier(name="traced before")
        return adasum.allreduce(x, op=adasum.Sum, name="traced before: sum")

    # No call needs what another one gives.
    def program(xs, yes, variable):
        y = [adasum.broadcast(xs[i], root_rank=i % 3, name=f"broadcast {i}") for i in range(3)]
        adasum.barrier(name="first")
        tf.cond(yes, lambda: adasum.barrier(name="in a branch"), lambda: None)
        y.append(adasum.allreduce(xs[3], op=adasum.Sum, name="sum"))
        y.append(tf.cond(yes, lambda: adasum.allreduce(xs[4], name="branch"), lambda: xs[4]))
        y.append(tf.cond(yes, lambda: adasum.broadcast(xs[5], 1), lambda: xs[5]))
        for _ in tf.range(3):
            adasum.barrier(name="in a loop")
            tf.cond(yes, lambda: adasum.barrier(name="in a branch in a loop"), lambda: None)
        # A matrix that XLA might keep by columns.
        y.append(adasum.allreduce(tf.transpose(xs[2]), op=adasum.Sum, name="transposed"))
        y.append(traced_before(xs[6]))
        adasum.broadcast_variables([variable], root_rank=2, name="variable")
        y += [adasum.allreduce(xs[i], op=adasum.Sum, name=f"sum {i}") for i in (7, 6, 5)]
        adasum.barrier(name="last")
        return y

    xs = [tf.reshape(tf.range(2000.0), [50, 40]) * (rank + i) for i in range(8)]
    traced_before(xs[6])
    # Rank 0 alone compiles it: its calls meet those of the others only in the program's order, and
    # give the same only if the ranks' memory is laid out alike.
    for eager in (True, False):
        variable = tf.Variable([1.0 * rank] * 3)
        want = tf.function(program)(xs, tf.constant(True), variable)
        function = program if eager else tf.function(program)
        mixed = tf.function(program, jit_compile=True) if rank == 0 else function
        for _ in range(10):
            got = mixed(xs, tf.constant(True), variable)
            assert _bytes(got) == _bytes(want)
        assert variable.numpy().tolist() == [2, 2, 2]


@on_ranks(2)
def test_errors():
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import collectives

    rank = adasum.rank()
    invalid = tf.errors.InvalidArgumentError

    def refused(message, call, error=invalid):
        with pytest.raises(error, match=message):
            tf.function(call, jit_compile=True)()
        # The ranks still work together.
        assert adasum.allreduce(tf.ones(2), op=adasum.Sum).numpy().tolist() == [2, 2]

    def sync(values, starts, **options):
        return collectives.ops().adasum_sync(
            collectives.handles(values),
            collectives.handles(starts),
            [],
            [],
            **{
                "pending": True,
                "skips_in_a_row": tf.constant(0, tf.int64),
                "wire_scale": tf.zeros(2, tf.int64),
                "order": collectives.order(),
                "op": "adasum",
                "call_name": NAME,
                **options,
            },
        )

    refused(
        r"ranks disagree.*\n.*rank 0.*float32\[2\].*rank 1.*float32\[3\]",
        lambda: adasum.allreduce(tf.zeros(2 + rank)),
    )
    refused(
        "call: allreduce.*call: barrier",
        lambda: adasum.barrier() if rank else adasum.allreduce(tf.zeros(1)),
    )
    refused("Received: 2", lambda: adasum.broadcast(tf.zeros(1), 2))
    names = [NAME, NAME + "'"]
    shown = r"(?s)ranks disagree.*rank 0 with .*🙂'; rank 1 with .*🙂''"
    refused(shown, lambda: adasum.allreduce(tf.zeros(2), name=names[rank]))
    # Also between a rank that compiles and one that does not.
    with pytest.raises(invalid, match=r"rank 0 .*float64\[2\].*rank 1 .*float16\[2\]"):
        call = lambda: adasum.allreduce(tf.zeros(2, [tf.float64, tf.float16][rank]))  # noqa: E731
        tf.function(call, jit_compile=rank == 0)()

    # Nothing is lost by an error: the variables still hold what they held.
    values, starts = [tf.Variable([3.0, 4.0 + rank])], [tf.Variable([1.0, 1.0 + rank])]
    refused("start", lambda: sync(values, starts))
    broken = [tf.Variable([np.nan, 1.0])]
    equal = [tf.Variable([1.0, 1.0])]
    refused("NaN or infinity", lambda: sync(broken, equal, nonfinite="raise"))
    refused("NaN|row", lambda: sync(broken, equal, skips_in_a_row=tf.constant(2, tf.int64)))
    doubles = [tf.Variable(np.ones(2))]
    refused("variable 0 is float.*, but its start is double", lambda: sync(values, doubles))
    assert values[0].numpy().tolist() == [3, 4 + rank]
    assert starts[0].numpy().tolist() == [1, 1 + rank]
    refused("only once", lambda: adasum.broadcast_variables(values * 2))

    refused(
        "allgather cannot be compiled by XLA.* jit_compile=False",
        lambda: adasum.allgather(tf.zeros(2)),
        tf.errors.UnimplementedError,
    )


@pytest.mark.parametrize("inner", ["SGD", "Adam"])
@on_ranks(2, timeout=120)  # XLA compiles for most of it
def test_training_equals_that_of_the_graph(inner):
    import keras

    import tf_adasum as adasum
    from tf_adasum import core

    rank, size = adasum.rank(), adasum.size()
    weights = [worker.initial_weights(seed) for seed in range(size)]

    def train(steps, callbacks, jit_compile, **options):
        make = {
            "SGD": lambda: keras.optimizers.SGD(worker.RATE, momentum=worker.MOMENTUM),
            "Adam": lambda: keras.optimizers.Adam(0.01),
        }
        model = worker.build_model(weights[rank])
        optimizer = adasum.AdasumOptimizer(make[inner](), **options)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
        callbacks = adasum.callbacks.standard() if callbacks else []
        data = worker.dataset(rank, steps)
        losses = model.fit(data, callbacks=callbacks, shuffle=False, verbose=0).history["loss"]
        flat = np.concatenate([w.ravel() for w in model.get_weights()])
        assert len({row.tobytes() for row in core.allgather(flat[None])}) == 1
        assert int(optimizer.iterations) == steps
        return model, int(optimizer.syncs), losses

    # Without callbacks the first gradient was computed at other weights and is dropped.
    for steps, callbacks, local_steps in (7, True, 3), (4, False, 1):
        options = {"local_steps": local_steps, "average_inner_state": inner == "Adam"}
        graph, syncs, losses = train(steps, callbacks, False, **options)
        compiled, compiled_syncs, compiled_losses = train(steps, callbacks, True, **options)
        assert compiled_syncs == syncs == -(-steps // local_steps)
        worker.assert_weights(compiled, graph.get_weights(), EXACT, str(options))
        np.testing.assert_allclose(compiled_losses, losses, rtol=1e-6)  # Keras keeps float32
        if inner == "SGD":
            want = worker.simulate(weights, steps, local_steps, drop_first=not callbacks)
            worker.assert_weights(compiled, want[-1], EXACT, "simulation")
