"""The algorithms over ranks that are threads, on one and on several pretended hosts, sharing memory
or sending messages, in buckets: all against the reference."""

import numpy as np
import pytest
from cases import DTYPES, SHAPES, check_table, vectors

from tf_adasum import core, reference
from tf_adasum.reductions import choose_algorithm

ALGORITHMS = ["rvh", "ring", "hierarchical", "hierarchical_sum"]

# What a host's ranks do to read each other's vectors, and what becomes of small calls.
WAYS = {
    "memory": {},
    "messages": {"TF_ADASUM_SHARED_MEMORY": "0", "TF_ADASUM_SMALL": "0"},
    "small": {"TF_ADASUM_SHARED_MEMORY": "0"},
}

# Each rank's host.
PLACES = {
    "1 rank": [0],
    "2 together": [0, 0],
    "2 apart": [0, 1],
    "3 together": [0, 0, 0],
    "2 + 1": [0, 0, 1],
    "1 + 2": [0, 1, 1],
    "in turns": [0, 1, 0, 1],
    "2 + 2": [0, 0, 1, 1],
    "2 + 2 + 2": [0, 0, 1, 1, 2, 2],
    "4 + 4": [0] * 4 + [1] * 4,
    "3 + 1 + 2": [0, 0, 0, 1, 2, 2],
    "2 on each of 5": [host for host in range(5) for _ in range(2)],
    "7 apart": list(range(7)),
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    for name, value in {"TF_ADASUM_SMALL": "0", **WAYS[request.param]}.items():
        if request.param != "small" or name != "TF_ADASUM_SMALL":
            monkeypatch.setenv(name, value)
    return request.param


def _on_all(algorithm, hosts, **options):
    def reduce(per_rank, op):
        results = core.simulate(per_rank, op, algorithm, hosts=hosts, **options)
        for result in results[1:]:
            for mine, first in zip(result, results[0], strict=True):
                assert mine.tobytes() == first.tobytes(), "the ranks' bits differ"
        return results[0]

    return reduce


@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_reference(algorithm, hosts, way):
    check_table(
        _on_all(algorithm, hosts),
        len(hosts),
        algorithm,
        hosts,
        shapes_names=["64 mixed", "several with empty ones", "fewer elements than ranks"],
        dtypes=["float32", "bfloat16"],
        ops=["adasum", "average"],
    )


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1, 1], [0, 0, 1]])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("fusion_threshold", [0, 5000])
def test_in_buckets(algorithm, hosts, fusion_threshold, way):
    check_table(
        _on_all(algorithm, hosts, fusion_threshold=fusion_threshold),
        len(hosts),
        algorithm,
        hosts,
        shapes_names=["64 mixed"],
        dtypes=["float64"],
    )


@pytest.mark.parametrize("hosts", [[0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tensors_of_several_pieces(algorithm, hosts, way):
    # More than a message's piece of 256 KiB, and cut by the slices.
    shapes = [(300_001,), (7,), (150_000,), (), (90_001,)]
    per_rank = vectors(shapes, DTYPES["float32"], len(hosts))
    for t, got in enumerate(_on_all(algorithm, hosts)(per_rank, "adasum")):
        of_t = [arrays[t] for arrays in per_rank]
        want = {
            "rvh": lambda of=of_t: reference.tree(of),
            "ring": lambda of=of_t: reference.ring(of),
            "hierarchical": lambda of=of_t: reference.hierarchical(of, hosts),
            "hierarchical_sum": lambda of=of_t: reference.hierarchical(of, hosts, "sum"),
        }[algorithm]()
        np.testing.assert_allclose(np.linalg.norm(got - want), 0, atol=1e-6 * np.linalg.norm(want))


def test_pinned_value_of_the_line(way):
    four = [[np.array(v, float)] for v in ([4, 5, 6], [7, 8, 9], [1, 0, 0], [0, 2, 0])]
    (got,) = core.simulate(four, algorithm="ring")[0]
    np.testing.assert_allclose(got, [3.47223477, 4.81011837, 6.82261694], atol=5e-9)


def test_hosts_by_hand():
    # The first host's mean is (1, 0), the second's vector (0, 3): orthogonal, so they are added.
    ranks = [[np.array([2.0, 0.0])], [np.array([0.0, 0.0])], [np.array([0.0, 3.0])]]
    for algorithm, want in {"hierarchical": [1, 3], "hierarchical_sum": [2, 3]}.items():
        for result in core.simulate(ranks, algorithm=algorithm, hosts=[0, 0, 1]):
            np.testing.assert_array_equal(result[0], want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_range_of_the_squares(algorithm, way):
    rng = np.random.default_rng(1)
    hosts = [0, 0, 1, 1]
    magnitudes = [1e300, 1e-300, 1e306, 1e-290]
    per_rank = [[rng.uniform(0.3, 1, size=37) * m] for m in magnitudes]
    of = [arrays[0] for arrays in per_rank]
    (got,) = core.simulate(per_rank, algorithm=algorithm, hosts=hosts)[0]
    want = {
        "rvh": reference.tree,
        "ring": reference.ring,
        "hierarchical": lambda v: reference.hierarchical(v, hosts),
        "hierarchical_sum": lambda v: reference.hierarchical(v, hosts, "sum"),
    }[algorithm](of)
    np.testing.assert_allclose(got / 1e306, want / 1e306, rtol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_that_disagree(algorithm, way):
    per_rank = [[np.zeros(3)], [np.zeros(4)], [np.zeros(3)]]
    with pytest.raises(core.DisagreementError, match=r"ranks 0, 2 .*float64\[3\]; rank 1 .*\[4\]"):
        core.simulate(per_rank, algorithm=algorithm, hosts=[0, 0, 1])


def test_memory_and_messages_give_the_same_up_to_the_order_of_sums(monkeypatch):
    per_rank = vectors(SHAPES["64 mixed"], DTYPES["float64"], 6)
    results = []
    for shared in ("1", "0"):
        monkeypatch.setenv("TF_ADASUM_SHARED_MEMORY", shared)
        results.append(core.simulate(per_rank)[0])
    for a, b in zip(*results, strict=True):
        assert np.linalg.norm(a - b) <= 1e-13 * np.linalg.norm(a)


def test_which_algorithm(monkeypatch):
    for name in ("TF_ADASUM_ALGORITHM", "HOROVOD_HIERARCHICAL_ALLREDUCE"):
        monkeypatch.delenv(name, raising=False)
    assert choose_algorithm(None) == "rvh"
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", "1")
    assert choose_algorithm(None) == "hierarchical"
    monkeypatch.setenv("TF_ADASUM_ALGORITHM", "ring")
    assert choose_algorithm(None) == "ring"
    assert choose_algorithm("rvh") == "rvh"
    # And it is the one that runs.
    four = [[np.array(v, float)] for v in ([4, 5, 6], [7, 8, 9], [1, 0, 0], [0, 2, 0])]
    np.testing.assert_allclose(core.simulate(four)[0][0][0], 3.47223477, atol=5e-9)
    monkeypatch.setenv("TF_ADASUM_ALGORITHM", "tree")
    with pytest.raises(ValueError, match=r"`algorithm` must be one of 'rvh', .*Received: .*'tree'"):
        core.simulate(four)


def test_bad_options(monkeypatch):
    one = [[np.ones(2)]] * 2
    with pytest.raises(ValueError, match=r"`algorithm` must be one of .*Received: algorithm='x'"):
        core.simulate(one, algorithm="x")
    for bad in (-1, 1.5, "4", True, 2**64):
        with pytest.raises(ValueError, match="`fusion_threshold` must be None or a number of byte"):
            core.simulate(one, fusion_threshold=bad)
    with pytest.raises(ValueError, match=r"`hosts` must have one number for each of 2 ranks"):
        core.simulate(one, hosts=[0])
    for name in ("TF_ADASUM_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "64MB")
            with pytest.raises(ValueError, match=rf"{name} must be a number of bytes.*'64MB'"):
                core.simulate(one)
            patched.setenv(name, "64")
            np.testing.assert_array_equal(core.simulate(one)[0][0], 1)
