"""What the wrappers of optimizers that work on `tf.Variable`s have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_adasum import collectives, core, window
from tf_adasum.core import Op


class WindowState(tf.Module):
    """The variables of a window: a node of the wrapper's checkpoint."""

    def __init__(self, variables: Sequence[tf.Variable], name: str, options: window.Options):
        super().__init__()

        def new(value: tf.Tensor, own_name: str) -> tf.Variable:
            # Version 1's, so that it gets into the graph's collections if there is one.
            return tf.compat.v1.Variable(
                value, trainable=False, use_resource=True, name=f"{name}/{own_name}"
            )

        def zeros(shape: tf.TensorShape | tuple, dtype: tf.DType, own_name: str) -> tf.Variable:
            return new(tf.zeros(shape, dtype), own_name)

        self.started = zeros((), tf.int64, "started")
        self.local_step = zeros((), tf.int64, "local_step")
        self.syncs = zeros((), tf.int64, "syncs")
        self.skips = zeros((), tf.int64, "skips")
        self.orthogonality = zeros((len(variables),), tf.float32, "orthogonality")
        self.starts = [zeros(v.shape, dtype_of(v), f"start/{v.name[:-2]}") for v in variables]
        self.wire_scale, self.residuals = None, []
        if options.wire_dtype is not None:
            scale = tf.constant(window.first_wire_scale(options), tf.int64)
            self.wire_scale = new(scale, "wire_scale")
            if options.error_feedback:
                self.residuals = [
                    zeros(v.shape, dtype_of(v), f"residual/{v.name[:-2]}") for v in variables
                ]

    @property
    def all(self) -> list[tf.Variable]:
        counters = [self.started, self.local_step, self.syncs, self.skips]
        scale = [] if self.wire_scale is None else [self.wire_scale]
        return [*counters, self.orthogonality, *self.starts, *scale, *self.residuals]


class Wrapper:
    """Mixed into a subclass of the family's optimizer class; `inner_optimizer` takes the steps.

    The family's class calls `_wrap` in its constructor, `_open_window` before its first step and
    `_local_step` at each.
    """

    inner_optimizer: Any

    def _wrap(self, inner_optimizer: Any, options: window.Options) -> None:
        window.check_strategy()
        if _is_wrapped(inner_optimizer):
            raise ValueError(f"`optimizer` is wrapped already. Received: {inner_optimizer!r}")
        if options.partition_state:
            raise ValueError("`partition_state` needs an optimizer of Keras 3: AdasumOptimizer.")
        options.take_effect()
        self._options = options
        self._flight = window.new_flight()
        self._state: WindowState | None = None
        self._window: window.Window | None = None
        # From here on what the wrapper does not have itself is the wrapped optimizer's.
        self.inner_optimizer = inner_optimizer
        self._track_trackable(inner_optimizer, "inner_optimizer", overwrite=True)

    def _open_window(
        self,
        variables: Sequence[tf.Variable],
        inner_state: Callable[[], Sequence[tf.Variable]],
        name: str,
        not_averaged: tf.Variable | None = None,
    ) -> None:
        """Creates the state, if it is not there yet; the same whatever the number of ranks.

        Args:
            variables: all that are trained; integers, which have no gradient, are left out.
            inner_state: returns what the wrapped optimizer keeps.
            name: of the window.
            not_averaged: one of these that `average_inner_state` does not mean.
        """
        for variable in variables:
            if not hasattr(variable, "handle"):
                raise ValueError(
                    "tf_adasum needs resource variables: call "
                    "tf.compat.v1.enable_resource_variables() before the model is made, and after "
                    f"disable_v2_behavior() if that is called. Received: {variable!r}"
                )
        trained = [v for v in variables if dtype_of(v).is_floating or dtype_of(v).is_complex]
        if self._window is not None:
            known = {id(v.handle) for v in self._window.variables}
            unknown = [v.name for v in trained if id(v.handle) not in known]
            if unknown:
                raise ValueError(
                    "all variables of an optimizer have to be given at its first step; use one "
                    f"DistributedOptimizer for each set of them. Received later: {unknown}"
                )
            return
        window.check_variables(self._options, trained)
        with tf.init_scope():
            self._state = state = WindowState(trained, name, self._options)
            self._track_trackable(state, "window", overwrite=True)
            inner_variables = list(inner_state())
        averaged = inner_variables if self._options.average_inner_state else []
        self._window = window.Window(
            variables=trained,
            starts=list(state.starts),
            states=[v for v in averaged if v.dtype.is_floating and v is not not_averaged],
            inner_variables=inner_variables,
            started=state.started,
            local_step=state.local_step,
            syncs=state.syncs,
            skips=state.skips,
            orthogonality=state.orthogonality,
            wire_scale=state.wire_scale,
            residuals=state.residuals,
            options=self._options,
            flight=self._flight,
            name=f"{name}({type(self.inner_optimizer).__name__})",
        )

    def _local_step(
        self, take: Callable[[], Any], skip: Callable[[], Any] = window.nothing
    ) -> tf.Operation | None:
        """A step of the window; several ranks only.

        Args:
            take: takes a step of the wrapped optimizer.
            skip: counts one, where the gradient is not good.
        """

        def step() -> None:
            usable = self._window.begin_step()
            tf.cond(usable, _without_result(take), _without_result(skip))
            self._window.end_step(tf.ones((), tf.int64))

        return in_order(step)

    @property
    def window_variables(self) -> list[tf.Variable]:
        """The window's own variables; none before the first step."""
        return [] if self._state is None else self._state.all

    @property
    def local_steps(self) -> int:
        """Steps in a window."""
        return self._options.local_steps

    @property
    def op(self) -> Op:
        """How the ranks' deltas become one."""
        return self._options.op

    @property
    def local_step(self) -> tf.Variable:
        """Steps since the last sync."""
        return self._opened().local_step

    @property
    def syncs(self) -> tf.Variable:
        """Syncs done so far."""
        return self._opened().syncs

    @property
    def orthogonality(self) -> tf.Variable:
        """Of the last sync, one number a variable (the paper's section 3.6)."""
        return self._opened().orthogonality

    def _opened(self) -> WindowState:
        if self._state is None:
            raise ValueError("an optimizer has no variables before its first step")
        return self._state

    def sync(self) -> tf.Operation | None:
        """Brings all ranks to the same weights now, if any took a step since the last sync.

        As `AdasumOptimizer.sync`. In a graph with sessions it returns the op that does it, which
        is made after `minimize` or `apply_gradients`.
        """
        if not tf.executing_eagerly() and not tf.inside_function():
            self._opened()
            return in_order(self._window.flush) if core.size() > 1 else tf.no_op()
        if core.size() == 1:
            return None
        if self._window is not None:
            return in_order(self._window.flush)
        # Nothing to do, but a rank that disagrees about that gets to know.
        collectives.barrier(name="sync of an optimizer that has taken no step yet")
        return None

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped optimizer has: hyper-parameters, the methods of loss scaling."""
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("inner_optimizer")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if inner is not None and not own and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)


def dtype_of(variable: tf.Variable) -> tf.DType:
    """The dtype a variable is kept in, whatever mixed precision makes of it on reading."""
    return getattr(variable, "true_dtype", variable.dtype).base_dtype


def in_order(body: Callable[[], Any]) -> tf.Operation | None:
    """Runs what `body` does in the order in which it is written; returns its op in a graph.

    A graph of version 1 orders nothing by itself, nor does a branch of a tf.cond in it, but a
    tf.function in it does.
    """
    if tf.executing_eagerly():
        body()
        return None

    def function() -> tf.Tensor:
        body()
        return tf.zeros(())

    return tf.function(function, autograph=False)().op


def _without_result(body: Callable[[], Any]) -> Callable[[], None]:
    def branch() -> None:
        body()

    return branch


def _is_wrapped(optimizer: Any) -> bool:
    while optimizer is not None and not isinstance(optimizer, Wrapper):
        # Loss scaling of Keras keeps it under the first name, that of version 1 under the second.
        inner = getattr(optimizer, "inner_optimizer", None)
        optimizer = inner or getattr(optimizer, "_optimizer", None)
    return optimizer is not None
