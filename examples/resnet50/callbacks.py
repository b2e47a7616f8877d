"""Stopping at an accuracy, and checkpoints that a killed training goes on from."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

import tf_adasum as adasum


class StopAt(keras.callbacks.Callback):
    """Stops training after the first evaluation whose accuracy is at least the target.

    It has to come after `adasum.callbacks.standard()`: the accuracy is that of all ranks then, so
    all of them stop.
    """

    def __init__(self, accuracy: float):
        super().__init__()
        self.accuracy = accuracy

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        # The logs have it only if there was an evaluation.
        if logs.get("val_accuracy", 0.0) >= self.accuracy:
            self.model.stop_training = True


class Checkpoints(keras.callbacks.Callback):
    """Keeps the last two epochs' states: weights, optimizer, number of epochs.

    Rank 0 writes them, after `adasum.callbacks.standard()` has brought the ranks together. They are
    TensorFlow's checkpoints, which are complete or not there, whenever a process is killed.

    Args:
        folder: of rank 0; the other ranks need not see it.
        model: a compiled model.
    """

    def __init__(self, folder: Path, model: keras.Model):
        super().__init__()
        model.optimizer.build(model.trainable_variables)
        self._epochs = tf.Variable(0, dtype=tf.int64)
        self._manager = tf.train.CheckpointManager(
            # A compiled model has its optimizer's state with it.
            tf.train.Checkpoint(model=model, epochs=self._epochs),
            str(folder),
            max_to_keep=2,
        )

    def restore(self) -> int:
        """Reads the last one on rank 0, whence `BroadcastState` brings it to all.

        Returns:
            How many epochs it has behind it, on all ranks; 0 if there is none.
        """
        if adasum.rank() == 0:
            self._manager.restore_or_initialize()
        return int(adasum.broadcast(self._epochs, root_rank=0))

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epochs.assign(epoch + 1)
        if adasum.rank() == 0:
            self._manager.save(checkpoint_number=epoch + 1)
