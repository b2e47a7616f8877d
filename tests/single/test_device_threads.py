"""Tensors on a device, emulated, with ranks as threads of this process, against the reference."""

import numpy as np
import pytest
from cases import DTYPES, allowed_error, assert_close, check_table, expected, vectors
from devices import simulate

from tf_adasum import core, native

WAYS = ["direct", "staged"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How messages go: the message layer reads the device, or they go through the host."""
    monkeypatch.setenv("TF_ADASUM_DEVICE_TRANSPORT", request.param)
    return request.param


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_equals_reference(ranks, way):
    def reduce(per_rank, op):
        results = simulate(per_rank, op)
        for result in results[1:]:
            for mine, first in zip(result, results[0], strict=True):
                assert mine.tobytes() == first.tobytes(), "the ranks' bits differ"
        return results[0]

    check_table(reduce, ranks)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "hierarchical_sum"])
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 2, 2]])
def test_algorithms_equal_reference(algorithm, hosts, way):
    def reduce(per_rank, op):
        return simulate(per_rank, op, algorithm, hosts=hosts)[-1]

    names = ["odd", "several with empty ones"]
    check_table(reduce, len(hosts), algorithm, hosts, shapes_names=names)


# Several pieces of a message, several blocks of a kernel, several buckets.
@pytest.mark.parametrize("threshold", [None, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_tensors(ranks, threshold, way):
    shapes = [(3_000_001,), (7,), (900_000,), (64, 33), (1_300_000,)]
    per_rank = vectors(shapes, DTYPES["float32"], ranks)
    results = simulate(per_rank, fusion_threshold=threshold)
    for t, want in enumerate(expected(per_rank, "adasum")):
        of_t = [arrays[t] for arrays in per_rank]
        assert_close(results[0][t], want, allowed_error(want, of_t, DTYPES["float32"]), f"{t}")
        assert len({result[t].tobytes() for result in results}) == 1


@pytest.mark.parametrize("op", ["adasum", "sum", "average"])
def test_two_runs_have_the_same_bits(op):
    per_rank = vectors([(100_003,), (17,)], DTYPES["float32"], 3)
    first, second = simulate(per_rank, op), simulate(per_rank, op)
    assert [a.tobytes() for a in first[0]] == [a.tobytes() for a in second[0]]


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_has_the_bits_of_the_host(dtype, op):
    # Without sums of products, nothing depends on an order.
    per_rank = vectors([(5003,), (64, 3)], dtype, 4)
    on_host = core.simulate(per_rank, op)[0]
    for mine, other in zip(simulate(per_rank, op)[0], on_host, strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("magnitudes", [(1e300, 1e-300), (1e-310, 1e-310), (1e306, 1.0)])
def test_float64_whose_squares_leave_its_range(magnitudes):
    a = np.array([3.0, -1, 2]) * magnitudes[0]
    b = np.array([1.0, 1, 2]) * magnitudes[1]
    (on_host,) = core.simulate([[a], [b]])[0]
    (on_device,) = simulate([[a], [b]])[0]
    np.testing.assert_allclose(on_device, on_host, rtol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_special_numbers(dtype):
    # Also where a vector's sum is not finite, the result is the host's.
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 65504, 6e-8, 1e-40])
    with np.errstate(over="ignore"):
        a = values.astype(dtype)
    b = a[::-1].copy()
    for op in ("adasum", "sum", "average"):
        on_host, on_device = core.simulate([[a], [b]], op)[0][0], simulate([[a], [b]], op)[0][0]
        np.testing.assert_array_equal(on_device.astype(float), on_host.astype(float))


@pytest.mark.parametrize("algorithm", ["rvh", "hierarchical"])
def test_tensors_pass_through_the_host_only_where_they_have_to(algorithm, way):
    copied = native.core_library().adasum_device_copied_bytes
    per_rank = vectors([(2_000_000,), (5,)], DTYPES["float32"], 4)
    before = copied()
    simulate(per_rank, algorithm=algorithm)
    # The tensors themselves come there and back once for each rank.
    tensors = sum(array.nbytes for arrays in per_rank for array in arrays)
    through_host = copied() - before - 2 * tensors
    if way == "direct":
        assert 0 < through_host < tensors // 100  # tables, and what the kernels find
    else:
        # Each rank sends and receives twice three quarters of them.
        assert 3 * tensors <= through_host < 3.1 * tensors


def test_ranks_that_differ(way):
    with pytest.raises(core.DisagreementError, match=r"float64\[3\]"):
        simulate([[np.ones(3)], [np.ones(4)]])


def test_a_way_that_is_unknown(monkeypatch):
    monkeypatch.setenv("TF_ADASUM_DEVICE_TRANSPORT", "pigeon")
    with pytest.raises(
        ValueError, match=r"must be auto, direct, nccl or staged\. Received: 'pigeon'"
    ):
        simulate([[np.ones(3)], [np.ones(3)]])
