"""Telling the user that ranks have died and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tf_adasum import core


class OnShrink(keras.callbacks.Callback):
    """Calls a function on every rank that goes on, after others have died.

    That is after the batch, epoch or evaluation in which it was noticed, so the function may look
    at the model and call collectives: `rank()` and `size()` are the new ones. To change what
    depends on the number of ranks, such as the learning rate, is its business.

    Args:
        on_shrink: called with a `tf_adasum.Shrinking` for each time that ranks were lost.

    Example:

    ```python
    def on_shrink(shrinking):
        print(f"lost {shrinking.lost}, {shrinking.new_size} ranks go on")

    model.fit(data, callbacks=[*callbacks.standard(), callbacks.OnShrink(on_shrink)])
    ```
    """

    # It does not look at what a batch has come to, so Keras need not wait for it.
    async_safe = True

    def __init__(self, on_shrink: Callable[[core.Shrinking], Any]):
        super().__init__()
        self.on_shrink = on_shrink
        self._told = len(core.shrinkings())

    def _tell(self) -> None:
        for shrinking in core.shrinkings()[self._told :]:
            self._told += 1
            self.on_shrink(shrinking)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._tell()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._tell()

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self._tell()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._tell()
