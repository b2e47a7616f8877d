"""Collectives on TensorFlow tensors and variables, as custom ops: eager, in tf.function, in graphs.

Every rank runs the same collectives in the same order. Where ranks differ in the call, its
options, or the number, dtypes or shapes of the tensors, every rank gets
`tf.errors.InvalidArgumentError` with the ranks and what differs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adasum import core, native
from tf_adasum.core import Adasum, Op

_REDUCIBLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@functools.cache
def _library() -> Any:
    native.core_library()
    native.check_tensorflow(tf.__version__)
    return tf.load_op_library(str(native.TENSORFLOW_OPS))


def ops() -> Any:
    """The generated wrappers of ops/tf/ops.cc, with this process initialized.

    Raises:
        ImportError: if they were built for another TensorFlow or MPI than the one running.
    """
    library = _library()
    core.init()
    return library


@functools.cache
def _eager_order() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="tf_adasum_order")


_order_of_graph: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def order() -> tf.Tensor:
    """The resource that all collectives share, so that they run in the program's order."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return _eager_order().handle
        # A graph of TensorFlow 1: nothing reads the variable, so it need not be initialized.
        graph = tf.compat.v1.get_default_graph()
        if graph not in _order_of_graph:
            _order_of_graph[graph] = tf.raw_ops.VarHandleOp(
                shape=[], dtype=tf.int64, shared_name="tf_adasum_order"
            )
        return _order_of_graph[graph]


def allreduce(
    tensor: tf.Tensor | tf.IndexedSlices, op: Op | str = Adasum, name: str | None = None
) -> tf.Tensor:
    """`grouped_allreduce` of one tensor.

    `tf.IndexedSlices` stand for the dense tensor that is zero elsewhere, and the result is dense.
    """
    return grouped_allreduce([tensor], op, name)[0]


def grouped_allreduce(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices],
    op: Op | str = Adasum,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces each tensor by itself over all ranks, all in one fused exchange (the paper's 4.4.3).

    Args:
        tensors: float16, bfloat16, float32 or float64, of any shape; the same on all ranks.
        op: `Adasum` (the paper's equation 5 over Algorithm 1's tree), `Sum` or `Average`.
        name: shown in errors; must be equal on all ranks.

    Returns:
        Tensors with the shapes and dtypes of `tensors`, bitwise equal on all ranks.

    Raises:
        ValueError: if `op` is not one of the three.
        TypeError: if a dtype is not one of the four.
        tf.errors.InvalidArgumentError: on every rank, if the ranks' calls differ.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in _REDUCIBLE:
            raise TypeError(
                "allreduce takes float16, bfloat16, float32 or float64. Received: "
                f"tensors[{i}] of dtype {tensor.dtype.name}"
            )
    op = Op(op)
    if not tensors:
        return []
    return ops().adasum_allreduce(order(), tensors, op=op.value, call_name=name or "")


def broadcast(tensor: tf.Tensor, root_rank: int = 0, name: str | None = None) -> tf.Tensor:
    """root_rank's tensor; all ranks give one of the same shape and dtype, numbers or booleans."""
    return ops().adasum_broadcast(
        order(), [tf.convert_to_tensor(tensor)], root_rank=root_rank, call_name=name or ""
    )[0]


def broadcast_variables(
    variables: Sequence[tf.Variable], root_rank: int = 0, name: str | None = None
) -> tf.Tensor | None:
    """Assigns root_rank's values to the variables, `tf.Variable` or `keras.Variable`, of every
    rank.

    Returns:
        A boolean scalar: whether any bit of this rank's values was different. None if there are no
        variables.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if the ranks' variables differ in number,
            dtype or shape, or `root_rank` is not a rank.
    """
    if not variables:
        return None
    return ops().adasum_broadcast_variables(
        order(), handles(variables), root_rank=root_rank, call_name=name or ""
    )


def allgather(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """The ranks' tensors in rank order along their first dimension, in which alone they may differ.

    Raises:
        ValueError: if `tensor` is a scalar.
        tf.errors.InvalidArgumentError: on every rank, if dtypes or other dimensions differ.
    """
    return ops().adasum_allgather(order(), tf.convert_to_tensor(tensor), call_name=name or "")


def barrier(name: str | None = None) -> None:
    """Returns when every rank has come; in a tf.function, what follows waits for that."""
    ops().adasum_barrier(order(), call_name=name or "")


def handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The resources behind `tf.Variable`s or `keras.Variable`s."""
    return [(v if isinstance(v, tf.Variable) else v.value).handle for v in variables]
