"""What has to happen around the optimizer's steps in `fit` of tf_keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tf_adasum import collectives, core
from tf_adasum.core import Average
from tf_adasum.legacy.wrapper import Wrapper


def standard() -> list[tf_keras.callbacks.Callback]:
    """`tf_adasum.callbacks.standard()` for tf_keras, whose `fit` takes none but its own callbacks.

    Put it before your own in `fit(callbacks=[*standard(), ...])`, so that those see averaged
    metrics and equal weights. Every rank passes the same ones.
    """
    return [StandardCallback()]


class StandardCallback(tf_keras.callbacks.Callback):
    """All of it at once.

    Every rank gets rank 0's weights and optimizer state before the first gradient. Before
    validation, after each epoch and at the end the weights are synced, and what the model keeps
    without training it (moving statistics) is averaged. So are the metrics of an epoch, and only
    rank 0 shows progress.
    """

    def set_params(self, params: dict[str, Any]) -> None:
        # Keras hands the same dictionary to all callbacks in turn, to its progress bar last.
        if core.rank() != 0:
            params["verbose"] = 0
        super().set_params(params)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        if core.size() == 1 or not self.model.built:
            return
        state = self.model.optimizer.variables
        variables = [*self.model.variables, *(state() if callable(state) else state)]
        unique = list({id(variable.handle): variable for variable in variables}.values())
        collectives.broadcast_variables(unique, name="state")

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._bring_together()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._bring_together()
        if not logs or core.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        # The names are compared over the ranks, so that no two different metrics are averaged.
        averages = core.allreduce(values, op=Average, name="metrics " + ", ".join(names))
        logs.update(zip(names, averages.tolist(), strict=True))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._bring_together()

    def _bring_together(self) -> None:
        optimizer = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, Wrapper):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None or core.size() == 1:
            return
        optimizer.sync()
        statistics = [v for v in self.model.non_trainable_variables if v.dtype.is_floating]
        tensors = [tf.convert_to_tensor(v) for v in statistics]
        averages = collectives.grouped_allreduce(tensors, op=Average, name="moving statistics")
        for variable, average in zip(statistics, averages, strict=True):
            variable.assign(average)
