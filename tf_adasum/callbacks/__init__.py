"""What has to happen around the optimizer's steps when several ranks train a Keras model.

Every rank passes the same list to `fit`, with `standard()` in front of the user's own:

    model.fit(data, callbacks=[*standard(), ModelCheckpoint(...), EarlyStopping(...)])
"""

from __future__ import annotations

import keras

from tf_adasum.callbacks.checkpoint import SyncBeforeCheckpoint
from tf_adasum.callbacks.metrics import MetricAverage
from tf_adasum.callbacks.orthogonality import Orthogonality
from tf_adasum.callbacks.output import RankZeroOutput
from tf_adasum.callbacks.shrink import OnShrink
from tf_adasum.callbacks.state import BroadcastState
from tf_adasum.callbacks.statistics import SyncBatchNorm

__all__ = [
    "BroadcastState",
    "MetricAverage",
    "OnShrink",
    "Orthogonality",
    "RankZeroOutput",
    "SyncBatchNorm",
    "SyncBeforeCheckpoint",
    "standard",
]


def standard() -> list[keras.callbacks.Callback]:
    """The callbacks that most users want, in the order in which they have to stand.

    Put them before your own, so that those see averaged metrics and equal weights, and those that
    write files do so on rank 0 only. Every rank passes the same list.
    """
    return [
        BroadcastState(),
        SyncBeforeCheckpoint(),
        SyncBatchNorm(),
        MetricAverage(),
        RankZeroOutput(),
    ]
