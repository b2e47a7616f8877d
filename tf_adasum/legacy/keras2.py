"""Keras 2's optimizers (the package tf_keras, or tf.keras with TF_USE_LEGACY_KERAS=1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from tf_adasum import collectives, core, window
from tf_adasum.core import Average
from tf_adasum.legacy.wrapper import Wrapper

Optimizer = tf_keras.optimizers.Optimizer


@tf_keras.utils.register_keras_serializable(package="tf_adasum")
class AdasumOptimizer(Wrapper, Optimizer):
    """`tf_adasum.AdasumOptimizer` for a `tf_keras.optimizers.Optimizer`.

    With loss scaling inside (a `LossScaleOptimizer` is wrapped) a step whose gradient overflowed
    counts as one; with loss scaling outside it does not, as with Keras 3, and the other ranks wait.

    Example:

    ```python
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=16)
    model.compile(optimizer, "mse")
    model.fit(shard(dataset), callbacks=legacy.callbacks.standard())
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
        # Not the base class's constructor, which makes hyper-parameters of its own: those of the
        # wrapped optimizer are shown. These are what others look for.
        self.name = name or "AdasumOptimizer"
        self._variables = []
        self._mesh = None
        self._run_with_dtensor = False
        self._distribution_strategy = tf.distribute.get_strategy()
        self._wrap(inner_optimizer, window.Options(local_steps, **options))

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the variables of the window and of the wrapped optimizer."""
        self.inner_optimizer.build(var_list)
        self._open_window(
            var_list, lambda: self.inner_optimizer.variables, self.name, self._learning_rate
        )
        self._built = True

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, tf.Variable]], *args: Any, **kwargs: Any
    ) -> tf.Variable:
        """Takes a local step, and syncs after the last one of a window. Every rank calls it.

        Args:
            grads_and_vars: pairs; a gradient may be None.
            *args: the others of the wrapped optimizer's method.
            **kwargs: likewise.

        Returns:
            `iterations`.
        """
        window.check_strategy()
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
        if core.size() == 1:
            self.inner_optimizer.apply_gradients(pairs, *args, **kwargs)
        else:
            self._local_step(
                lambda: self.inner_optimizer.apply_gradients(pairs, *args, **kwargs),
                lambda: self.iterations.assign_add(1),
            )
        return self.iterations

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, tf.Variable]]:
        return self.inner_optimizer.compute_gradients(*args, **kwargs)

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return self._innermost.aggregate_gradients(grads_and_vars)

    def finalize_variable_values(self, var_list: Sequence[tf.Variable]) -> None:
        """Called by `fit` when it ends: syncs what is left of a window.

        With `use_ema` the weights then become the mean of the ranks' averages.
        """
        self.sync()
        self.inner_optimizer.finalize_variable_values(var_list)
        if self.inner_optimizer.use_ema and core.size() > 1:
            averages = collectives.grouped_allreduce(list(var_list), op=Average)
            for variable, average in zip(var_list, averages, strict=True):
                variable.assign(average)

    @property
    def variables(self) -> list[tf.Variable]:
        return type(self.inner_optimizer.variables)(
            [*self.window_variables, *self.inner_optimizer.variables]
        )

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets `variables`."""
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def get_weights(self) -> list[Any]:
        """The values of `variables`."""
        return [variable.numpy() for variable in self.variables]

    @property
    def iterations(self) -> tf.Variable:
        """The wrapped optimizer's: steps taken, not syncs."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        self.inner_optimizer.iterations = variable

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def _innermost(self) -> Optimizer:
        """The optimizer that updates the weights, below a LossScaleOptimizer."""
        return getattr(self.inner_optimizer, "inner_optimizer", self.inner_optimizer)

    @property
    def _learning_rate(self) -> Any:
        return self._innermost._learning_rate

    @_learning_rate.setter
    def _learning_rate(self, learning_rate: Any) -> None:
        self._innermost._learning_rate = learning_rate

    @property
    def _iterations(self) -> tf.Variable:
        return self.iterations

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # The class between keeps its first answer, which may be from before the first step.
        return tf.__internal__.tracking.AutoTrackable._trackable_children(self, save_type, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {
            "inner_optimizer": tf_keras.optimizers.serialize(self.inner_optimizer),
            "name": self.name,
            "is_legacy_optimizer": False,
            **self._options.config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AdasumOptimizer:
        config = {key: value for key, value in config.items() if key != "is_legacy_optimizer"}
        inner_optimizer = config.pop("inner_optimizer")
        if not isinstance(inner_optimizer, Optimizer):
            inner_optimizer = tf_keras.optimizers.deserialize(inner_optimizer, custom_objects)
        return cls(inner_optimizer, **config)
