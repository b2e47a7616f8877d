"""Equal weights on all ranks whenever they are looked at."""

from __future__ import annotations

from tf_adasum import core, optimizer
from tf_adasum.callbacks import output
from tf_adasum.callbacks.together import Together


class SyncBeforeCheckpoint(Together):
    """Syncs the weights before they are looked at, and starts a new window of local steps there.

    That is before validation, at the end of each epoch, and before `ModelCheckpoint` or
    `BackupAndRestore` with a `save_freq` in batches saves. It has to stand before those. Where
    ranks have different numbers of batches, such a save waits until each rank has come to its own,
    or to the end of its epoch. With `partition_state`, rank 0 has the whole state of the optimizer
    then.
    """

    # Unless told otherwise, Keras waits for every batch as soon as a callback wants its end. This
    # one does nothing there, except beside a callback that makes Keras wait anyway.
    async_safe = True

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if core.size() > 1 and any(output.saves_at(batch, each) for each in self.neighbours):
            self.come_together(passing=True)

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self.come_together()

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if adasum := optimizer.find(getattr(self.model, "optimizer", None)):
            adasum.forget_gathered_state()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.come_together()
        self._gather()

    def on_passing(self) -> None:
        self._gather()

    def _gather(self) -> None:
        adasum = optimizer.find(getattr(self.model, "optimizer", None))
        if adasum and any(output.saves_state(each) for each in self.neighbours):
            adasum.gather_state()
