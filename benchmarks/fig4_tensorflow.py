"""The part of Figure 4 that goes through TensorFlow; started by fig4_allreduce_latency.py.

Under mpirun it reduces 64 float32 tensors eagerly, with tf_adasum.grouped_allreduce and, where
horovod.tensorflow can be imported, with Horovod's grouped allreduce. Horovod runs only while its
turn lasts, since its background thread takes time from the others even when it has nothing to do.
Horovod's public grouped_allreduce raises UnboundLocalError for Adasum, so its op is called
directly; with a number of ranks that is no power of two its Adasum ends the job, so it is left out.
Rank 0 prints the same lines of JSON as allreduce.cc.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import report
import tensorflow as tf

import tf_adasum
from tf_adasum import core

TENSORS = 64
TURNS = 5

Reduce = Callable[[Sequence[tf.Tensor]], Any]


def ours() -> dict[str, Reduce]:
    def reduce(op: core.Op) -> Reduce:
        return lambda tensors: tf_adasum.grouped_allreduce(tensors, op)

    return {"tf adasum": reduce(tf_adasum.Adasum), "tf sum": reduce(tf_adasum.Sum)}


def horovods() -> tuple[Any, dict[str, Reduce]]:
    """Horovod's module, or None, and what it can do with this number of ranks."""
    try:
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops
    except ImportError:
        return None, {}
    if not hvd.mpi_built():
        return None, {}

    def reduce(op: Any) -> Reduce:
        return lambda tensors: hvd.grouped_allreduce(tensors, op=op)

    contenders = {"horovod sum": reduce(hvd.Sum), "horovod average": reduce(hvd.Average)}
    if core.size() & (core.size() - 1) == 0:
        contenders["horovod adasum"] = lambda tensors: mpi_ops._grouped_allreduce(
            tensors, name="adasum", op=hvd.Adasum
        )
    return hvd, contenders


def take_turns(contenders: dict[str, Reduce], tensors: Sequence[tf.Tensor], seconds: float) -> dict:
    """Times of as many rounds as fill the seconds: contender -> seconds of each round."""
    each = one_round(contenders, tensors)
    if each < seconds / 10:
        each = one_round(contenders, tensors)  # the first one may have had to set things up
    rounds = int(np.clip(seconds / each, 1, 1000))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-(rounds // 10), rounds):
        for name, reduce in contenders.items():
            core.barrier()
            begin = time.perf_counter()
            reduce(tensors)
            took = time.perf_counter() - begin
            if number >= 0:
                times[name].append(took)
    return times


def one_round(contenders: dict[str, Reduce], tensors: Sequence[tf.Tensor]) -> float:
    """Seconds of all contenders together; the slowest rank's, so that all ranks know the same."""
    core.barrier()
    begin = time.perf_counter()
    for reduce in contenders.values():
        reduce(tensors)
    return float(core.allgather(np.array([time.perf_counter() - begin])).max())


def measure(size: int, seconds: float) -> dict[str, Any]:
    """The point for one number of bytes, with each operation's time on its slowest rank."""
    random = np.random.default_rng(core.rank())
    elements = size // TENSORS // 4
    tensors = [tf.constant(random.uniform(-0.5, 0.5, elements), tf.float32) for _ in range(TENSORS)]
    hvd, theirs = horovods()
    times: dict[str, list[float]] = {}
    for _ in range(TURNS):
        turns = take_turns(ours(), tensors, seconds / TURNS / 2)
        if hvd is not None:
            hvd.init()
            turns |= take_turns(theirs, tensors, seconds / TURNS / 2)
            hvd.shutdown()
        for name, taken in turns.items():
            times.setdefault(name, []).extend(taken)
    figures = {}
    for name, mine in times.items():
        slowest = core.allgather(np.array([mine])).max(axis=0)
        first, median, third = np.quantile(slowest, [0.25, 0.5, 0.75])
        figures[name] = {"median": median, "quartiles": [first, third]}
    rounds = min(map(len, times.values()))
    return {"bytes": size, "ranks": core.size(), "rounds": rounds, "seconds": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=report.integers, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    tf.config.set_visible_devices([], "GPU")
    core.init()
    for size in options.bytes:
        point = measure(size, options.seconds)
        if core.rank() == 0:
            print(json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
