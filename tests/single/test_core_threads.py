"""The core with ranks as threads of this process, against the reference."""

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, SHAPES, allowed_error, assert_close, check_table, vectors

from tf_adasum import core, reference


@pytest.mark.parametrize("ranks", [*range(1, 10), 12, 16])
def test_equals_reference(ranks):
    def reduce(per_rank, op):
        results = core.simulate(per_rank, op)
        for result in results[1:]:
            for mine, first in zip(result, results[0], strict=True):
                assert mine.tobytes() == first.tobytes(), "the ranks' bits differ"
        return results[0]

    check_table(reduce, ranks)


def test_order_of_the_tree_for_odd_numbers_of_ranks():
    a = reference.adasum
    v = [r[0] for r in vectors([(31,)], DTYPES["float64"], 7)]
    orders = {
        3: a(a(v[0], v[1]), v[2]),
        5: a(a(a(v[0], v[1]), v[2]), a(v[3], v[4])),
        6: a(a(a(v[0], v[1]), a(v[2], v[3])), a(v[4], v[5])),
        7: a(a(a(v[0], v[1]), a(v[2], v[3])), a(a(v[4], v[5]), v[6])),
    }
    for ranks, want in orders.items():
        (got,) = core.simulate([[x] for x in v[:ranks]])[0]
        assert_close(got, want, allowed_error(want, v[:ranks], DTYPES["float64"]), f"{ranks} ranks")


def test_pinned_values():
    four = [[np.array(v, float)] for v in ([4, 5, 6], [7, 8, 9], [1, 0, 0], [0, 2, 0])]
    for ranks, want in {
        2: [5.6301, 6.5235, 7.4169],
        3: [3.69245787, 6.38143079, 7.25533476],
        4: [4.35568095, 4.3167871, 6.88103289],
    }.items():
        (got,) = core.simulate(four[:ranks])[0]
        np.testing.assert_allclose(got, want, atol=5e-5 if ranks == 2 else 5e-9)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_each_tensor_by_itself(dtype):
    a = [np.array([1, 0], dtype), np.array([1, 1], dtype)]
    b = [np.array([1, 0], dtype), np.array([1, -1], dtype)]
    for result in core.simulate([a, b]):
        np.testing.assert_array_equal(result[0].astype(float), [1, 0])
        np.testing.assert_array_equal(result[1].astype(float), [2, 0])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_zero_vectors_are_neutral(dtype):
    x = np.array([3, -1, 0.5], dtype)
    for per_rank in ([[x], [x * 0]], [[x * 0], [x]], [[x * 0], [x], [x * 0], [x * 0], [x * 0]]):
        np.testing.assert_array_equal(core.simulate(per_rank)[0][0], x)
    np.testing.assert_array_equal(core.simulate([[x * 0], [x * 0]])[0][0], x * 0)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(
    "dtype, magnitudes",
    [
        ("float32", (1e30, 1e-30)),
        ("float32", (1e30, 1e30)),
        ("float32", (1e-30, 1e-30)),
        ("float32", (1e-44, 1e38)),
        ("float64", (1e300, 1e-300)),
        ("float64", (1e-310, 1e-310)),
        ("float64", (1e306, 1.0)),
        ("float16", (300.0, 250.0)),  # squares above 65504, its largest number
        ("float16", (6e-8, 1.0)),
        ("bfloat16", (1e38, 1e-38)),
    ],
)
def test_range_of_the_squares_does_not_matter(dtype, magnitudes, ranks):
    rng = np.random.default_rng(1)
    per_rank = [
        [(rng.uniform(0.3, 1, size=37) * magnitudes[r % 2]).astype(DTYPES[dtype])]
        for r in range(ranks)
    ]
    vectors_of_ranks = [arrays[0] for arrays in per_rank]
    want = reference.tree(vectors_of_ranks)
    (got,) = core.simulate(per_rank)[0]
    # Scaled, since the squares of the norms would be out of range here too.
    unit = np.abs(want).max()
    scaled = [v.astype(np.float64) / unit for v in vectors_of_ranks]
    allowed = allowed_error(want / unit, scaled, DTYPES[dtype])
    # A denormal number has an absolute error, of half the smallest one at each level.
    tiniest = float(ml_dtypes.finfo(DTYPES[dtype]).smallest_subnormal)
    allowed += 4 * tiniest / unit * np.sqrt(want.size)
    assert_close(got.astype(np.float64) / unit, want / unit, allowed, f"{dtype} {magnitudes}")


def test_nonfinite_values_reach_every_rank():
    bad, good = np.array([1.0, np.nan], np.float32), np.array([1.0, 2.0], np.float32)
    for result in core.simulate([[good], [bad], [good]]):
        assert np.isnan(result[0]).any()


def test_views_and_byte_orders():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x.T, x[::2, ::-1], x.astype(">f4"), np.asfortranarray(x)):
        result = core.simulate([[view], [view]], "sum")[0][0]
        np.testing.assert_array_equal(result, 2 * np.ascontiguousarray(view))
        assert result.dtype == np.float32 and result.dtype.isnative


def test_several_dtypes_in_one_call():
    per_rank = [
        [array for dtype in DTYPES.values() for array in vectors([(9,), (2, 2)], dtype, 3)[rank]]
        for rank in range(3)
    ]
    # Mixed up, so that neighbours in the call are not neighbours in a buffer.
    order = np.random.default_rng(0).permutation(len(per_rank[0]))
    per_rank = [[arrays[i] for i in order] for arrays in per_rank]
    for t, got in enumerate(core.simulate(per_rank)[0]):
        vectors_of_t = [arrays[t] for arrays in per_rank]
        want = reference.tree(vectors_of_t)
        assert_close(got, want, allowed_error(want, vectors_of_t, got.dtype), f"tensor {t}")


def test_the_inputs_stay_as_they_are():
    per_rank = vectors(SHAPES["64 mixed"], DTYPES["float32"], 4)
    before = [[a.copy() for a in arrays] for arrays in per_rank]
    core.simulate(per_rank)
    for arrays, copies in zip(per_rank, before, strict=True):
        for array, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    "per_rank, message",
    [
        ([[np.zeros(3)], [np.zeros(4)], [np.zeros(3)]], "ranks 0, 2 .*float64.3.; rank 1 .*4"),
        ([[np.zeros(3)], [np.zeros(3, "f")]], "rank 0 .*float64.3.; rank 1 .*float32.3."),
        ([[np.zeros(6)], [np.zeros((2, 3))]], "rank 0 .*float64.6.; rank 1 .*float64.2, 3."),
        ([[np.zeros(1)] * 2, [np.zeros(1)]], "number of tensors: 2; .*number of tensors: 1"),
        ([[np.zeros(1)], [np.zeros(1, int)]], "rank 0 .*float64.1.; rank 1 .*int64.1."),
    ],
    ids=["shape", "dtype", "number of dimensions", "number of tensors", "one unknown dtype"],
)
def test_ranks_that_disagree(per_rank, message):
    with pytest.raises(core.DisagreementError, match=rf"(?s)ranks disagree.*{message}"):
        core.simulate(per_rank)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"`op` must be one of .*Received: op='max'"):
        core.simulate([[np.zeros(1)]], "max")
    for dtype in (int, complex, bool):
        with pytest.raises(ValueError, match=rf"to be reduced\. Received: {np.dtype(dtype).name}"):
            core.simulate([[np.zeros(2, dtype)]] * 3)
    with pytest.raises(TypeError, match="array of numbers"):
        core.simulate([[np.array(["a"], object)]])
    with pytest.raises(ValueError, match="at least one rank"):
        core.simulate([])


def test_no_tensors():
    assert core.simulate([[], []]) == [[], []]
