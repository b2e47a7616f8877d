"""The core over MPI, against the reference, and against the same code with ranks as threads."""

import numpy as np
import pytest
from cases import DTYPES, SHAPES, check_table, vectors
from ranks import on_ranks

from tf_adasum import core


@on_ranks(*range(1, 9), timeout=120)
def test_equals_reference():
    def reduce(per_rank, op):
        result = core.grouped_allreduce(per_rank[core.rank()], op)
        mine = np.concatenate([array.reshape(-1).view(np.uint8) for array in result])
        of_all = core.allgather(mine[np.newaxis])
        assert all(row.tobytes() == mine.tobytes() for row in of_all), "the ranks' bits differ"
        return result

    check_table(reduce, core.size())


@on_ranks(3, 4)
def test_threads_and_processes_give_the_same_bits():
    for dtype in DTYPES.values():
        per_rank = vectors(SHAPES["64 mixed"], dtype, core.size(), seed=3)
        mine = core.grouped_allreduce(per_rank[core.rank()])
        for real, simulated in zip(mine, core.simulate(per_rank)[core.rank()], strict=True):
            assert real.tobytes() == simulated.tobytes()


@on_ranks(3)
def test_moving_arrays():
    rank, size = core.rank(), core.size()
    for dtype in ("int64", "bool", "complex64", "uint8", "float32"):
        array = (np.arange(6).reshape(2, 3) + rank).astype(dtype)
        for root in range(size):
            want = (np.arange(6).reshape(2, 3) + root).astype(dtype)
            np.testing.assert_array_equal(core.broadcast(array, root), want)
    rows = core.allgather(np.full((rank, 2), rank, np.int32))
    np.testing.assert_array_equal(rows, [[1, 1], [2, 2], [2, 2]])
    assert core.allgather(np.zeros((0, 5))).shape == (0, 5)
    assert core.broadcast(np.float64(rank), 2) == 2
    core.barrier()


@on_ranks(2)
def test_a_message_of_more_than_one_chunk():
    # MPI counts bytes in int; the transport cuts messages into pieces of 2^30 bytes.
    array = np.zeros((1 << 30) + 7, np.uint8)
    array[-1] = array[1 << 30] = array[0] = 3 + core.rank()
    got = core.broadcast(array, 1)
    assert got[-1] == got[1 << 30] == got[0] == 4 and np.count_nonzero(got) == 3


@on_ranks(4)
def test_topology():
    assert sorted(core.allgather(np.array([core.rank()]))) == [0, 1, 2, 3]
    assert (core.local_rank(), core.local_size()) == (core.rank(), 4)
    assert (core.cross_rank(), core.cross_size()) == (0, 1)


@on_ranks(4, fresh=True)
def test_init_with_a_communicator():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, -world.rank)
    core.init(half)
    assert (core.rank(), core.size()) == (half.rank, 2)
    total = core.allreduce(np.array([float(world.rank)]), "sum")
    assert total == (2 if world.rank % 2 == 0 else 4)
    with pytest.raises(RuntimeError, match="already initialized"):
        core.init(world)
    core.shutdown()
    assert not core.is_initialized()
    core.init(MPI.COMM_SELF)
    assert (core.rank(), core.size()) == (0, 1)
    core.shutdown()
    # Back to all processes, implicitly.
    assert core.size() == 4
    with pytest.raises(TypeError, match=r"mpi4py\.MPI.Intracomm. Received: 'world'"):
        core.init("world")


@on_ranks(2, fresh=True)
def test_the_users_messages_do_not_meet_ours():
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD)
    other = 1 - MPI.COMM_WORLD.rank
    request = MPI.COMM_WORLD.isend("theirs", other, tag=0)
    assert core.allreduce(np.ones(3), "sum").tolist() == [2, 2, 2]
    assert MPI.COMM_WORLD.recv(source=other, tag=0) == "theirs"
    request.wait()
