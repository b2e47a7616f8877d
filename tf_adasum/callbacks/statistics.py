"""Batch normalization: each rank gathers statistics of its own data, and all use the same."""

from __future__ import annotations

import keras
import numpy as np

from tf_adasum import collectives, core
from tf_adasum.callbacks.state import digest
from tf_adasum.callbacks.together import Together
from tf_adasum.core import Average


class SyncBatchNorm(Together):
    """Averages the moving statistics of batch normalization over the ranks before they are used.

    That is every floating-point variable of the model that is not trained and that differs between
    ranks: before validation, before a checkpoint (see `SyncBeforeCheckpoint`), at the end of each
    epoch and of training. Frozen weights are equal on all ranks and stay as they are, to the bit.

    In between, also where the weights are synced, each rank's statistics are its own, and each
    batch is normalized by itself, not together with the other ranks' batches. The moving variance
    becomes the mean of the ranks' variances, which leaves out how far the ranks' means lie apart:
    that is small if each rank's data is drawn from all of the data.
    """

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self.come_together()
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.come_together()
        self._average()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.come_together()
        self._average()

    def on_passing(self) -> None:
        self._average()

    def _average(self) -> None:
        variables = [
            variable
            for variable in self.model.non_trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        if core.size() == 1 or not variables:
            return
        digests = np.stack([digest([variable]) for variable in variables])
        of_ranks = core.allgather(digests[np.newaxis], name="moving statistics: digests")
        differs = (of_ranks != of_ranks[0]).any(axis=(0, 2))
        statistics = [v for v, differ in zip(variables, differs, strict=True) if differ]
        averages = collectives.grouped_allreduce(
            [variable.value for variable in statistics], op=Average, name="moving statistics"
        )
        for variable, average in zip(statistics, averages, strict=True):
            variable.assign(average)
