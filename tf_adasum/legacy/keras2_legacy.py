"""Keras 2's first generation of optimizers, `tf_keras.optimizers.legacy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from tf_adasum import core, window
from tf_adasum.legacy.wrapper import Wrapper

Optimizer = tf_keras.optimizers.legacy.Optimizer


def _of_inner(name: str) -> property:
    """A property that is the wrapped optimizer's."""
    return property(
        lambda self: getattr(self.inner_optimizer, name),
        lambda self, value: setattr(self.inner_optimizer, name, value),
    )


@tf_keras.utils.register_keras_serializable(package="tf_adasum", name="LegacyAdasumOptimizer")
class AdasumOptimizer(Wrapper, Optimizer):
    """`tf_adasum.AdasumOptimizer` for a `tf_keras.optimizers.legacy.Optimizer`.

    `fit` does not tell these optimizers when it ends: use `legacy.callbacks.standard()`, which
    does, or call `sync()`. Loss scaling as for `keras2.AdasumOptimizer`.
    """

    _HAS_AGGREGATE_GRAD = True

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
        self._hyper = {}
        self._name = name or "AdasumOptimizer"
        self._slots, self._slot_names, self._deferred_slot_restorations = {}, [], {}
        self._weights = []
        self._distribution_strategy = None
        self._wrap(inner_optimizer, window.Options(local_steps, **options))

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        self.inner_optimizer._create_all_weights(var_list)
        self._open_window(var_list, lambda: self.inner_optimizer.weights, self._name)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, tf.Variable]], *args: Any, **kwargs: Any
    ) -> Any:
        """Takes a local step, and syncs after the last one of a window. Every rank calls it.

        Args:
            grads_and_vars: pairs; a gradient may be None.
            *args: the others of the wrapped optimizer's method.
            **kwargs: likewise.

        Returns:
            What the wrapped optimizer returns: in a graph, an op to run.
        """
        window.check_strategy()
        pairs = list(grads_and_vars)
        with tf.init_scope():
            self.inner_optimizer._create_all_weights([v for g, v in pairs if g is not None])
            self._open_window(
                [v for _, v in pairs], lambda: self.inner_optimizer.weights, self._name
            )
        if core.size() == 1:
            return self.inner_optimizer.apply_gradients(pairs, *args, **kwargs)
        done = self._local_step(
            lambda: self.inner_optimizer.apply_gradients(pairs, *args, **kwargs),
            lambda: self.iterations.assign_add(1),
        )
        return self.iterations if done is None else done

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, tf.Variable]]:
        return self.inner_optimizer._compute_gradients(*args, **kwargs)

    def get_gradients(self, loss: tf.Tensor, params: Sequence[tf.Variable]) -> list[Any]:
        return self.inner_optimizer.get_gradients(loss, params)

    def _transform_unaggregated_gradients(self, grads_and_vars: Any) -> Any:
        return self.inner_optimizer._transform_unaggregated_gradients(grads_and_vars)

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        return self.inner_optimizer._aggregate_gradients(grads_and_vars)

    def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable:
        # Not `get_slot_names`, by which a checkpoint would save the slots twice.
        return self.inner_optimizer.get_slot(var, slot_name)

    @property
    def weights(self) -> list[tf.Variable]:
        return [*self.window_variables, *self.inner_optimizer.weights]

    def variables(self) -> list[tf.Variable]:
        return self.weights

    iterations = _of_inner("iterations")
    learning_rate = _of_inner("learning_rate")
    lr = _of_inner("learning_rate")
    clipnorm = _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")

    def get_config(self) -> dict[str, Any]:
        return {
            "inner_optimizer": tf_keras.optimizers.serialize(self.inner_optimizer),
            "name": self._name,
            **self._options.config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AdasumOptimizer:
        config = dict(config)
        inner_optimizer = config.pop("inner_optimizer")
        if not isinstance(inner_optimizer, Optimizer):
            inner_optimizer = tf_keras.optimizers.deserialize(
                inner_optimizer, custom_objects, use_legacy_optimizer=True
            )
        return cls(inner_optimizer, **config)
