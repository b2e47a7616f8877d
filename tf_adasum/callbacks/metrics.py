"""Metrics are those of all ranks' data, and what is decided by them is decided alike."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tf_adasum import core
from tf_adasum.callbacks.together import Together, append_once
from tf_adasum.core import Average, Sum

Logs = dict[str, Any]


class MetricAverage(Together):
    """Makes the metrics those of all ranks before the callbacks that come later read them.

    A metric that is a weighted mean, such as the loss and accuracies, is averaged with the ranks'
    weights, which are numbers of examples unless there are sample weights: it becomes what one
    process would have computed from all of the data. Other metrics, and other values in the logs,
    become the plain mean over the ranks. Likewise the result of an `evaluate` that this callback
    is passed to. What callbacks see at the end of a batch stays each rank's own.

    So early stopping and the like decide alike on all ranks. Where a single rank sets
    `model.stop_training`, it leaves the epoch, and at the epoch's end all ranks stop.

    Raises:
        DisagreementError: on all ranks, if the ranks' logs have different names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._training: _Results | None = None
        self._validation: Logs = {}
        self._averaged: Logs = {}

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        append_once(self.neighbours, _SameDecisions())

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._in_epoch, self._training, self._validation = True, None, {}

    def on_test_begin(self, logs: Logs | None = None) -> None:
        # Validation is about to reset the metrics.
        if core.size() > 1 and self._in_epoch and self._training is None:
            self.come_together()
            self._training = _Results(self.model)

    def on_test_end(self, logs: Logs | None = None) -> None:
        if core.size() == 1 or not logs:
            return
        self.come_together()
        averaged = _average(logs, _Results(self.model))
        self._validation = {f"val_{name}": value for name, value in averaged.items()}
        logs.update(averaged)
        if (returned := _logs_of_evaluate(self.model)) is not None:
            returned.update(averaged)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._in_epoch = False
        if core.size() == 1 or not logs:
            return
        self.come_together()
        results = self._training or _Results(self.model)
        logs.update({name: v for name, v in self._validation.items() if name in logs})
        logs.update(_average(logs, results))
        self._averaged = dict(logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if logs:
            logs.update({name: v for name, v in self._averaged.items() if name in logs})


class _SameDecisions(keras.callbacks.Callback):
    """Behind all others: what one rank has decided at the end of an epoch, all have."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if core.size() == 1:
            return
        own = np.array([float(bool(self.model.stop_training))])
        (stopping,) = core.allreduce(own, op=Sum, name="callbacks: ranks that stop training")
        self.model.stop_training = stopping > 0


class _Results:
    """The results of a model's metrics: this rank's, and of all ranks for weighted means.

    All ranks make one together.
    """

    def __init__(self, model: keras.Model):
        self.own = _scalars(model.get_metrics_result())
        # A mean's total and count add up over the ranks; the metric itself knows what follows.
        means = [
            metric
            for metric in _flatten(model.metrics)
            if isinstance(metric, keras.metrics.Mean) and len(metric.variables) == 2
        ]
        states = [variable for metric in means for variable in metric.variables]
        own = [keras.ops.convert_to_numpy(state) for state in states]
        names = "metrics " + ", ".join(metric.name for metric in means)
        sums = core.grouped_allreduce([v.astype(float) for v in own], op=Sum, name=names)
        _assign(states, sums)
        self.of_all = _scalars(model.get_metrics_result())
        _assign(states, own)


def _average(logs: Logs, results: _Results) -> Logs:
    """The means over the ranks of the scalars in the logs; where all ranks' logs are the results of
    their metrics, those of the results of all.
    """
    own = _scalars(logs)
    names = sorted(own)
    candidates = {**own, **results.of_all}
    # A train_step of the user's may log other values under the names of metrics.
    are_results = all(
        name in own and np.array_equal(value, own[name], equal_nan=True)
        for name, value in results.own.items()
    )
    values = [[part.get(name, 0.0) for name in names] for part in (own, candidates)]
    # The names are compared over the ranks, so that no two different metrics are averaged. The mean
    # of equal float32 numbers is that number, since it is computed in float64.
    agreement, means = core.grouped_allreduce(
        [np.array(float(are_results)), np.array(values)],
        op=Average,
        name="metrics " + ", ".join(names),
    )
    return dict(zip(names, means[int(agreement == 1)].tolist(), strict=True))


def _scalars(logs: Logs) -> Logs:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _flatten(metrics: Iterable[Any]) -> list[keras.metrics.Metric]:
    """The metrics, with what `compile` has put together taken apart."""
    return [m for metric in metrics for m in getattr(metric, "metrics", [metric])]


def _assign(variables: list[keras.Variable], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _logs_of_evaluate(model: keras.Model) -> Logs | None:
    """What the `evaluate` that is calling just now will return.

    Keras gives callbacks a copy of it, with which they can change the result for each other but not
    for the caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "evaluate" and frame.f_locals.get("self") is model:
            logs = frame.f_locals.get("logs")
            return logs if isinstance(logs, dict) else None
        frame = frame.f_back
    return None
