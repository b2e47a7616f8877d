"""Tensors on a device, emulated, over MPI, which cannot read it: so all goes through the host."""

import os

import numpy as np
import pytest
from cases import check_table
from ranks import on_ranks

from tf_adasum import core


@on_ranks(2, 3, 4)
def test_equals_reference():
    import devices

    def reduce(per_rank, op):
        result = devices.allreduce(per_rank[core.rank()], op)
        mine = np.concatenate([array.reshape(-1).view(np.uint8) for array in result])
        of_all = core.allgather(mine[np.newaxis])
        assert all(row.tobytes() == mine.tobytes() for row in of_all), "the ranks' bits differ"
        return result

    check_table(reduce, core.size(), shapes_names=["odd", "several with empty ones", "64 mixed"])


@on_ranks(3)
def test_many_pieces_and_buckets():
    import devices
    from cases import DTYPES, allowed_error, assert_close, expected, vectors

    shapes = [(3_000_001,), (5,), (700_000,)]
    per_rank = vectors(shapes, DTYPES["float32"], 3)
    for threshold in (None, 1 << 20):
        results = devices.allreduce(per_rank[core.rank()], fusion_threshold=threshold)
        for t, want in enumerate(expected(per_rank, "adasum")):
            of_t = [arrays[t] for arrays in per_rank]
            allowed = allowed_error(want, of_t, DTYPES["float32"])
            assert_close(results[t], want, allowed, f"tensor {t}, {threshold}")


@on_ranks(3)
def test_what_goes_by_way_of_the_host():
    import devices

    rank = core.rank()
    for dtype in ("int32", "float16", "bool"):
        of_1 = (np.arange(6).reshape(2, 3) + 1).astype(dtype)
        got = devices.broadcast((np.arange(6).reshape(2, 3) + rank).astype(dtype), 1)
        np.testing.assert_array_equal(got, of_1)
    rows = devices.allgather(np.full((rank, 2), rank, np.float32))
    np.testing.assert_array_equal(rows, [[1, 1], [2, 2], [2, 2]])


@on_ranks(2)
def test_ranks_whose_tensors_are_elsewhere():
    import devices

    call = devices.allreduce if core.rank() == 1 else core.grouped_allreduce
    message = "tensors in memory of: (host|emulated device)"
    for _ in range(2):
        with pytest.raises(core.DisagreementError, match=message):
            call([np.ones(100)], fusion_threshold=4096)
    # And go on.
    np.testing.assert_array_equal(devices.allreduce([np.ones(2)], "sum")[0], [2, 2])
    np.testing.assert_array_equal(core.grouped_allreduce([np.ones(2)], "sum")[0], [2, 2])


@on_ranks(3, fresh=True)
def test_ways_that_are_not_possible():
    import devices

    os.environ["TF_ADASUM_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"

    variable, one = "TF_ADASUM_DEVICE_TRANSPORT", [np.ones(100)]
    if core.rank() == 1:
        os.environ[variable] = "direct"
    message = f"{variable}=direct is not possible. rank 0: the message layer does not read"
    with pytest.raises(ValueError, match=message):
        devices.allreduce(one)
    if core.rank() == 2:
        os.environ[variable] = "staged"
    message = f"{variable} must be the same on all ranks. Received: direct, and staged on rank 2"
    with pytest.raises(ValueError, match=message):
        devices.allreduce(one)
    os.environ[variable] = "nccl"
    message = f"{variable}=nccl is not possible. rank 0: /nowhere/libnccl.so.2: cannot open"
    with pytest.raises(ValueError, match=message):
        devices.allreduce(one)
    del os.environ[variable]
    np.testing.assert_array_equal(devices.allreduce([np.ones(2)], "sum")[0], [3, 3])
