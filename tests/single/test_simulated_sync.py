"""Syncs of ranks that are threads of this process, against the reference."""

import numpy as np
import pytest

from tf_adasum import core, reference

SHAPES = [(5000,), (17, 23), (), (0,)]
HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the error of one rounding


def _weights(ranks, seed=0):
    """[rank][tensor], and the starts; changes have something in common."""
    rng = np.random.default_rng(seed)

    def noise(scale):
        return [np.asarray(scale * rng.normal(size=s), np.float32) for s in SHAPES]

    starts, shared = noise(1), noise(0.01)
    return [
        [np.asarray(s + c + n) for s, c, n in zip(starts, shared, noise(0.01), strict=True)]
        for _ in range(ranks)
    ], starts


def _same_on_all(of_ranks):
    for mine in of_ranks[1:]:
        for a, b in zip(mine, of_ranks[0], strict=True):
            assert a.tobytes() == b.tobytes(), "the ranks' bits differ"
    return of_ranks[0]


@pytest.mark.parametrize("op", ["adasum", "sum", "average"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_equals_reference(ranks, op):
    per_rank, starts = _weights(ranks)
    given = [[array.copy() for array in arrays] for arrays in [*per_rank, starts]]
    states = [[np.full(3, rank, np.float32)] for rank in range(ranks)]
    done = core.simulate_sync(per_rank, starts, op, states=states)
    for t, (start, got) in enumerate(zip(starts, _same_on_all(done.values), strict=True)):
        changes = [np.asarray(arrays[t] - start, np.float64) for arrays in per_rank]
        combine = {
            "adasum": reference.tree,
            "sum": lambda of: np.sum(of, 0),
            "average": lambda of: np.mean(of, 0),
        }[op]
        # The sum's last rounding is of the weight, which is up to 4.
        np.testing.assert_allclose(got, start + combine(changes), rtol=0, atol=ranks * 1e-6)
        if op == "adasum" and ranks > 1 and start.size:
            assert done.orthogonality[t] == pytest.approx(reference.orthogonality(changes), 1e-5)
    np.testing.assert_allclose(_same_on_all(done.states)[0], np.full(3, (ranks - 1) / 2))
    if op != "adasum" or ranks == 1:
        assert np.isnan(done.orthogonality).all()
    for before, now in zip(given, [*per_rank, starts], strict=True):
        for a, b in zip(before, now, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", HALF)
def test_a_wire_dtype_halves_the_bytes(dtype):
    ranks, rng = 4, np.random.default_rng(1)
    changes = [[rng.normal(scale=0.01, size=100_000).astype(np.float32)] for _ in range(ranks)]
    starts = [np.zeros(100_000, np.float32)]
    apart = {"hosts": range(ranks)}
    whole = core.simulate_sync(changes, starts, **apart)
    half = core.simulate_sync(changes, starts, wire_dtype=dtype, wire_scale=(6, 0), **apart)
    # Each rank sends its vector down and up the tree but for its own part: 3/4 twice.
    least = ranks * 2 * 0.75 * 400_000
    assert least <= whole.sent_bytes < 1.01 * least
    assert least / 2 <= half.sent_bytes < 1.01 * least / 2
    want = reference.tree([change[0] for change in changes])
    error = np.linalg.norm(_same_on_all(half.values)[0] - want)
    largest = sum(np.linalg.norm(change[0]) for change in changes)
    assert 1e-3 * HALF[dtype] * largest < error <= 4 * HALF[dtype] * largest
    assert half.wire_scale == (6, 1 if dtype == "float16" else 0)


def test_what_rounding_drops_comes_with_the_next_change():
    # Equal on all ranks, so Adasum is the mean. Of 1.001 bfloat16 keeps 1.
    change, syncs = np.float32(1.001), 100
    for feedback in (False, True):
        weights = [np.zeros(8, np.float32)]
        residuals = [[np.zeros(8, np.float32)]] * 2 if feedback else None
        for _ in range(syncs):
            done = core.simulate_sync(
                [[weights[0] + change]] * 2, weights, wire_dtype="bfloat16", residuals=residuals
            )
            weights, residuals = done.values[0], done.residuals
        error = abs(weights[0][0] - syncs * change)
        assert error < 0.01 if feedback else error > 0.05, (feedback, error)


def test_a_scale_at_which_a_change_overflows():
    change = np.full(1000, 0.01, np.float32)
    big = change.copy()
    big[7] = 100  # times 2^10 more than 65504
    done = core.simulate_sync(
        [[change], [big]], [np.zeros(1000, np.float32)], wire_dtype="float16", wire_scale=(10, 5)
    )
    assert done.wire_scale == (9, 1)
    assert np.linalg.norm(done.values[0][0] - reference.tree([change, big])) <= 0.2


def test_a_change_that_is_not_finite_counts_as_zero_twice():
    starts, good = [np.ones(10, np.float32)], [np.full(10, 3, np.float32)]
    bad = [np.array([np.nan] + [2] * 9, np.float32)]
    states = [[np.array([1.0])], [np.array([np.nan])]]
    skips = None
    for times in (1, 2):
        done = core.simulate_sync([good, bad], starts, states=states, skips_in_a_row=skips)
        skips = done.skips_in_a_row
        assert skips == [0, times]
        np.testing.assert_array_equal(done.values, [[good[0]]] * 2)
        np.testing.assert_array_equal(done.states, states)
    assert core.simulate_sync([good, good], starts, skips_in_a_row=skips).skips_in_a_row == [0, 0]
    with pytest.raises(ValueError, match=r"tensor 0 of rank 1, the 3rd time in a row"):
        core.simulate_sync([good, bad], starts, skips_in_a_row=skips)


def test_what_is_refused():
    one = [np.ones(3, np.float32)]
    with pytest.raises(ValueError, match="at least one rank"):
        core.simulate_sync([], one)
    with pytest.raises(ValueError, match="shapes and dtypes of `starts`"):
        core.simulate_sync([one, [np.ones(4, np.float32)]], one)
    with pytest.raises(ValueError, match="shapes of `starts`"):
        core.simulate_sync([one], one, wire_dtype="float16", residuals=[[np.ones(4, np.float32)]])
    with pytest.raises(ValueError, match="`wire_dtype` must be"):
        core.simulate_sync([one], one, wire_dtype="float64")
    for name in ("states", "residuals", "skips_in_a_row", "hosts"):
        with pytest.raises(ValueError, match=f"`{name}` must have one element for each of 2"):
            core.simulate_sync([one, one], one, **{name: [0]})
    with pytest.raises(core.DisagreementError, match="averaged state"):
        core.simulate_sync([one, one], one, states=[one, []])
