"""A Keras optimizer that makes another one data-parallel (the paper's sections 4.1, 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adasum import collectives, core
from tf_adasum.core import Adasum, Average, Op


@keras.saving.register_keras_serializable(package="tf_adasum")
class AdasumOptimizer(keras.optimizers.Optimizer):
    """Makes training with a Keras optimizer data-parallel over all MPI ranks.

    Every rank takes `local_steps` steps of the wrapped optimizer on its own data. Then the change
    of the weights since the last sync, the delta, is combined over all ranks, variable by
    variable, and every rank goes on from the start of the window plus the combined delta (the
    paper's Figure 3). The effective batch is ranks x batch x local_steps. What the wrapped
    optimizer keeps (momentum, ...) stays each rank's own. On one rank it is the wrapped optimizer,
    bit for bit.

    The weights are made equal to rank 0's at the first step; a rank whose weights were others
    drops the gradient that it computed at them, though the step counts. When `fit` ends, all ranks
    hold the same weights. Each rank has to be given its own data, see `shard`.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or what `keras.optimizers.get` takes.
        local_steps: positive int, steps of the wrapped optimizer between two syncs.
        op: `Adasum`; `Average`, which is local SGD; or `Sum`.
        name: the optimizer's name.

    Example:

    ```python
    optimizer = AdasumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), local_steps=16)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(shard(dataset), callbacks=callbacks.standard())
    ```

    Raises:
        ValueError: if `local_steps` or `op` is something else, or the optimizer is wrapped already.
        RuntimeError: if Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        local_steps: int = 1,
        *,
        op: Op | str = Adasum,
        name: str | None = None,
    ):
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "AdasumOptimizer needs Keras on TensorFlow. "
                f"Received: KERAS_BACKEND={keras.backend.backend()}"
            )
        if not isinstance(local_steps, int) or isinstance(local_steps, bool) or local_steps < 1:
            raise ValueError(
                f"`local_steps` must be a positive integer. Received: local_steps={local_steps!r}"
            )
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        if find(inner_optimizer) is not None:
            raise ValueError(f"`inner_optimizer` is wrapped already. Received: {inner_optimizer!r}")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.local_steps = local_steps
        self.op = Op(op)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: counters, and one `start` variable for each trainable variable.

        It is the same whatever the number of ranks, so a checkpoint fits any.
        """
        if self.built:
            return
        self.local_step = self.add_variable((), dtype="int", name="local_step")
        self.syncs = self.add_variable((), dtype="int", name="syncs")
        self._starts = [self.add_variable_from_reference(v, name="start") for v in variables]
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Takes a local step, and syncs after the last one of a window. Every rank calls it.

        Args:
            grads: one gradient, or None, for each trainable variable.
            trainable_variables: the variables; by default those given to `build`.
        """
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        if core.size() == 1:
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        first = tf.logical_and(tf.equal(self.syncs, 0), tf.equal(self.local_step, 0))
        usable = tf.cond(first, self._start_from_root, lambda: tf.constant(True))
        tf.cond(tf.equal(self.local_step, 0), self._keep_start, _nothing)
        tf.cond(
            usable,
            lambda: self.inner_optimizer.apply(grads, trainable_variables),
            self._skip_step,
        )
        self.local_step.assign_add(1)
        tf.cond(self.local_step >= self.local_steps, self._sync, _nothing)

    def apply_gradients(self, grads_and_vars: Any) -> tf.Variable:
        """`apply` for an iterable of (gradient, variable) pairs; returns `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def sync(self) -> None:
        """Brings all ranks to the same weights now, if any took a local step since the last sync.

        Every rank calls it. A second call in a row changes nothing. Works eagerly and in a
        tf.function.
        """
        if core.size() == 1 or not self.built:
            return
        local_steps = collectives.allgather(tf.reshape(self.local_step, [1]), name="local steps")

        def sync() -> None:
            # A rank that took no local step in this window comes with a delta of zero.
            tf.cond(tf.equal(self.local_step, 0), self._keep_start, _nothing)
            self._sync()

        tf.cond(tf.reduce_max(local_steps) > 0, sync, _nothing)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Called by `fit` when it ends: syncs what is left of a window.

        With `use_ema` the wrapped optimizer then puts its averages into the weights. Each rank has
        averaged its own path, so the weights become the mean of the ranks' averages.
        """
        self.sync()
        self.inner_optimizer.finalize_variable_values(var_list)
        if self.inner_optimizer.use_ema and core.size() > 1:
            averages = collectives.grouped_allreduce([v.value for v in var_list], op=Average)
            for variable, average in zip(var_list, averages, strict=True):
                variable.assign(average)

    def _start_from_root(self) -> tf.Tensor:
        """Whether this rank's gradient is good, that is, whether its weights were rank 0's."""
        changed = collectives.broadcast_variables(self._trainable_variables, name="first weights")
        return tf.logical_not(changed)

    def _keep_start(self) -> None:
        # At the start of every window, not at the end of the last one: the user may have loaded
        # other weights.
        for start, variable in zip(self._starts, self._trainable_variables, strict=True):
            start.assign(variable)

    def _skip_step(self) -> None:
        self.inner_optimizer._iterations.assign_add(1)

    def _sync(self) -> None:
        collectives.ops().adasum_sync(
            collectives.handles(self._trainable_variables),
            collectives.handles(self._starts),
            op=self.op.value,
            call_name=self.name,
        )
        # A sum of changes can leave what the wrapped optimizer's own projection had ensured.
        for variable in self._trainable_variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.local_step.assign(0)
        self.syncs.assign_add(1)

    @property
    def variables(self) -> list[keras.Variable]:
        return self._variables + self.inner_optimizer.variables

    @property
    def iterations(self) -> keras.Variable:
        """The wrapped optimizer's: steps taken, not syncs."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "local_steps": self.local_steps,
            "op": self.op.value,
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AdasumOptimizer:
        inner_optimizer = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner_optimizer": inner_optimizer})


def find(optimizer: Any) -> AdasumOptimizer | None:
    """The AdasumOptimizer in a chain of wrapping optimizers, such as a LossScaleOptimizer's."""
    while optimizer is not None and not isinstance(optimizer, AdasumOptimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def _nothing() -> None:
    """The branch of a tf.cond that has nothing to do."""
