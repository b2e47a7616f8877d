"""Numbers at the ends of a dtype's range, and none at all: against the reference, which is held
against exact arithmetic itself."""

import contextlib
import ctypes
import math
import platform
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, allowed_error, assert_close, expected, unit_roundoff, vectors

from tf_adasum import core, reference

ALGORITHMS = ["rvh", "ring", "hierarchical", "hierarchical_sum"]
MAX = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in DTYPES.items()}
TINY = {name: float(ml_dtypes.finfo(dtype).smallest_subnormal) for name, dtype in DTYPES.items()}

# What a host's ranks do to read each other's vectors, and what becomes of small calls.
WAYS = {
    "memory": {},
    "messages": {"TF_ADASUM_SHARED_MEMORY": "0", "TF_ADASUM_SMALL": "0"},
    "small": {"TF_ADASUM_SHARED_MEMORY": "0"},
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    for name, value in WAYS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


def on_all(per_rank, op="adasum", algorithm="rvh", **options):
    """The result, after a look that all ranks have the same bits."""
    results = core.simulate(per_rank, op, algorithm, **options)
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            assert mine.tobytes() == first.tobytes(), "the ranks' bits differ"
    return results[0]


def exact(a: np.ndarray, b: np.ndarray) -> list[Fraction]:
    return exact_of([Fraction(float(x)) for x in a], [Fraction(float(x)) for x in b])


def exact_of(a: list[Fraction], b: list[Fraction]) -> list[Fraction]:
    """The pair, without a rounding."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norm_a, norm_b = sum(x * x for x in a), sum(x * x for x in b)
    factor_a = 1 - dot / (2 * norm_a) if norm_a else 1
    factor_b = 1 - dot / (2 * norm_b) if norm_b else 1
    return [factor_a * x + factor_b * y for x, y in zip(a, b, strict=True)]


def assert_exact(got: np.ndarray, want: list[Fraction], dtype: str, what: str) -> None:
    """Holds each element to some roundings of the largest one, or one to a denormal number.

    What is out of the dtype's range has to be infinite.
    """
    largest = Fraction(MAX[dtype])
    eps = Fraction(8 * unit_roundoff(DTYPES[dtype]))
    allowed = eps * min(largest, max(map(abs, want))) + Fraction(TINY[dtype]) * 51 / 100
    for i, (g, w) in enumerate(zip(got.astype(np.float64), want, strict=True)):
        if abs(w) > largest * (1 + eps):
            assert g == (math.inf if w > 0 else -math.inf), f"{what}, element {i}: {g}"
        elif abs(w) < largest * (1 - eps):
            assert math.isfinite(g), f"{what}, element {i}: {g} instead of {float(w)}"
            assert abs(Fraction(g) - w) <= allowed, f"{what}, element {i}: {g}, not {float(w)}"


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_all_of_float64(way):
    rng = np.random.default_rng(0)
    magnitudes = [5e-324, 1e-310, 1e-300, 1e-150, 1.0, 1e150, 1e300, 1e306, 1e308, MAX["float64"]]
    for m in magnitudes:
        for n in magnitudes:
            a, b = rng.uniform(-1, 1, 19) * m, rng.uniform(-1, 1, 19) * n
            a[0], b[1] = m, n
            want = exact(a, b)
            assert_exact(reference.adasum(a, b), want, "float64", f"reference {m} {n}")
            (got,) = on_all([[a], [b]])
            assert_exact(got, want, "float64", f"core {m} {n}")


@pytest.mark.parametrize("op", ["adasum", "sum", "average"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers(dtype, algorithm, op):
    v = np.full(37, MAX[dtype], DTYPES[dtype])
    v[::3] *= -1
    left, right = v.copy(), v.copy()
    left[20:] = 0
    right[:20] = 0
    hosts = [0, 0, 1, 1]
    adds_up = op == "sum" or (op == "adasum" and algorithm == "hierarchical_sum")
    mean = op == "average" or (op == "adasum" and algorithm == "hierarchical")
    for ranks, want in {
        "equal": ([v, v, v, v], None if adds_up else v),
        "opposite": ([v, -v, v, -v], v * 0),
        "apart": (
            [left, right, v * 0, v * 0],
            v / 2 ** (1 if op == "adasum" else 2) if mean else v,
        ),
        "alone": ([v * 0, v * 0, v, v * 0], v / 2 ** (1 if op == "adasum" else 2) if mean else v),
    }.values():
        if want is not None:
            (got,) = on_all([[x] for x in ranks], op, algorithm, hosts=hosts)
            # A mean that is not taken in halves is rounded.
            allowed = 4 * unit_roundoff(DTYPES[dtype]) if mean else 0
            np.testing.assert_allclose(
                got.astype(float) / MAX[dtype], want.astype(float) / MAX[dtype], 0, allowed
            )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "dtype, magnitude",
    [
        ("float16", 3e4),
        ("float16", MAX["float16"]),
        ("bfloat16", 3e38),
        ("float32", 1e38),
        ("float32", 3e38),
        ("float64", 1e306),
        ("float64", 1e308),
    ],
)
def test_nothing_overflows_where_the_result_does_not(dtype, magnitude, algorithm):
    rng = np.random.default_rng(2)
    a, b = ((rng.uniform(-1, 1, 61) * magnitude).astype(DTYPES[dtype]) for _ in range(2))
    want = exact(a, b)
    for hosts in ([0, 0], [0, 1]):
        if algorithm in ("rvh", "ring") or hosts == [0, 1]:
            (got,) = on_all([[a], [b]], "adasum", algorithm, hosts=hosts)
            assert_exact(got, want, dtype, f"{hosts}")
    if magnitude != MAX[dtype]:
        assert sum(abs(w) <= MAX[dtype] for w in want) > 30, "nearly all are out of range"


def test_results_out_of_range_are_infinite():
    # Orthogonal, so they are added.
    a, b = np.array([3e38, 3e38], "f"), np.array([3e38, -3e38], "f")
    assert on_all([[a], [b]])[0].tolist() == [math.inf, 0]
    # So are those of a pair, whatever comes after it: every level of the tree keeps the dtype.
    assert np.isnan(on_all([[a], [b], [-a], [-b]])[0][0])
    assert on_all([[a], [b], [-a], [-b]], "average")[0].tolist() == [0, 0]


@contextlib.contextmanager
def flushing_denormals():
    """This thread as TensorFlow's are set, which take denormal numbers for zero."""
    libm = ctypes.CDLL("libm.so.6")
    saved, flushing = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    assert libm.fegetenv(saved) == libm.fegetenv(flushing) == 0
    flushing[7] |= 0x8040  # MXCSR: denormals are zero, flush to zero
    libm.fesetenv(flushing)
    try:
        assert np.float32(1e-40) * np.float32(1) == 0
        yield
        assert np.float32(1e-40) * np.float32(1) == 0, "the caller's setting is lost"
    finally:
        libm.fesetenv(saved)


DENORMALS = {
    "kept": contextlib.nullcontext,
    "flushed": pytest.param(
        flushing_denormals,
        marks=pytest.mark.skipif(
            platform.machine() != "x86_64", reason="fenv_t is known for x86-64 only"
        ),
    ),
}


@pytest.mark.parametrize("caller", DENORMALS.values(), ids=DENORMALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_denormal_numbers(dtype, way, caller):
    tiny = TINY[dtype]
    # 21: a remainder for every register.
    a = np.random.default_rng(1).integers(-9, 10, 21) * tiny
    b = np.roll(a, 1)
    even, odd = a.copy(), a.copy()
    even[1::2] = odd[::2] = 0
    ones = np.where(np.arange(21) % 3 == 0, 1.0, -2.0)

    def reduce(*ranks):
        per_rank = [[x.astype(DTYPES[dtype])] for x in ranks]
        with caller():
            results = core.simulate(per_rank)
        assert len({result[0].tobytes() for result in results}) == 1, "the ranks' bits differ"
        return results[0][0].astype(np.float64)

    for what, ranks, want in [
        ("alone", [a, 0 * a], a),
        ("last", [0 * a, 0 * a, a], a),
        ("orthogonal", [even, odd], a),
        ("equal", [a, a], a),
        ("opposite", [a, -a], 0 * a),
    ]:
        np.testing.assert_array_equal(reduce(*ranks) / tiny, want / tiny, what)
    assert_exact(reduce(a, b), exact(a, b), dtype, "both")
    assert_exact(reduce(a, ones), exact(a, ones), dtype, "with normal ones")
    assert_exact(reduce(ones, a), exact(ones, a), dtype, "after normal ones")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scales_far_apart_in_one_call(algorithm, way):
    # Layers do not disturb each other, nor do parts of one.
    rng = np.random.default_rng(4)
    hosts = [0, 0, 1]
    for dtype in ("float32", "bfloat16", "float64"):
        scales = [np.full(50, 1e30), np.full(21, 1e-30), np.r_[1e30, np.full(40, 1e-30), 1.0]]
        per_rank = [
            [(rng.normal(size=s.size) * s).astype(DTYPES[dtype]) for s in scales] for _ in hosts
        ]
        for t, want in enumerate(expected(per_rank, "adasum", algorithm, hosts)):
            of_t = [arrays[t] for arrays in per_rank]
            got = on_all(per_rank, "adasum", algorithm, hosts=hosts)[t]
            in_host = np.linalg.norm(np.sum(np.abs(np.asarray(of_t, float)), axis=0))
            allowed = allowed_error(want, of_t, DTYPES[dtype], 3, in_host)
            assert_close(got, want, allowed, f"{dtype}, tensor {t}")


@pytest.mark.parametrize(
    "op, algorithm, hosts",
    [
        ("adasum", "rvh", [0, 0, 0]),
        ("adasum", "ring", [0, 0, 1]),
        ("adasum", "hierarchical", [0, 0, 1]),
        ("adasum", "hierarchical", [0, 0, 0]),
        ("sum", "rvh", [0, 0, 0]),
        ("average", "rvh", [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_allreduce_makes_of_nonfinite_values(dtype, op, algorithm, hosts, way):
    def reduce(per_rank):
        return on_all(per_rank, op, algorithm, hosts=hosts, fusion_threshold=4096)

    per_rank = vectors([(5,), (70_001,), (), (33,)], DTYPES[dtype], 3)
    good = reduce(per_rank)
    # Adasum multiplies a whole tensor by what its dot products come to.
    by_element = op != "adasum" or (algorithm == "hierarchical" and hosts == [0, 0, 0])
    for bad in (math.nan, math.inf, -math.inf):
        for tensor, place in [(0, 0), (1, 0), (1, 35_000), (1, 70_000), (2, ()), (3, 32)]:
            with_bad = [list(arrays) for arrays in per_rank]
            with_bad[1][tensor] = np.array(per_rank[1][tensor])
            with_bad[1][tensor][place] = bad
            for t, got in enumerate(reduce(with_bad)):
                what = f"{bad} at {place} of tensor {tensor}, tensor {t}"
                want = good[t].astype(np.float64)
                if t == tensor and by_element:
                    want[place] = bad
                elif t == tensor:
                    want[...] = math.nan
                np.testing.assert_array_equal(got.astype(np.float64), want, what)


def test_opposite_infinities():
    a, b = np.array([math.inf, 1.0]), np.array([-math.inf, 1.0])
    for op in ("sum", "average"):
        got = on_all([[a], [b]], op)[0]
        assert np.isnan(got[0]) and got[1] == (2 if op == "sum" else 1)
    assert on_all([[a], [a]], "average")[0].tolist() == [math.inf, 1]
