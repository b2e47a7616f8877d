"""What has to happen around the optimizer's steps when several ranks train a Keras model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tf_adasum import collectives, core, optimizer
from tf_adasum.core import Average


def standard() -> list[keras.callbacks.Callback]:
    """The callbacks that most users want, in the order in which they have to stand.

    Put them before your own in `fit(callbacks=[*standard(), ...])`, so that those see averaged
    metrics and equal weights. Every rank passes the same ones.
    """
    return [
        BroadcastState(),
        SyncBeforeCheckpoint(),
        SyncBatchNorm(),
        MetricAverage(),
        RankZeroOutput(),
    ]


class BroadcastState(keras.callbacks.Callback):
    """Gives every rank root_rank's weights and optimizer state before the first gradient.

    A model that is built by its first batch has no weights yet at that point: AdasumOptimizer then
    makes them equal at its first step.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        if core.size() == 1 or not self.model.built:
            return
        variables = [*self.model.variables]
        if self.model.optimizer is not None and self.model.optimizer.built:
            variables += self.model.optimizer.variables
        # A compiled model lists its optimizer's variables too.
        unique = list({id(variable): variable for variable in variables}.values())
        collectives.broadcast_variables(unique, self.root_rank, name="state")


class SyncBeforeCheckpoint(keras.callbacks.Callback):
    """Syncs the weights before they are looked at: before validation and at the end of epochs."""

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._sync()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._sync()

    def _sync(self) -> None:
        if adasum := optimizer.find(self.model.optimizer):
            adasum.sync()


class SyncBatchNorm(keras.callbacks.Callback):
    """Averages the moving statistics of batch normalization over the ranks before they are used.

    That is every floating-point variable of the model that is not trained: before validation, at
    the end of each epoch and of training.
    """

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._average()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._average()

    def _average(self) -> None:
        statistics = [
            variable
            for variable in self.model.non_trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        if core.size() == 1 or not statistics:
            return
        averages = collectives.grouped_allreduce(
            [variable.value for variable in statistics], op=Average, name="moving statistics"
        )
        for variable, average in zip(statistics, averages, strict=True):
            variable.assign(average)


class MetricAverage(keras.callbacks.Callback):
    """Averages the metrics over the ranks before the callbacks that come later read them.

    So what is decided by a metric, such as early stopping, is decided alike on all ranks.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._average(logs)

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self._average(logs)

    @staticmethod
    def _average(logs: dict[str, Any] | None) -> None:
        if not logs or core.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        # The names are compared over the ranks, so that no two different metrics are averaged.
        averages = core.allreduce(values, op=Average, name="metrics " + ", ".join(names))
        logs.update(zip(names, averages.tolist(), strict=True))


class RankZeroOutput(keras.callbacks.Callback):
    """Lets only rank 0 show Keras's progress bar."""

    def set_params(self, params: dict[str, Any]) -> None:
        # Keras hands the same dictionary to all callbacks in turn, to its progress bar last.
        if core.rank() != 0:
            params["verbose"] = 0
        super().set_params(params)
