"""The learning rate of MLPerf v0.5's ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class WarmUpAndSteps(keras.optimizers.schedules.LearningRateSchedule):
    """Climbs linearly from 0 to `rate`, then falls to a tenth at each of some epochs.

    Args:
        rate: the highest learning rate.
        steps_per_epoch: of one rank; the schedule goes by its local steps.
        warmup_epochs: how many epochs it climbs; 0 for none.
        decay_epochs: where it falls, in ascending order.
    """

    def __init__(
        self,
        rate: float,
        steps_per_epoch: int,
        warmup_epochs: float = 5,
        decay_epochs: Sequence[float] = (30, 60, 80),
    ):
        self.rate = rate
        self.steps_per_epoch = steps_per_epoch
        self.warmup_epochs = warmup_epochs
        self.decay_epochs = tuple(decay_epochs)

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float32")
        rate = self.rate
        for epoch in self.decay_epochs:
            rate = keras.ops.where(step < int(epoch * self.steps_per_epoch), rate, rate / 10)
        warmup_steps = int(self.warmup_epochs * self.steps_per_epoch)
        if warmup_steps == 0:
            return rate
        return keras.ops.where(step < warmup_steps, self.rate * step / warmup_steps, rate)

    def get_config(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "steps_per_epoch": self.steps_per_epoch,
            "warmup_epochs": self.warmup_epochs,
            "decay_epochs": self.decay_epochs,
        }
