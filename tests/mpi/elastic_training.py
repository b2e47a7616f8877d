"""A rank of a training in which ranks die: at places that the test names for each.

Run as `elastic_training.py DEATHS FOLDER EPOCHS`. DEATHS is JSON, from a rank to where it dies:
["batch", b] after batch b, ["sync", b, place] in the sync after batch b, ["save", e] while it saves
epoch e, ["evaluation", e] in the evaluation of epoch e.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import worker

import tf_adasum as adasum
from tf_adasum import core, native

LOCAL_STEPS, STEPS = 3, 12


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(keras.callbacks.Callback):
    def __init__(self, kind, at, place=None):
        super().__init__()
        self.kind, self.at = kind, at
        self.in_sync = False
        self.epoch = 0
        hook = native.FaultHook(lambda here: self.in_sync and here.decode() == place and _die())
        native.core_library().adasum_set_fault_hook(hook)
        self.hook = hook

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.in_sync = self.kind == "sync" and batch == self.at

    def on_train_batch_end(self, batch, logs=None):
        if self.kind == "batch" and batch == self.at:
            _die()

    def on_test_batch_end(self, batch, logs=None):
        if self.kind == "evaluation" and self.epoch == self.at:
            _die()


def main(deaths, folder, epochs):
    me = adasum.rank()
    mine = Dies(*deaths.get(str(me), ["never", -1]))

    class Checkpoint(keras.callbacks.ModelCheckpoint):
        def _save_model(self, epoch, batch, logs):
            if mine.kind == "save" and epoch == mine.at:
                _die()
            super()._save_model(epoch, batch, logs)

    model = worker.build_model(worker.initial_weights(0))
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(worker.RATE, momentum=worker.MOMENTUM), LOCAL_STEPS, elastic=True
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    seen, shrinkings = [], []

    class AfterEachWindow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (batch + 1) % LOCAL_STEPS == 0:
                weights = [w.tolist() for w in model.get_weights()]
                seen.append({"syncs": int(optimizer.syncs), "weights": weights})

    model.fit(
        worker.dataset(me, STEPS),
        epochs=epochs,
        validation_data=worker.dataset(0, 2) if epochs > 1 else None,
        callbacks=[
            *adasum.callbacks.standard(),
            AfterEachWindow(),
            mine,
            Checkpoint(folder / "{epoch}.keras"),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            adasum.callbacks.OnShrink(shrinkings.append),
        ],
        shuffle=False,
        verbose=0,
    )
    assert shrinkings == core.shrinkings()
    assert int(optimizer.iterations) == STEPS * epochs
    assert len(worker.hashes(model)) == 1
    told = {
        "rank": core.rank(),
        "size": core.size(),
        "lost": [each.lost for each in shrinkings],
        "seen": seen,
    }
    (folder / f"{me}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
