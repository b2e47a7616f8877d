"""Log lines in MLPerf's format: `:::MLL <seconds> <key>: {"value": ..., "metadata": {...}}`."""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import keras

import tf_adasum as adasum


def log(key: str, value: Any = None, stream: TextIO | None = None, **metadata: Any) -> None:
    """Prints a line on rank 0.

    Args:
        key: one of MLPerf's, such as "run_start".
        value: anything that JSON has.
        stream: by default the standard output of this moment.
        **metadata: more of it; the caller's file and line are added.
    """
    if adasum.rank() != 0:
        return
    caller = inspect.currentframe().f_back
    metadata |= {"file": Path(caller.f_code.co_filename).name, "lineno": caller.f_lineno}
    said = json.dumps({"value": value, "metadata": metadata})
    print(f":::MLL {time.time():.3f} {key}: {said}", file=stream or sys.stdout, flush=True)


class Progress(keras.callbacks.Callback):
    """Logs a training: its blocks of epochs up to each evaluation, and how it ends.

    It has to come after `adasum.callbacks.standard()`, which makes the accuracy that of all ranks.

    Args:
        evaluated: the epochs, counted from 1, after which there is an evaluation.
        target: the accuracy at which the training counts as a success.
    """

    def __init__(self, evaluated: list[int], target: float):
        super().__init__()
        self.evaluated = evaluated
        self.target = target
        self._epoch = 0
        self._block_start: int | None = None
        self._accuracy = 0.0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._block_start = None
        log("run_start")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epoch = epoch + 1
        if self._block_start is None:
            self._block_start = self._epoch
            end = min(e for e in self.evaluated if e >= self._epoch)
            count = end - self._epoch + 1
            log("block_start", first_epoch_num=self._epoch, epoch_count=count)
        log("epoch_start", epoch_num=self._epoch)

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        log("eval_start", epoch_num=self._epoch)

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self._accuracy = logs["accuracy"]
        log("eval_stop", epoch_num=self._epoch)
        log("eval_accuracy", self._accuracy, epoch_num=self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        log("epoch_stop", epoch_num=self._epoch)
        log("train_loss", logs["loss"], epoch_num=self._epoch)
        if self._epoch in self.evaluated:
            count = self._epoch - self._block_start + 1
            log("block_stop", first_epoch_num=self._block_start, epoch_count=count)
            self._block_start = None

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        reached = self._accuracy >= self.target
        log("run_stop", status="success" if reached else "aborted", epoch_num=self._epoch)
