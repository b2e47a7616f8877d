"""Collectives on TensorFlow tensors and variables, as custom ops: eager, in tf.function, in graphs.

In functions with `jit_compile=True` too, except for `allgather`, whose result has a shape that XLA
cannot know.

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

# No public name says whether a function with jit_compile=True is being traced.
from tensorflow.python.ops import control_flow_util

from tf_adasum import core, native
from tf_adasum.core import Adasum, Op
from tf_adasum.reductions import check_fusion_threshold, choose_algorithm

REDUCIBLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


# Before anything else fails in a way that does not tell.
native.check_tensorflow(tf.__version__)


@functools.cache
def _library() -> Any:
    native.core_library()
    return tf.load_op_library(str(native.TENSORFLOW_OPS))


def ops() -> Any:
    """The generated wrappers of ops/tf/ops.cc, with this process initialized.

    Raises:
        ImportError: if they were built for another TensorFlow or MPI than the one running.
        RuntimeError: in a function with jit_compile=True, if they were built without XLA.
    """
    library = _library()
    if _is_compiled_by_xla():
        native.check_xla()
    core.init()
    return library


def order(variables: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """What the ops take as `order`, so that a tf.function runs them in the order of the program.

    It is one resource for all of them. A tf.function orders the ops that share one, across
    branches, loops and functions; not an op that takes variables among those that take others or
    none. An op runs where its resources are, so this one is on the GPU if the variables are that it
    takes, given by their handles.
    """
    if tf.executing_eagerly() or not tf.inside_function():
        return []
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return [_order_of_version_1()]
    on_gpu = bool(tf.config.list_logical_devices("GPU")) and (
        _is_compiled_by_xla()
        or (native.has_cuda() and all("GPU" in handle.device for handle in variables))
    )
    return [_order_variable("GPU:0" if on_gpu else "CPU:0").handle]


@functools.cache
def _order_variable(device: str) -> tf.Variable:
    # Not in the function that is being traced.
    with tf.init_scope(), tf.device(device):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="adasum_order")


_orders_of_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _order_of_version_1() -> tf.Tensor:
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        if graph not in _orders_of_graphs:
            # Nothing reads the variable, so no session has to initialize it.
            _orders_of_graphs[graph] = tf.raw_ops.VarHandleOp(
                shape=[], dtype=tf.int64, shared_name="adasum_order"
            )
        return _orders_of_graphs[graph]


def _is_compiled_by_xla() -> bool:
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def allreduce(
    tensor: tf.Tensor | tf.IndexedSlices,
    op: Op | str = Adasum,
    name: str | None = None,
    **options: Any,
) -> tf.Tensor:
    """`grouped_allreduce` of one tensor.

    `tf.IndexedSlices` stand for the dense tensor that is zero elsewhere, and the result is dense.
    """
    return grouped_allreduce([tensor], op, name, **options)[0]


def grouped_allreduce(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices],
    op: Op | str = Adasum,
    name: str | None = None,
    *,
    algorithm: core.Algorithm | str | None = None,
    fusion_threshold: int | None = None,
) -> list[tf.Tensor]:
    """Reduces each tensor by itself over all ranks, in fused exchanges (the paper's 4.4.3).

    What becomes of NaN and infinity, `core.grouped_allreduce` says.

    Args:
        tensors: float16, bfloat16, float32 or float64, of any shape; the same on all ranks.
        op: `Adasum` (the paper's equation 5), `Sum` or `Average`.
        name: shown in errors; must be equal on all ranks.
        algorithm: as of `core.grouped_allreduce`.
        fusion_threshold: likewise.

    Returns:
        Tensors with the shapes and dtypes of `tensors`, bitwise equal on all ranks.

    Raises:
        ValueError: if `op`, `algorithm` or `fusion_threshold` is something else.
        TypeError: if a dtype is not one of the four.
        tf.errors.InvalidArgumentError: on every rank, if the ranks' calls differ.
    """
    _check_list("tensors", tensors)
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in REDUCIBLE:
            raise TypeError(
                "allreduce takes float16, bfloat16, float32 or float64. Received: "
                f"tensors[{i}] of dtype {tensor.dtype.name}"
            )
    # Also without tensors, so that ranks that disagree about that get to know.
    reduced = ops().adasum_allreduce(
        tensors,
        order(),
        op=Op(op).value,
        algorithm=choose_algorithm(algorithm).value,
        fusion_threshold=check_fusion_threshold(fusion_threshold),
        call_name=name or "",
    )
    return reduced if tensors else []


def broadcast(tensor: tf.Tensor, root_rank: int = 0, name: str | None = None) -> tf.Tensor:
    """root_rank's tensor; all ranks give one of the same shape and dtype, numbers or booleans."""
    return ops().adasum_broadcast(
        [tf.convert_to_tensor(tensor)], order(), root_rank=root_rank, call_name=name or ""
    )[0]


def broadcast_variables(
    variables: Sequence[tf.Variable],
    root_rank: int = 0,
    name: str | None = None,
    variable_names: Sequence[str] = (),
) -> tf.Tensor:
    """Assigns root_rank's values to the variables, `tf.Variable` or `keras.Variable`, of every
    rank.

    Args:
        variables: the same on all ranks, in the same order.
        root_rank: whose values count.
        name: shown in errors; must be equal on all ranks.
        variable_names: a name for each variable, which must be equal on all ranks, or none.

    Returns:
        A boolean scalar: whether any bit of this rank's values was different.

    Raises:
        TypeError: if `variables` is no list of variables.
        tf.errors.InvalidArgumentError: on every rank, if the ranks' variables differ in number,
            dtype or shape, or `root_rank` is not a rank.
    """
    _check_list("variables", variables)
    resources = handles(variables)
    return ops().adasum_broadcast_variables(
        resources,
        order(resources),
        root_rank=root_rank,
        names=variable_names,
        call_name=name or "",
    )


def allgather(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """The ranks' tensors in rank order along their first dimension, in which alone they may differ.

    Raises:
        ValueError: if `tensor` is a scalar.
        tf.errors.InvalidArgumentError: on every rank, if dtypes or other dimensions differ.
    """
    return ops().adasum_allgather(tf.convert_to_tensor(tensor), order(), call_name=name or "")


def barrier(name: str | None = None) -> None:
    """Returns when every rank has come; in a tf.function, what follows waits for that."""
    ops().adasum_barrier(order(), call_name=name or "")


def handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The resources behind `tf.Variable`s or `keras.Variable`s."""
    resources = []
    for variable in variables:
        own = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
        if not hasattr(own, "handle"):
            raise TypeError(f"expected a tf.Variable or a keras.Variable. Received: {variable!r}")
        resources.append(own.handle)
    return resources


def _check_list(name: str, given: Any) -> None:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"`{name}` must be a list or tuple. Received: {type(given).__name__}")
