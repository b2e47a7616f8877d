"""What the benchmarks work out of their times, against values by hand. No time is compared."""

import dataclasses
import json
import math
import subprocess
import sys
import textwrap

import cost_model
import fig4_allreduce_latency as fig4
import jobs
import latency
import namespaces
import pytest
import report
import scale_model
import sync_overhead
import table1_partition_training as table1
import two_hosts
from cost_model import Arithmetic, Cluster, Link
from latency import Point, Points
from ranks import run


def test_geometric_mean():
    assert report.geometric_mean([1, 4]) == pytest.approx(2)
    assert report.geometric_mean([0.5]) == pytest.approx(0.5)
    assert math.isnan(report.geometric_mean([]))


@pytest.mark.parametrize(
    "value, text",
    [(0.0123456, "0.0123"), (1.23456, "1.23"), (98.76, "98.8"), (1234.5, "1234"), (0, "0")],
)
def test_numbers_have_three_digits(value, text):
    assert report.number(value) == text


@pytest.mark.parametrize(
    "size, text", [(100, "100 B"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB")]
)
def test_size_names(size, text):
    assert report.size_name(size) == text


def test_missing_numbers_are_dashes():
    assert report.number(None) == report.number(math.nan) == "-"


def test_table_is_aligned():
    table = report.format_table(["what", "ms"], [["a", "1.5"], ["longer", "10"]])
    assert table.splitlines() == ["what     ms", "a       1.5", "longer   10"]


def test_commands_are_shown_without_folders(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/fig4.py", "--python", "/opt/env/bin/python"])
    assert report.command() == "python benchmarks/fig4.py --python python"


def test_written_files_say_where_figures_come_from(tmp_path):
    written = json.loads(report.write("figures", tmp_path / "new", {"answer": 42}).read_text())
    assert written["answer"] == 42
    assert written["machine"]["cores"] >= 1
    assert "MPI" in written["software"]["mpi"]


def line(ranks, size, **seconds):
    figures = {name: {"median": s, "quartiles": [s, s]} for name, s in seconds.items()}
    return {"ranks": ranks, "bytes": size, "rounds": 7, "seconds": figures}


def points(*lines):
    made = Points()
    for result in lines:
        made.add(result)
    return made


def test_jobs_with_the_same_numbers_make_one_point():
    made = points(line(2, 4096, rvh=3.0, mpi=2.0))
    made.add(line(2, 4096, rvh=9.0, mpi=1.5), "ring")
    (point,) = made
    assert point.seconds == {"rvh": 3.0, "mpi": 2.0, "mpi ring": 1.5}
    assert point.best_mpi == "mpi ring"
    assert point.ratio("rvh", "mpi") == 1.5
    assert point.ratio("rvh", point.best_mpi) == 2
    assert point.ratio("hierarchical", "mpi") is None


def test_best_mpi_is_none_without_mpi():
    (point,) = points(line(2, 4096, rvh=1.0))
    assert point.best_mpi is None
    assert point.ratio("rvh", None) is None


def test_means_are_split_at_64_kib():
    made = points(
        line(2, 1 << 12, rvh=4.0, mpi=1.0),
        line(2, 1 << 14, rvh=1.0, mpi=1.0),
        line(2, 1 << 16, rvh=1.0, mpi=2.0),
        line(2, 1 << 20, rvh=1.0, mpi=8.0),
        line(2, 1 << 22, memcpy=1.0),
    )
    mean = latency.mean_ratio(made, "rvh", fig4.default_mpi)
    assert mean.small == pytest.approx(2)
    assert mean.large == pytest.approx(0.25)


def test_ratio_table():
    made = points(
        line(2, 1 << 12, rvh=3.0, mpi=2.0),
        line(4, 1 << 16, rvh=1.0, mpi=4.0),
    )
    table = latency.ratio_table(made, "rvh", fig4.default_mpi, "rvh / mpi")
    assert [row.split() for row in table.splitlines()] == [
        ["rvh", "/", "mpi", "np=2", "np=4"],
        ["4", "KiB", "1.50", "-"],
        ["64", "KiB", "-", "0.25"],
        ["mean", "below", "64", "KiB", "1.50", "-"],
        ["mean", "from", "64", "KiB", "on", "-", "0.25"],
    ]


def test_time_table_is_in_milliseconds():
    table = latency.time_table(list(points(line(2, 4096, rvh=0.002, mpi=0.001))), ["rvh", "mpi"])
    assert table.splitlines()[1].split() == ["4", "KiB", "2.00", "1.00", "1.00", "mpi"]


def test_share_of_a_sync():
    assert sync_overhead.share(sync=0.5, local_steps=1, step=0.5) == 0.5
    assert sync_overhead.share(sync=0.4, local_steps=16, step=0.1) == pytest.approx(0.2)


def test_overheads_of_windows():
    windows = {0: [[1.0, 1.0, 1.1]], 1: [[1.6], [1.5], [1.4]], 4: [[1.3, 1.1, 1.1, 1.4]] * 3}
    one, four = sync_overhead.overheads(windows)
    assert (one.local_steps, one.step) == (1, 1.1)
    assert one.difference == pytest.approx(0.4)
    assert one.in_all == pytest.approx(0.5)
    assert (four.local_steps, four.step) == (4, 1.1)
    assert four.difference == pytest.approx(0.2 + 0.3)
    assert four.in_all == pytest.approx(0.9)
    assert four.share == pytest.approx(0.5 / 4.9)


def test_memory_is_told_in_copies_of_the_weights():
    memory = [
        {"local_steps": 0, "peak_bytes": 500_000_000, "weight_bytes": 100_000_000},
        {"local_steps": 1, "peak_bytes": 750_000_000, "weight_bytes": 100_000_000},
    ]
    last = sync_overhead.memory_table(memory).splitlines()[-1]
    assert last.split() == ["local_steps=1", "750", "250", "2.50"]


def test_table_1_has_the_layers_of_bert():
    # As Devlin et al. (2018) give them: 110 and 340 million, here with the heads of the training.
    assert table1.weights_of("base") == pytest.approx(110e6, rel=0.01)
    assert table1.weights_of("large") == pytest.approx(340e6, rel=0.02)


def test_the_papers_table_2():
    one, sixteen = two_hosts.PAPER
    assert one.seconds_to_accuracy / 60 == pytest.approx(175.44)
    assert sixteen.seconds_to_accuracy / 60 == pytest.approx(166.32)


def test_efficiency_counts_epochs_until_the_accuracy():
    training = {"local_steps": 16, "epoch_seconds": [9, 2, 4], "accuracy": [0.5, 0.96, 0.94]}
    assert two_hosts.efficiency(training, 0.95) == two_hosts.Efficiency(16, 4, 2)
    assert two_hosts.efficiency(training, 0.95).seconds_to_accuracy == 8
    assert two_hosts.efficiency(training, 0.99).seconds_to_accuracy is None


FREE = Arithmetic(dot3=0, combine=0, add=0, copy=0)
NOTHING = Link(L=0, o=0, g=0, G=0)
ONE_A_MESSAGE = Link(L=1, o=0, g=0, G=0)
ONE_A_BYTE = Link(L=0, o=0, g=0, G=1)


def cluster(inside=NOTHING, between=NOTHING, arithmetic=FREE, node_size=1 << 30):
    return Cluster(inside, between, arithmetic, node_size)


@pytest.mark.parametrize(
    "cost, ranks, messages",
    [
        # Down and up the tree, and sums over 2, 4, 8 ranks by recursive doubling.
        (cost_model.rvh, 2, 2 + 1),
        (cost_model.rvh, 8, 6 + (1 + 2 + 3)),
        # Once to each other rank and back, and a sum over all at each step of the line.
        (cost_model.ring, 4, 2 * 3 + 3 * 2),
        (cost_model.hierarchical, 4, 2 * 3),
        (cost_model.rabenseifner_sum, 8, 6),
        (cost_model.ring_sum, 4, 6),
    ],
)
def test_messages_in_a_row(cost, ranks, messages):
    assert cost(cluster(inside=ONE_A_MESSAGE), ranks, 8, 64) == messages


def test_messages_of_a_folded_tree():
    # Ranks 0 and 1 first: exchange, sum, the half given over; then a tree of 2, whose sum is over 2
    # leaves; then the whole given back.
    assert cost_model.rvh(cluster(inside=ONE_A_MESSAGE), 3, 8, 64) == (2 + 1) + (2 + 1) + 1


def test_messages_of_nodes():
    # In the nodes of 4 there and back; between two nodes down and up, with sums over the 4 lanes of
    # both.
    split = {"node_size": 4}
    assert cost_model.hierarchical(cluster(inside=ONE_A_MESSAGE, **split), 8, 8, 1) == 2 * 3 + 2
    assert cost_model.hierarchical(cluster(between=ONE_A_MESSAGE, **split), 8, 8, 1) == 2 + 1


@pytest.mark.parametrize(
    "cost", [cost_model.rvh, cost_model.ring, cost_model.rabenseifner_sum, cost_model.ring_sum]
)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_bytes_are_those_of_the_best_algorithms(cost, ranks):
    n = 1 << 20
    assert cost(cluster(inside=ONE_A_BYTE), ranks, n, 0) == 2 * n * (ranks - 1) / ranks


def test_ranks_of_a_node_share_its_connection():
    # 4 ranks on 2 nodes: half the bytes go between, in quarters, by 2 ranks at a time.
    split = cluster(between=ONE_A_BYTE, node_size=2)
    assert cost_model.rvh(split, 4, 8, 0) == 2 * (8 / 4) * 2
    assert cost_model.hierarchical(split, 4, 8, 0) == 2 * (8 / 4) * 2


def test_arithmetic_is_of_slices():
    per_byte = Arithmetic(dot3=1, combine=10, add=100, copy=1000)
    free = cluster(arithmetic=per_byte)
    assert cost_model.rvh(free, 4, 8, 64) == (4 + 2) * 11 + 2 * 8 * 1000
    assert cost_model.ring(free, 4, 8, 64) == 3 * 2 * 11 + 2 * 8 * 1000
    assert cost_model.hierarchical(free, 4, 8, 64) == 3 * 2 * 100 + 2 * 8 * 1000
    assert cost_model.ring_sum(free, 4, 8) == 3 * 2 * 100
    assert cost_model.rabenseifner_sum(free, 4, 8) == (4 + 2) * 100


def test_long_messages_go_in_pieces():
    link = Link(L=1, o=2, g=0.5, G=0)
    assert link.exchange(cost_model.PIECE_BYTES) == 5
    assert link.exchange(3 * cost_model.PIECE_BYTES) == 6


def test_more_ranks_than_cores_take_turns():
    assert cost_model.serialised(3, ranks=2, cores=4) == 3
    assert cost_model.serialised(3, ranks=8, cores=2) == 12


def test_parameters_of_an_exact_line_are_found():
    sizes = [2**i for i in range(3, 25)]
    slopes = [1e-9 if size <= scale_model.CACHED_BYTES else 3e-9 for size in sizes]
    exchanges = [2e-6 + size * slope for size, slope in zip(sizes, slopes, strict=True)]
    pingpong = {"bytes": sizes, "exchanges": exchanges, "half_round_trips": exchanges}
    cached, beyond = scale_model.links({**pingpong, "o_send": 4e-7, "o_receive": 6e-7, "g": 2e-7})
    for link, per_byte in ((cached, 1e-9), (beyond, 3e-9)):
        assert (link.L, link.o, link.g, link.G) == pytest.approx((1e-6, 5e-7, 2e-7, per_byte))


def test_kernels_are_read_from_what_the_benchmark_prints():
    kernels = """
        instruction set: avx512
        in L2, 128 KiB an operand
          memcpy                20.0 GB/s   1.59 of the triad
          triad float64         30.0 GB/s   1.00 of the triad
          dot3 float32          40.0 GB/s   0.51 of the triad
          combine float32       60.0 GB/s   0.68 of the triad
        out of cache, 131072 KiB an operand
          memcpy                 2.0 GB/s   1.59 of the triad
          triad float64          3.0 GB/s   1.00 of the triad
          dot3 float32           4.0 GB/s   0.51 of the triad
          combine float32        {}.0 GB/s   0.68 of the triad
        """
    printed = [textwrap.dedent(kernels).format(rate) for rate in (4, 8)]
    cached, beyond = scale_model.arithmetic(printed)
    assert dataclasses.astuple(cached) == pytest.approx((5e-11, 5e-11, 1e-10, 1e-10))
    assert dataclasses.astuple(beyond) == pytest.approx((5e-10, 5e-10, 1e-9, 1e-9))


def test_prediction_is_checked_on_one_machine():
    small = cluster(inside=ONE_A_MESSAGE, between=Link(L=100, o=0, g=0, G=0), node_size=2)
    measured = scale_model.Measured(small, small)
    point = Point(4, 1024, {"rvh": 28.0, "mpi": 8.0}, {}, {})
    # 4 exchanges and sums over 2 and 4 ranks, twice as long on 2 cores; the sum is 4 exchanges.
    assert scale_model.check(measured, point, cores=2) == {"rvh": 2.0, "mpi": 1.0}


def test_mean_factor_counts_both_ways():
    assert scale_model.mean_factor([2, 0.5]) == pytest.approx(2)
    assert scale_model.mean_factor([1, 4]) == pytest.approx(2)


def test_a_job_that_takes_too_long_is_ended():
    command = [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"]
    seen = []
    with pytest.raises(jobs.JobError, match="did not end within 2 s"):
        jobs.run(command, 2, seen.append)
    assert seen == [{}]


def test_a_job_that_fails_is_shown_with_what_it_said():
    with pytest.raises(jobs.JobError, match=r"exit code 3(.|\n)*what was wrong"):
        jobs.run([sys.executable, "-c", "import sys; print('what was wrong'); sys.exit(3)"], 20)


def namespaces_here():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_hosts_are_removed_after_an_error():
    try:
        with namespaces.hosts(2, "1gbit") as hosts:
            for name in hosts.names:
                assert name in namespaces_here()
            raise ZeroDivisionError
    except namespaces.UnavailableError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")
    except ZeroDivisionError:
        for name in hosts.names:
            assert name not in namespaces_here()


def test_figure_4_from_end_to_end(tmp_path):
    try:
        jobs.build("allreduce_benchmark")
    except FileNotFoundError as error:
        pytest.skip(f"this checkout was not built here: {error}")
    program = [sys.executable, fig4.__file__, "--quick", "--no-tensorflow", "--np", "2"]
    given = ["--sizes", "12,16", "--seconds", "0.1", "--output", str(tmp_path)]
    ended = run([*program, *given], timeout=60, TF_ADASUM_TEST_IMPORTS="all")
    assert ended.code == 0, ended.output
    figures = json.loads((tmp_path / "fig4_allreduce_latency.json").read_text())
    assert [(p["ranks"], p["bytes"]) for p in figures["points"]] == [(2, 4096), (2, 65536)]
    for point in figures["points"]:
        assert {*latency.ALGORITHMS, *fig4.BESIDE, "mpi ring"} <= set(point["seconds"])
        assert all(seconds > 0 for seconds in point["seconds"].values())
    assert "rvh / best mpi" in ended.output
    assert (tmp_path / "fig4_allreduce_latency.png").stat().st_size > 10_000
