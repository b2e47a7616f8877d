"""TensorFlow 1's optimizers, `tf.compat.v1.train`, mainly in graphs with sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_adasum import collectives, core, window
from tf_adasum.legacy.wrapper import Wrapper

Optimizer = tf.compat.v1.train.Optimizer

_SYNC_OPS = "tf_adasum/sync_ops"
"""The collection of a graph that holds, by optimizer, the op that brings the ranks together."""


class AdasumOptimizer(Wrapper, Optimizer):
    """`tf_adasum.AdasumOptimizer` for a `tf.compat.v1.train.Optimizer`.

    The op that `minimize` and `apply_gradients` return is the whole step, its sync included. It
    works in one graph (or eagerly, or in a tf.function), for resource variables only.

    Example:

    ```python
    optimizer = DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))
    train = optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
    with tf.compat.v1.train.MonitoredTrainingSession(chief_only_hooks=[SyncHook()]) as session:
        while not session.should_stop():
            session.run(train)
    ```
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        local_steps: int = 1,
        *,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(use_locking=False, name=name or f"Adasum{inner_optimizer.get_name()}")
        self._wrap(inner_optimizer, window.Options(local_steps, **options))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, tf.Variable]]:
        return self.inner_optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> tf.Operation | None:
        """Takes a local step, and syncs after the last one of a window. Every rank runs it.

        Args:
            grads_and_vars: pairs; a gradient may be None.
            global_step: incremented by one when all else is done.
            name: of the op.
            **kwargs: the others of the wrapped optimizer's method.

        Returns:
            The op that does all this; None where it is done already.
        """
        window.check_strategy()
        pairs = list(grads_and_vars)
        is_first = self._window is None
        with tf.init_scope():
            self.inner_optimizer._create_slots([v for g, v in pairs if g is not None])
        self._open_window([v for _, v in pairs], self.inner_optimizer.variables, self._name)
        in_sessions = not tf.executing_eagerly() and not tf.inside_function()
        if is_first and in_sessions:
            tf.compat.v1.add_to_collection(_SYNC_OPS, self.sync())
        if core.size() == 1:
            return self.inner_optimizer.apply_gradients(pairs, global_step, name, **kwargs)
        stepped = self._local_step(lambda: self.inner_optimizer.apply_gradients(pairs, **kwargs))
        if stepped is None:
            if global_step is not None:
                global_step.assign_add(tf.ones((), global_step.dtype))
            return None
        with tf.control_dependencies([stepped]):
            last = stepped
            if global_step is not None:
                last = global_step.assign_add(tf.ones((), global_step.dtype.base_dtype))
            done = tf.group(last, name=name or self._name)
        if in_sessions:
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TRAIN_OP, done)
        return done

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        # Not `get_slot_names`, by which a checkpoint would save the slots twice.
        return self.inner_optimizer.get_slot(var, name)

    def variables(self) -> list[tf.Variable]:
        return [*self.window_variables, *self.inner_optimizer.variables()]


class SyncHook(tf.compat.v1.train.SessionRunHook):
    """Makes all variables equal when a session starts, and brings the ranks together at its end.

    With `MonitoredTrainingSession` give it to every rank as `chief_only_hooks=[SyncHook()]`: those
    come before the one that saves a last checkpoint, which then holds what all ranks have. As one
    of `hooks` it comes after that one, and the last checkpoint holds the rank's own last steps.

    Args:
        root_rank: whose variables all ranks get, the wrapped optimizer's state included; after it
            restored a checkpoint, those.

    Raises:
        ValueError: if the graph has no optimizer of DistributedOptimizer.
    """

    def __init__(self, root_rank: int = 0):
        self._root_rank = root_rank

    def begin(self) -> None:
        self._sync_ops = tf.compat.v1.get_collection(_SYNC_OPS)
        if not self._sync_ops:
            raise ValueError(
                "SyncHook found no optimizer to sync: wrap it in DistributedOptimizer, and call "
                "minimize or apply_gradients before the session is made"
            )
        if core.size() > 1:
            # Whatever is not a number has no memory that could be sent.
            variables = [v for v in tf.compat.v1.global_variables() if v.dtype != tf.string]
            self._broadcast = collectives.broadcast_variables(
                variables, self._root_rank, name="all variables"
            )

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        if core.size() > 1:
            session.run(self._broadcast)

    def end(self, session: tf.compat.v1.Session) -> None:
        # One by one: the ranks have to make the same calls in the same order.
        for sync_op in self._sync_ops:
            session.run(sync_op)
