"""What `python -m tf_adasum bench` advises, of made-up figures, and which calls it plans."""

import pytest

from tf_adasum import bench, core
from tf_adasum.bench import Cell, Figure

MIB = 1 << 20


def figure(milliseconds, calls=9, spread=0.02):
    seconds = milliseconds / 1e3
    return Figure(seconds, ((1 - spread) * seconds, (1 + spread) * seconds), calls)


def by_size(spread=0.02, **milliseconds):
    """Figures of 1, 4 and 16 MiB, four times as long for each."""
    return {
        Cell(MIB << (2 * i), name): figure(time * 4**i, spread=spread)
        for i in range(3)
        for name, time in milliseconds.items()
    }


def by_threshold(now, **others):
    """Milliseconds of 64 MiB, with `_4` for a threshold of 4 MiB."""
    figures = {Cell(64 * MIB, "rvh"): figure(now)}
    for name, time in others.items():
        figures[Cell(64 * MIB, "rvh", int(name[1:]) * MIB)] = figure(time)
    return figures


def test_the_default_is_kept_where_nothing_is_faster():
    sizes = by_size(rvh=1, ring=1.2, hierarchical=0.98, sum=0.8)
    advised = bench.advice(sizes, by_threshold(10, _1=12, _4=9.8, _16=11), hosts=2)
    assert advised == [
        'Algorithm: keep "rvh", the default; no other is clearly faster here.',
        "Adasum takes 1.25 of the time of a plain sum.",
        "Fusion threshold: keep what is set now; no other is clearly faster here.",
        "Local steps: a sync of 16 MiB of weights takes about 16.0 ms, and more in proportion. It "
        "is 1% of a training's time where local_steps times the seconds of a step are 1.58.",
    ]


def test_what_is_faster_is_advised_with_its_setting():
    sizes = by_size(rvh=1, ring=0.9, hierarchical=0.5, sum=0.8)
    algorithm, _, threshold, _ = bench.advice(sizes, by_threshold(10, _1=8, _4=6, _16=7), hosts=3)
    assert algorithm == (
        'Algorithm: "hierarchical" takes 0.50 of the time of "rvh"; it takes the mean of each '
        "host's ranks first, so Adasum combines 3 hosts instead of all ranks. To choose it: "
        'algorithm="hierarchical", or TF_ADASUM_ALGORITHM=hierarchical on all ranks.'
    )
    assert threshold == (
        "Fusion threshold: 4 MiB takes 0.60 of the time of what is set now, for 64 MiB. To choose "
        "it: TF_ADASUM_FUSION_THRESHOLD=4194304 on all ranks."
    )


def test_noise_is_no_reason_to_change():
    sizes = by_size(spread=0.3, rvh=1, ring=0.8, sum=1)
    thresholds = {cell: figure(t, spread=0.3) for t, cell in [(10, Cell(8, "rvh"))]}
    thresholds[Cell(8, "rvh", 4)] = figure(8, spread=0.3)
    algorithm, _, threshold, _ = bench.advice(sizes, thresholds, hosts=1)
    assert "keep" in algorithm and "keep" in threshold


def test_one_size_of_three_is_no_reason_to_change():
    sizes = by_size(rvh=1, ring=1)
    sizes[Cell(MIB, "ring")] = figure(0.5)
    assert "keep" in bench.advice(sizes, {}, hosts=1)[0]


def test_too_few_calls_give_no_advice():
    few = {Cell(MIB, "rvh"): figure(1, calls=4), Cell(MIB, "ring"): figure(0.1, calls=4)}
    assert bench.advice(few, {}, 1) == [
        "There was too little time for advice: give it more with --seconds."
    ]
    enough = {Cell(MIB, "rvh"): figure(1, calls=5)}
    assert "too little time to compare" in bench.advice(enough, few, 1)[-2]


def test_hierarchical_is_measured_on_several_hosts_only():
    assert bench.contenders(1) == ["rvh", "ring", "sum"]
    assert bench.contenders(2) == ["rvh", "ring", "hierarchical", "sum"]


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


class SteadyCalls:
    """Each byte takes a second."""

    def __init__(self, clock):
        self.clock, self.made = clock, []

    def seconds(self, cell):
        assert len(self.made) < 10_000
        self.clock.now += cell.bytes
        self.made.append(cell.bytes)
        return float(cell.bytes)


def test_cells_take_turns_and_none_begins_that_would_be_late(clock):
    calls = SteadyCalls(clock)
    cells = [Cell(size, "rvh") for size in (1, 2, 4, 64)]
    figures = bench.Measurement(cells, calls, 28, clock).run()
    # Twice each at first, and then by turns; that of 64 would not end, at last nor that of 4.
    assert calls.made == [1, 1, 2, 2, 4, 4, 1, 2, 4, 1, 2, 1, 2]
    # The first call of each has warmed up.
    assert figures == {
        cells[0]: Figure(1.0, (1.0, 1.0), 4),
        cells[1]: Figure(2.0, (2.0, 2.0), 4),
        cells[2]: Figure(4.0, (4.0, 4.0), 2),
    }


def test_fast_cells_are_called_often_in_a_visit(clock):
    calls = SteadyCalls(clock)
    measurement = bench.Measurement([Cell(1e-6, "rvh"), Cell(1e-3, "rvh")], calls, 1.0, clock)
    measurement.run()
    assert measurement.next(0) == (bench.Measurement._STOP, 0)
    clock.now = 0.0
    assert measurement.next(0) == (0, 50)
    assert measurement.next(1) == (1, 20)


def test_alone_it_names_the_command_to_start(capsys):
    assert core.size() == 1
    assert bench.main([]) == 2
    assert "-m tf_adasum bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--seconds", "nan"], ["--json", "no/such/folder/x.json"]]
)
def test_wrong_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments)
    assert exit_.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_tables_show_what_was_not_reached():
    sizes = by_size(rvh=1, ring=2)
    del sizes[Cell(16 * MIB, "ring")]
    lines = bench.report(sizes, by_threshold(10, _4=9), ["Advice."]).splitlines()
    assert lines == [
        "",
        "64 tensors, milliseconds   rvh  ring",
        "1 MiB                     1.00  2.00",
        "4 MiB                     4.00  8.00",
        "16 MiB                    16.0     -",
        "",
        "fusion threshold, for 64 MiB   rvh",
        "set now                       10.0",
        "4 MiB                         9.00",
        "",
        "Advice.",
    ]
