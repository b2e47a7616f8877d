"""Training that goes on when ranks die, against the same training written out in NumPy."""

import json
import re
import sys
from pathlib import Path

import elastic_training
import numpy as np
import pytest
import worker
from ranks import run, run_ranks

from tf_adasum import launch, native, reference

pytestmark = pytest.mark.skipif(
    not native.core_library().adasum_mpi_running().decode().startswith("Open MPI v5"),
    reason="going on without the dead needs Open MPI 5",
)

ULFM = ("--with-ft", "ulfm")


def _train(ranks, deaths, folder, epochs=1):
    """What each rank that has come to the end tells."""
    mpirun, *flags = launch.mpirun_command(ranks)
    script = Path(elastic_training.__file__)
    arguments = [json.dumps(deaths), str(folder), str(epochs)]
    ended = run(
        [mpirun, *ULFM, *flags, sys.executable, str(script), *arguments],
        timeout=150,
        PYTHONPATH=f"{launch.environment()['PYTHONPATH']}:{script.parent}",
    )
    assert ended.code == 0, ended.output
    alive = [r for r in range(ranks) if str(r) not in deaths]
    assert sorted(folder.glob("*.json")) == [folder / f"{r}.json" for r in alive], ended.output
    return {r: json.loads((folder / f"{r}.json").read_text()) for r in alive}


class _Workers:
    """Workers that take steps of SGD with momentum, window by window."""

    def __init__(self, number, steps):
        self.start = worker.initial_weights(0)
        self.own = [self.start for _ in range(number)]
        self.momenta = [[np.zeros_like(w) for w in self.start] for _ in range(number)]
        self.data = [worker.batches(rank, steps) for rank in range(number)]

    def window(self, number, alive):
        """The local steps of a window, and what the weights become if it is combined."""
        steps = elastic_training.LOCAL_STEPS
        for r in alive:
            for step in range(number * steps, (number + 1) * steps):
                self.momenta[r] = [
                    worker.MOMENTUM * m - worker.RATE * g
                    for m, g in zip(
                        self.momenta[r],
                        worker.gradient(self.own[r], *self.data[r][step]),
                        strict=True,
                    )
                ]
                self.own[r] = [w + m for w, m in zip(self.own[r], self.momenta[r], strict=True)]
        deltas = [[w - s for w, s in zip(self.own[r], self.start, strict=True)] for r in alive]
        combined = [reference.tree(list(d)) for d in zip(*deltas, strict=True)]
        return [s + c for s, c in zip(self.start, combined, strict=True)]

    def go_on(self, weights):
        self.start = weights
        self.own = [weights for _ in self.own]


def test_ranks_die_until_one_is_left(tmp_path):
    # The last sync is without two at once, of whom one dies while the others find together.
    deaths = {
        "3": ["batch", 1],
        "0": ["sync", 5, "emit"],
        "2": ["sync", 8, "agree"],
        "4": ["sync", 8, "shrink"],
    }
    (told,) = _train(5, deaths, tmp_path).values()
    assert (told["rank"], told["size"]) == (0, 1)
    # By the numbers that they had then.
    assert [sorted(lost) for lost in told["lost"]] in ([[3], [0], [1, 2]], [[3], [0], [1], [1]])

    workers = _Workers(5, elastic_training.STEPS)
    want, syncs = [], 0
    for window, alive in enumerate([[0, 1, 2, 4], [1, 2, 4], [1], [1]]):
        all_steps = [r for r in range(5) if r in alive]
        combined = workers.window(window, all_steps)
        # In the second window a rank dies when others have written already: its steps are lost.
        if window != 1:
            workers.go_on(combined)
            syncs += 1
        else:
            workers.go_on(workers.start)
        want.append((syncs, workers.start))
    for (syncs, weights), seen in zip(want, told["seen"], strict=True):
        assert seen["syncs"] == syncs
        for got, expected in zip(seen["weights"], weights, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_ranks_die_while_they_save_and_evaluate(tmp_path):
    deaths = {"0": ["save", 1], "2": ["evaluation", 2]}
    told = _train(4, deaths, tmp_path, epochs=4)
    assert {r: (t["rank"], t["size"]) for r, t in told.items()} == {1: (0, 2), 3: (1, 2)}
    assert [t["lost"] for t in told.values()] == [[[0], [1]]] * 2
    assert told[1]["seen"][-1] == told[3]["seen"][-1]
    # What rank 0 had to write, the new rank 0 writes: all but what it died in.
    assert sorted(path.stem for path in tmp_path.glob("*.keras")) == ["1", "3", "4"]
    log = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in log] == ["epoch", "0", "2", "3"]


def test_data_is_dealt_out_among_the_living():
    source = """
import os, signal
import tensorflow as tf, tf_adasum as adasum
from tf_adasum import core
core.go_on_without_the_dead()
me, mine = core.rank(), []
for element in adasum.shard(tf.data.Dataset.range(100)):
    mine.append(int(element))
    if me == 1 and len(mine) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(mine) <= 2:
        core.barrier()
print("rank", me, mine)
"""
    mpirun, *flags = launch.mpirun_command(3)
    ended = run([mpirun, *ULFM, *flags, sys.executable, "-c", source], timeout=100)
    assert ended.code == 0, ended.output
    dealt = {r: json.loads(m) for r, m in re.findall(r"rank (\d) (\[.*\])", ended.output)}
    assert dealt["0"][:2] == [0, 3] and dealt["2"][:2] == [2, 5]
    # What was read ahead when rank 1 died was dealt out among three. Then there are two, for whom
    # 100 elements are enough: for three the first two would come once more.
    assert {r: mine[-20:] for r, mine in dealt.items()} == {
        "0": list(range(60, 100, 2)),
        "2": list(range(61, 100, 2)),
    }


def test_elastic_needs_an_mpi_that_is():
    source = """
import keras, tf_adasum as adasum
try:
    adasum.AdasumOptimizer("sgd", elastic=True)
except RuntimeError as error:
    print(error)
saved = adasum.AdasumOptimizer("sgd").get_config() | {"elastic": True}
assert not adasum.AdasumOptimizer.from_config(saved).get_config()["elastic"]
"""
    ended = run_ranks(2, source)
    assert ended.code == 0, ended.output
    assert ended.output.count("start the job with Open MPI 5's `mpirun --with-ft ulfm`") == 2
    assert ended.output.count("loaded with elastic=False") == 2
