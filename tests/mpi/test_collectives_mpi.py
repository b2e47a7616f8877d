"""The TensorFlow ops: eager and in tf.function, on all dtypes, with what they refuse."""

import numpy as np
import pytest
from cases import DTYPES, allowed_error, assert_close, vectors
from ranks import on_ranks

from tf_adasum import reference


@on_ranks(1, 3)
def test_reductions():
    import tensorflow as tf

    import tf_adasum as adasum

    rank, size = adasum.rank(), adasum.size()
    shapes = [(7, 3), (), (0, 2), (11,)]
    for dtype in DTYPES.values():
        per_rank = vectors(shapes, dtype, size)
        mine = [tf.constant(array) for array in per_rank[rank]]
        for op, combine in (
            (adasum.Adasum, reference.tree),
            (adasum.Sum, lambda v: np.sum(np.asarray(v, np.float64), axis=0)),
            (adasum.Average, lambda v: np.mean(np.asarray(v, np.float64), axis=0)),
        ):
            eager = adasum.grouped_allreduce(mine, op=op, name="any text: [1]")
            reduce = tf.function(lambda tensors, op=op: adasum.grouped_allreduce(tensors, op=op))
            for t, graph in enumerate(reduce(mine)):
                of_t = [arrays[t] for arrays in per_rank]
                want = combine(of_t)
                assert_close(eager[t].numpy(), want, allowed_error(want, of_t, dtype), f"{op} {t}")
                assert eager[t].numpy().tobytes() == graph.numpy().tobytes()
                alone = adasum.allreduce(mine[t], op=op)
                if dtype != DTYPES["float64"]:
                    continue
                assert_close(alone.numpy(), want, allowed_error(want, of_t, dtype), "alone")


@on_ranks(3)
def test_everything_else_that_ops_do():
    import tensorflow as tf

    import tf_adasum as adasum

    rank, size = adasum.rank(), adasum.size()
    functions = (lambda f: f, tf.function)  # eager, graph
    for run in functions:
        # Moving: any dtype; first dimensions may differ in an allgather.
        assert run(lambda: adasum.broadcast(tf.constant([rank, 5]), 1))().numpy().tolist() == [1, 5]
        rows = run(lambda: adasum.allgather(tf.fill([rank, 2], rank)))()
        assert rows.numpy().tolist() == [[1, 1], [2, 2], [2, 2]]
        assert run(lambda: adasum.allgather(tf.constant([rank == 1])))().numpy().tolist() == [
            False,
            True,
            False,
        ]
        run(adasum.barrier)()
        # Variables, some of which are equal already.
        variables = [tf.Variable([1.0, 2.0]), tf.Variable(rank), tf.Variable(True)]
        changed = run(lambda v=variables: adasum.broadcast_variables(v, root_rank=2))()
        assert bool(changed) == (rank != 2)
        assert variables[1].numpy() == 2 and variables[0].numpy().tolist() == [1, 2]
        assert not run(lambda v=variables: adasum.broadcast_variables(v, root_rank=2))()
        # Sparse gradients stand for dense ones.
        slices = tf.IndexedSlices(
            tf.fill([1, 2], float(rank + 1)), tf.constant([rank]), tf.constant([size, 2])
        )
        dense = run(lambda s=slices: adasum.allreduce(s))()
        assert dense.numpy().tolist() == [[1, 1], [2, 2], [3, 3]]  # orthogonal: the sum
        # The order of ops without data between them is the program's.
        both = run(lambda: [adasum.broadcast(tf.constant(rank), root) for root in range(size)])()
        assert [int(b) for b in both] == [0, 1, 2]
    assert not adasum.broadcast_variables([]) and adasum.grouped_allreduce([]) == []

    # A value that somebody still holds is not overwritten.
    variable = tf.Variable([float(rank)] * 3)
    held = variable.read_value()
    adasum.broadcast_variables([variable], root_rank=2)
    assert held.numpy().tolist() == [float(rank)] * 3 and variable.numpy().tolist() == [2.0] * 3

    # Shapes are known while a function is traced.
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def shapes(x):
        assert adasum.allreduce(x).shape.as_list() == [None, 4]
        assert adasum.broadcast(tf.zeros([2, 3])).shape == (2, 3)
        assert adasum.allgather(tf.zeros([2, 3])).shape.as_list() == [None, 3]
        return x

    shapes.get_concrete_function()


@on_ranks(2)
def test_refusals():
    import tensorflow as tf

    import tf_adasum as adasum

    def refused(error, message, call):
        with pytest.raises(error, match=message):
            call()
        with pytest.raises(error, match=message):
            tf.function(call)()

    rank = adasum.rank()
    invalid = tf.errors.InvalidArgumentError
    refused(TypeError, "float64. Received: .*int32", lambda: adasum.allreduce(tf.constant([1])))
    refused(ValueError, "`op` must be", lambda: adasum.allreduce(tf.zeros(1), op="max"))
    refused(
        invalid,
        "`root_rank` must be a rank, from 0 to 1. Received: 2",
        lambda: adasum.broadcast(tf.zeros(1), 2),
    )
    refused(
        invalid,
        "ranks disagree.*\n.*rank 0.*[2].*rank 1.*[3]",
        lambda: adasum.allreduce(tf.zeros(2 + rank)),
    )
    refused(invalid, "name: 'a'.*name: 'b'", lambda: adasum.allreduce(tf.zeros(2), name="ab"[rank]))
    refused(
        invalid,
        "op: adasum.*op: sum",
        lambda: adasum.allreduce(tf.zeros(2), op=["adasum", "sum"][rank]),
    )
    refused(invalid, "root rank: 0.*root rank: 1", lambda: adasum.broadcast(tf.zeros(2), rank))
    refused(
        invalid,
        "call: allreduce.*call: barrier",
        lambda: adasum.barrier() if rank else adasum.allreduce(tf.zeros(1)),
    )
    refused(
        invalid,
        "numbers and booleans. Received: string",
        lambda: adasum.broadcast(tf.constant("a")),
    )
    refused(
        invalid,
        "number of tensors: 0.*number of tensors: 1",
        lambda: adasum.grouped_allreduce([tf.zeros(1)] * rank),
    )
    refused(TypeError, "Received: .*Tensor", lambda: adasum.broadcast_variables(tf.zeros(1)))
    refused(TypeError, "a tf.Variable or", lambda: adasum.broadcast_variables([3.0]))
    refused(TypeError, "Received: dict", lambda: adasum.grouped_allreduce({"a": tf.zeros(1)}))
    with pytest.raises((ValueError, invalid), match=r"at least rank 1|a scalar"):
        adasum.allgather(tf.constant(1))
    # After all that the ranks still work together.
    assert adasum.allreduce(tf.ones(2), op=adasum.Sum).numpy().tolist() == [2, 2]
