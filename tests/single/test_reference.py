"""The definition itself, against values worked out by hand or published."""

import numpy as np
import pytest

from tf_adasum import reference
from tf_adasum.reference import adasum

FOUR = [np.array(v, float) for v in ([4, 5, 6], [7, 8, 9], [1, 0, 0], [0, 2, 0])]


@pytest.mark.parametrize(
    "combined, want",
    [
        (reference.tree(FOUR[:1]), [4, 5, 6]),
        (reference.tree(FOUR[:2]), [5.6301, 6.5235, 7.4169]),
        (reference.tree(FOUR[:3]), [3.69245787, 6.38143079, 7.25533476]),
        (reference.tree(FOUR), [4.35568095, 4.3167871, 6.88103289]),
        (reference.ring(FOUR), [3.47223477, 4.81011837, 6.82261694]),
    ],
)
def test_pinned_values(combined, want):
    np.testing.assert_allclose(combined, want, atol=5e-5 if want[0] == 5.6301 else 5e-9)


def test_orthogonal_vectors_are_added_and_equal_ones_averaged():
    np.testing.assert_array_equal(adasum([1, 0], [0, 3]), [1, 3])
    np.testing.assert_array_equal(adasum([1, 2], [1, 2]), [1, 2])
    # Layers are combined by themselves; the two as one vector would give (1.6667, 0, 1.6667, 0).
    np.testing.assert_array_equal(adasum([1, 1], [1, -1]), [2, 0])
    np.testing.assert_allclose(adasum([1, 0, 1, 1], [1, 0, 1, -1]), [5 / 3, 0, 5 / 3, 0])


def test_opposite_vectors():
    # a.b / 2|a|^2 = -1/2, so both are stretched by 3/2 and cancel.
    np.testing.assert_array_equal(adasum([2, 4], [-2, -4]), [0, 0])


@pytest.mark.parametrize("other", [[0.0, 0.0], [3.0, -1.0]])
def test_zero_is_neutral(other):
    np.testing.assert_array_equal(adasum([0, 0], other), other)
    np.testing.assert_array_equal(adasum(other, [0, 0]), other)


def test_order_of_the_tree():
    a = adasum
    v = list(np.random.default_rng(0).normal(size=(7, 5)))
    orders = {
        3: a(a(v[0], v[1]), v[2]),
        4: a(a(v[0], v[1]), a(v[2], v[3])),
        5: a(a(a(v[0], v[1]), v[2]), a(v[3], v[4])),
        6: a(a(a(v[0], v[1]), a(v[2], v[3])), a(v[4], v[5])),
        7: a(a(a(v[0], v[1]), a(v[2], v[3])), a(a(v[4], v[5]), v[6])),
    }
    for ranks, want in orders.items():
        np.testing.assert_array_equal(reference.tree(v[:ranks]), want)


def test_range_of_float64():
    # a takes half of its projection on b away, b likewise; squares of either are out of range.
    np.testing.assert_allclose(
        adasum([1e300, 1e300], [1e-300, 2e-300]), [0.7e300, 0.4e300], rtol=1e-15
    )
    np.testing.assert_allclose(adasum([1e-300], [1e-300]), [1e-300], rtol=1e-15)


def test_orthogonality():
    assert reference.orthogonality([[1, 0], [0, 5]]) == 1
    assert reference.orthogonality([[1, 2]] * 4) == 0.25
    assert np.isnan(reference.orthogonality([[0.0], [0.0]]))


def test_errors():
    with pytest.raises(ValueError, match=r"same shape. Received: \(2,\) and \(3,\)"):
        adasum([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least one rank"):
        reference.tree([])
