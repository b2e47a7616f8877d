"""A training that is killed, and started again, ends as one that never stopped, bit for bit.

    mpirun -np 4 python examples/resume.py --backup backup --kill-in-epoch 4
    mpirun -np 4 python examples/resume.py --backup backup
    mpirun -np 4 python examples/resume.py

In the first run a rank is killed in the fourth epoch, which ends the job. The second one goes on
from the third epoch's backup and prints what the third one, without an interruption, prints: a hash
of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence

import keras
import numpy as np
from sklearn.datasets import load_digits

import tf_adasum as adasum


class Kill(keras.callbacks.Callback):
    """What else a power failure or a batch system would do, to the last rank."""

    def __init__(self, epoch: int | None):
        super().__init__()
        self.epoch = epoch
        self.now = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.now = epoch + 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # In the middle of the epoch, between two syncs.
        if self.now == self.epoch and batch == 10 and adasum.rank() == adasum.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> tuple[str, list[int]]:
    """Returns the hash and the epochs that this run trained, the first being 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--backup", help="folder for rank 0's backups, deleted after success")
    parser.add_argument("--kill-in-epoch", type=int, help="counted from 1")
    options = parser.parse_args(arguments)

    keras.utils.set_random_seed(1)
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    x, y = adasum.shard((digits.data[order] / 16, digits.target[order]))
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
    )
    # A backup holds the state of rank 0, so what each rank keeps for itself would be lost. With
    # averaged moments no rank keeps anything for itself.
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.Adam(0.002), local_steps=4, average_inner_state=True
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    callbacks = [*adasum.callbacks.standard(), Kill(options.kill_in_epoch)]
    if options.backup:
        # Two backups: the process may be killed while it writes one.
        callbacks.append(keras.callbacks.BackupAndRestore(options.backup, double_checkpoint=True))
    # Not shuffled anew in each epoch: that order would begin again with the second process.
    history = model.fit(x, y, epochs=options.epochs, shuffle=False, callbacks=callbacks, verbose=2)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
    if adasum.rank() == 0:
        print(f"weights after epoch {options.epochs}: {digest}")
    return digest, history.epoch


if __name__ == "__main__":
    main()
