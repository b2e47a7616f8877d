"""Arrays of every layout, dtype, number and size, with ranks as threads."""

import time

import numpy as np
import pytest
from cases import (
    DTYPES,
    OTHER_DTYPES,
    allowed_error,
    assert_close,
    expected,
    layouts,
    many_tensors,
)

from tf_adasum import core


@pytest.mark.parametrize("op", ["adasum", "sum", "average"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layouts(dtype, op):
    ours = layouts(dtype)
    # The other rank's lie in order, and are others.
    theirs = {
        name: np.roll(np.array(a, dtype), 1).reshape(a.shape) * dtype.type(0.5)
        for name, a in ours.items()
    }
    per_rank = [list(ours.values()), list(theirs.values())]
    before = [[(a.tobytes(), a.dtype) for a in arrays] for arrays in per_rank]
    results = core.simulate(per_rank, op)
    assert [[(a.tobytes(), a.dtype) for a in arrays] for arrays in per_rank] == before
    assert not ours["read-only"].flags.writeable
    for t, (name, want) in enumerate(zip(ours, expected(per_rank, op), strict=True)):
        vectors = [arrays[t] for arrays in per_rank]
        for result in results:
            got = result[t]
            assert_close(got, want, allowed_error(want, vectors, dtype), name)
            assert got.dtype == dtype and got.dtype.isnative and got.flags.writeable, name
            assert got.flags.c_contiguous and not np.may_share_memory(got, vectors[0]), name


@pytest.mark.parametrize("op", ["adasum", "sum", "average"])
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_other_dtypes_are_refused_by_name(dtype, op):
    name = str(dtype.descr) if dtype.names else dtype.name
    for shape in ((3,), (), (0,)):
        arrays = [np.ones(2, np.float32), np.zeros(shape, dtype)]
        with pytest.raises(ValueError) as error:
            core.simulate([arrays] * 3, op)
        assert str(error.value) == (
            "tensor 1 must be float16, bfloat16, float32 or float64 to be reduced. "
            f"Received: {name}"
        )


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", None], object),
        np.zeros(2, [("of", object)]),
        np.array(["text"], getattr(np.dtypes, "StringDType", lambda: object)()),
    ],
    ids=["objects", "objects in records", "strings of any length"],
)
def test_objects_are_refused_by_name(array):
    with pytest.raises(TypeError) as error:
        core.simulate([[array], [array]])
    assert str(error.value) == (
        "expected an array of numbers; a reduction takes float16, bfloat16, float32 or float64. "
        f"Received: dtype={array.dtype}"
    )


def test_ten_thousand_tensors():
    per_rank = many_tensors(3)
    wanted = expected(per_rank, "adasum")
    for threshold in (None, 10_000):
        started = time.monotonic()
        results = core.simulate(per_rank, fusion_threshold=threshold)
        seconds = time.monotonic() - started
        assert seconds < 20, f"{seconds} s"
        for t, want in enumerate(wanted):
            vectors = [arrays[t] for arrays in per_rank]
            got, *others = (result[t] for result in results)
            assert got.dtype == vectors[0].dtype
            assert all(other.tobytes() == got.tobytes() for other in others)
            # float64 is rounded several times at a level: in the factors, the products, the sum.
            allowed = allowed_error(want, vectors, got.dtype, levels=8)
            assert_close(got, want, allowed, f"tensor {t}")


@pytest.mark.heavy(gib=18)
def test_more_than_2_to_the_31_elements_and_4_gib():
    # Zeros but for a few places, so that the inputs take hardly any memory; the results, and the
    # two ranks' buffers, take 4 GiB each. The ranks' slices meet in the middle.
    size = (1 << 31) + 3
    middle = size // 2
    shared = [0, middle - 40, middle + 40, (1 << 31) - 1, 1 << 31, size - 1]
    own = [[1, 1 << 30, size - 2], [2, middle + 1, (1 << 31) - 2]]
    a, b = np.zeros(size, np.float16), np.zeros(size, np.float16)
    a[shared], b[shared] = 1, [1, 1, 1, -1, -1, 1]
    a[own[0]], b[own[1]] = 2, 2
    # a.b = 2, |a|^2 = |b|^2 = 6 + 3 * 4, so each keeps 1 - 2 / 36.
    keeps = 1 - 2 / 36
    places = np.array(shared + own[0] + own[1])
    assert len(set(places)) == 12
    want = np.array([2, 2, 2, 0, 0, 2] + [2] * 6) * keeps
    for (got,) in core.simulate([[a], [b]]):
        np.testing.assert_array_equal(got[places], want.astype(np.float16))
        got[places] = 0
        block = 1 << 26
        assert not any(got[at : at + block].any() for at in range(0, size, block))
