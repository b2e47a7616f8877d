"""Numbers that are none, odd arrays, and many of them, on real ranks."""

import hashlib
import itertools
import math
import os
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
    unit_roundoff,
    vectors,
)
from ranks import on_ranks

from tf_adasum import core

ALGORITHMS = ["rvh", "ring", "hierarchical", "hierarchical_sum"]

# The second is a bucket of its own and worked on in pieces by each rank, whose remainders are no
# full registers.
SHAPES = [(5,), (40_001,), (), (33,)]
PLACES = [(0, 0), (1, 0), (1, 13_333), (1, 20_000), (1, 40_000), (2, ()), (3, 32)]


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(3, timeout=120)
def test_syncs_with_a_change_that_is_not_finite(shared_memory):
    from syncs import sync

    os.environ["TF_ADASUM_SHARED_MEMORY"] = str(int(shared_memory))
    os.environ["TF_ADASUM_SMALL"] = "0"
    rank, size = core.rank(), core.size()
    rng = np.random.default_rng(5)
    for dtype, algorithm in itertools.product(DTYPES.values(), ALGORITHMS):
        starts = [np.array(rng.normal(size=s)).astype(dtype).reshape(s) for s in SHAPES]
        good = [
            [np.array(s + d).reshape(s.shape) for s, d in zip(starts, deltas, strict=True)]
            for deltas in vectors(SHAPES, dtype, size, seed=9)
        ]
        options = {"algorithm": algorithm, "fusion_threshold": 4096}
        for case, (tensor, place) in enumerate(PLACES):
            bad_rank = case % size
            bad = (math.nan, math.inf, -math.inf)[(case + ALGORITHMS.index(algorithm)) % 3]
            what = f"{dtype} {algorithm}, {bad} at {place} of tensor {tensor}"
            values = [v.copy() for v in good[rank]]
            if rank == bad_rank:
                values[tensor][place] = bad

            # Where it is an error, at once or in the end, nothing is written.
            before = [v.tobytes() for v in values]
            at_once = case % 2 == 0
            often = "" if at_once else ", the 3rd time in a row"
            message = f"NaN or infinity in tensor {tensor} of rank {bad_rank}{often}"
            skips = 0 if at_once or rank != bad_rank else 2
            with pytest.raises(ValueError, match=message):
                sync(values, starts, **options, raise_nonfinite=at_once, skips_in_a_row=skips)
            assert [v.tobytes() for v in values] == before, what

            synced = sync(values, starts, **options, skips_in_a_row=1)
            assert (synced.syncs, synced.skipped) == (1, rank == bad_rank), what
            _assert_equal_on_all_ranks(values)
            if rank != case % size:
                continue
            finite = [
                [(v.astype(float) - s) * (r != bad_rank) for v, s in zip(of, starts, strict=True)]
                for r, of in enumerate(good)
            ]
            for t, want in enumerate(expected(finite, "adasum", algorithm)):
                of_t = [arrays[t] for arrays in finite]
                end = starts[t].astype(float) + want
                largest = np.linalg.norm(np.sum(np.abs(of_t), axis=0).ravel())
                allowed = allowed_error(want, of_t, dtype, size, largest)
                allowed += 2 * unit_roundoff(dtype) * np.linalg.norm(end.ravel())
                assert_close(values[t], end, allowed, f"{what}, tensor {t}")


def _assert_equal_on_all_ranks(arrays):
    digest = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).digest()
    digests = core.allgather(np.frombuffer(digest, np.uint8).reshape(1, -1))
    assert all(row.tobytes() == digest for row in digests), "the ranks' bits differ"


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(3)
def test_several_ranks_without_a_finite_change(shared_memory):
    from syncs import sync

    # Without, so little is sent to all ranks at once.
    os.environ["TF_ADASUM_SHARED_MEMORY"] = str(int(shared_memory))
    start = [np.ones(2), np.ones(3)]
    value = [np.full(2, 3.0), np.full(3, 2.0)]
    rank = core.rank()
    if rank > 0:
        value[rank - 1][-1] = math.nan
    message = "in tensor 0 of rank 1, tensor 1 of rank 2$"
    with pytest.raises(ValueError, match=message):
        sync(value, start, raise_nonfinite=True)
    assert sync(value, start).skipped == (rank > 0)
    assert value[0].tolist() == [3, 3] and value[1].tolist() == [2, 2, 2]
    value[0][0] = math.inf
    assert sync(value, start).skipped
    assert value[0].tolist() == [1, 1] and value[1].tolist() == [1, 1, 1]


@on_ranks(3, timeout=120)
def test_odd_arrays():
    rank, size = core.rank(), core.size()
    for dtype in DTYPES.values():
        for op in ("adasum", "average"):
            # Each rank's in another order, which makes no difference.
            per_rank = [
                [a if r == rank else np.array(a, dtype) for a in layouts(dtype).values()]
                for r in range(size)
            ]
            mine = per_rank[rank]
            before = [a.tobytes() for a in mine]
            got = core.grouped_allreduce(mine, op)
            for array, result in zip(mine, got, strict=True):
                # Equal ones are their own mean.
                assert result.shape == array.shape and result.dtype == dtype
                np.testing.assert_allclose(
                    result.astype(float), array.astype(float), 4 * unit_roundoff(dtype)
                )
            assert [a.tobytes() for a in mine] == before
        for name, array in layouts(dtype).items():
            plain = np.array(array, dtype)
            before = array.tobytes()
            got = core.broadcast(array if rank == 1 else np.array(array) * dtype.type(0), 1)
            assert got.dtype == dtype and got.shape == array.shape, name
            assert got.tobytes() == plain.tobytes() and array.tobytes() == before, name
            if array.ndim > 0:
                got = core.allgather(array)
                assert got.dtype == dtype, name
                np.testing.assert_array_equal(got, np.concatenate([plain] * size), name)

    for dtype in OTHER_DTYPES:
        array = np.frombuffer(bytes(range(1, 1 + 6 * dtype.itemsize)), np.uint8)
        if dtype.kind == "b":
            array = array % 2
        array = array.view(dtype).reshape(2, 3)[:, ::-1]
        for op in ("adasum", "sum"):
            with pytest.raises(ValueError, match=r"tensor 0 must be float16, .* Received: "):
                core.allreduce(array, op)
        got = core.broadcast(array if rank == 0 else np.zeros((2, 3), dtype))
        assert got.tobytes() == array.tobytes() and got.dtype == dtype
        gathered = core.allgather(array[: rank % 2 + 1])
        parts = [array[: r % 2 + 1].tobytes() for r in range(size)]
        assert gathered.tobytes() == b"".join(parts) and gathered.dtype == dtype
    for call in (core.allreduce, core.broadcast, core.allgather):
        with pytest.raises(TypeError, match=r"array of numbers; .* Received: dtype=object"):
            call(np.array([None]))


@on_ranks(3)
def test_ten_thousand_tensors():
    from syncs import sync

    rank, size = core.rank(), core.size()
    per_rank = many_tensors(size)
    zeros = [np.zeros_like(array) for array in per_rank[rank]]
    synced = [np.array(array) for array in per_rank[rank]]
    core.barrier()
    started = time.monotonic()
    reduced = core.grouped_allreduce(per_rank[rank])
    told = sync(synced, zeros)
    seconds = time.monotonic() - started
    assert seconds < 30, f"{seconds} s"
    assert told.syncs == 1 and len(told.orthogonality) == len(synced)
    for got in (reduced, synced):
        for t in range(rank, len(got), size):
            of_t = [arrays[t] for arrays in per_rank]
            (want,) = expected([[a] for a in of_t], "adasum")
            assert_close(got[t], want, allowed_error(want, of_t, got[t].dtype, 8), f"tensor {t}")
        _assert_equal_on_all_ranks(got)
