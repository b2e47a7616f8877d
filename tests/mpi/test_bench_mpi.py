"""`python -m tf_adasum bench` on two ranks: its output, and that ranks do the same and stop."""

from __future__ import annotations

import itertools
import json
import sys
from unittest import mock

import numpy as np
from ranks import on_ranks, run

from tf_adasum import bench, core, launch


def test_output_and_json(tmp_path):
    written = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tf_adasum", "bench", "--seconds", "1", "--json", str(written)]
    ended = run([*launch.mpirun_command(2), *command], timeout=60)
    assert ended.code == 0, ended.output
    lines = ended.output.splitlines()
    assert lines[0].startswith("2 ranks on 1 host, ") and lines[0].endswith(". 1 s ...")
    assert lines[2].split() == ["64", "tensors,", "milliseconds", "rvh", "ring", "sum"]
    assert lines[3].startswith("4 KiB ")

    figures = json.loads(written.read_text())
    assert (figures["ranks"], figures["hosts"], figures["tensors"]) == (2, 1, 64)
    assert figures["advice"] == lines[-len(figures["advice"]) :]
    for row in [*figures["sizes"], *figures["thresholds"]]:
        lower, upper = row["quartiles"]
        assert 0 < lower <= row["median"] <= upper
        assert row["calls"] >= 1
    measured = {(row["bytes"], row["contender"]) for row in figures["sizes"]}
    assert {(4096, "rvh"), (4096, "ring"), (4096, "sum")} <= measured
    # Where the cores are busy a second may not suffice for these.
    assert bool(figures["thresholds"]) == ("fusion threshold, for " in ended.output)
    assert {row["contender"] for row in figures["thresholds"]} <= {"rvh"}


class Recorded(bench.Calls):
    """Calls that are written down, and take this rank so many seconds longer, as it says."""

    def __init__(self, longer=0.0):
        super().__init__()
        self.made, self.longer = [], longer

    def seconds(self, cell):
        self.made.append(cell.bytes)
        return super().seconds(cell) + self.longer


CELLS = [bench.Cell(4096, "rvh"), bench.Cell(16384, "sum")]


@on_ranks(2)
def test_ranks_make_the_same_calls_although_their_clocks_differ():
    """Rank 1's clock says from the start that the time is over, or never gets on."""
    for theirs in (1000, 0):
        reading = itertools.count()  # rank 0 reads it once for each visit, and once to stop
        clock = (reading if core.rank() == 0 else itertools.repeat(theirs)).__next__
        calls = Recorded()
        figures = bench.Measurement(CELLS, calls, 6, clock).run()
        assert list(figures) == CELLS
        if core.rank() == 0:
            assert next(reading) == 7
        together = [(sum(calls.made), len(calls.made), *(f.median for f in figures.values()))]
        everyones = core.allgather(np.array(together))
        assert (everyones[0] == everyones[1]).all()


@on_ranks(2)
def test_ranks_measure_the_same_although_one_host_has_more_of_them():
    with mock.patch.object(core, "cross_size", lambda: 2 - core.rank()):
        assert bench.number_of_hosts() == 2


@on_ranks(2)
def test_the_time_is_that_of_the_slowest_rank():
    reading = itertools.count()
    calls = Recorded(100.0 if core.rank() == 1 else 0.0)
    figures = bench.Measurement(CELLS[:1], calls, 3, reading.__next__).run()
    assert figures[CELLS[0]].median > 100
