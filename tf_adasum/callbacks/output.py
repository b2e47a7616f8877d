"""Files and progress bars are written by rank 0 alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras

from tf_adasum import core
from tf_adasum.callbacks.together import list_around

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)


class RankZeroOutput(keras.callbacks.Callback):
    """Lets only rank 0 write what callbacks write: files, TensorBoard logs, the progress bar.

    On other ranks the callbacks below that come later in the list of `fit` or `evaluate` are
    replaced by ones that do nothing, so their own attributes, such as `best`, are rank 0's only:
    `ModelCheckpoint`, `BackupAndRestore`, `CSVLogger`, `TensorBoard`, `RemoteMonitor`,
    `OrbaxCheckpoint`, `ProgbarLogger`, and classes derived from them. What `BackupAndRestore`
    restores on rank 0, `BroadcastState` brings to all. Since that is rank 0's state, the others go
    on with its momentum: only where ranks keep nothing of their own, or with `average_inner_state`,
    is the result that of a run without interruption. Where rank 0 dies and the others go on
    (`elastic=True`), what it had to write the new rank 0 writes, but for the progress bar.

    Args:
        writers: other classes of callbacks that have to be silent on all ranks but 0.

    Raises:
        ValueError: at the start of `fit`, on all of several ranks, if such a callback stands before
            this one.
    """

    def __init__(self, writers: Sequence[type[keras.callbacks.Callback]] = ()):
        super().__init__()
        self.writers = (*_WRITERS, *writers)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if core.size() == 1:
            return
        callbacks = list_around(self)
        before = True
        for i, callback in enumerate(callbacks):
            before = before and callback is not self
            if not isinstance(callback, self.writers):
                continue
            if before:
                raise ValueError(
                    "RankZeroOutput, and so callbacks.standard(), must stand before all callbacks "
                    "that write: callbacks=[*standard(), ModelCheckpoint(...), ...]. Received: "
                    f"{type(callback).__name__} before it"
                )
            if core.rank() != 0:
                callbacks[i] = Silent(callback)

    def set_params(self, params: dict[str, Any]) -> None:
        # Keras hands the same dictionary to all callbacks in turn.
        if core.rank() != 0:
            params["verbose"] = 0
        super().set_params(params)


class Silent(keras.callbacks.Callback):
    """Stands in a list for a callback that must not write on this rank.

    It counts batches as that one would, so that all ranks know when rank 0 saves. If this rank
    becomes rank 0, because those before it have died, the writer gets to work.
    """

    def __init__(self, writer: keras.callbacks.Callback):
        super().__init__()
        self.writer = writer
        self.async_safe = getattr(writer, "async_safe", False)
        self._writes = False

    def _hand_on(self, hook: str, *arguments: Any) -> bool:
        """Whether the writer does it itself."""
        # The progress bar is silent to the end: its line was another rank's.
        may_write = not isinstance(self.writer, keras.callbacks.ProgbarLogger)
        if may_write and not self._writes and core.rank() == 0:
            self._writes = True
            self._begin()
        if self._writes:
            getattr(self.writer, hook)(*arguments)
        return self._writes

    def _begin(self) -> None:
        self.writer.set_params(self.params)
        self.writer.set_model(self.model)
        if isinstance(self.writer, keras.callbacks.CSVLogger):
            self.writer.append = True  # to what the former rank 0 has written
        if not isinstance(self.writer, keras.callbacks.BackupAndRestore):
            self.writer.on_train_begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        # What savers know of where the training is, whether or not they write.
        self.writer._current_epoch = epoch
        self._hand_on("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if not self._hand_on("on_train_batch_end", batch, logs) and _counts_batches(self.writer):
            self.writer._should_save_on_batch(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if isinstance(self.writer, keras.callbacks.BackupAndRestore):
            self.writer._last_batch_seen = 0
        self._hand_on("on_epoch_end", epoch, logs)

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_test_begin", logs)

    def on_test_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_test_batch_end", batch, logs)

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_test_end", logs)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self._hand_on("on_train_end", logs)


def saves_state(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback, or the one a `Silent` stands for, may save the optimizer's state."""
    writer = callback.writer if isinstance(callback, Silent) else callback
    if isinstance(writer, keras.callbacks.ModelCheckpoint):
        return not writer.save_weights_only
    return isinstance(writer, keras.callbacks.BackupAndRestore)


def saves_at(batch: int, callback: keras.callbacks.Callback) -> bool:
    """Whether a callback, or the one a `Silent` stands for, is about to save in mid-epoch."""
    writer = callback.writer if isinstance(callback, Silent) else callback
    # Asking moves the counters on, so a copy is asked.
    return _counts_batches(writer) and copy.copy(writer)._should_save_on_batch(batch)


def _counts_batches(writer: keras.callbacks.Callback) -> bool:
    return hasattr(writer, "_should_save_on_batch") and writer.save_freq != "epoch"
