"""The algorithms over MPI: buffers that are used again and again, memory that is shared or not."""

import os
import resource

import numpy as np
import pytest
from cases import DTYPES, allowed_error, assert_close, check_table, expected
from ranks import on_ranks

from tf_adasum import core, native

ALGORITHMS = ["rvh", "ring", "hierarchical", "hierarchical_sum"]


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(2, 3, 4, timeout=120)
def test_equals_reference(shared_memory):
    _share_memory(shared_memory)
    for algorithm in ALGORITHMS:
        check_table(
            lambda per_rank, op, algorithm=algorithm: core.grouped_allreduce(
                per_rank[core.rank()], op, algorithm=algorithm
            ),
            core.size(),
            algorithm,
            shapes_names=["64 mixed", "fewer elements than ranks"],
            dtypes=["float32", "bfloat16"],
            ops=["adasum", "average"],
        )


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(2, 3, 5, timeout=120)
def test_many_calls_in_a_row(shared_memory):
    # The fusion buffer is that of the call before, whose reader may still be at it: in the next
    # call tensors, buckets and places in the buffer are others.
    _share_memory(shared_memory)
    rng = np.random.default_rng(7)
    rank, size = core.rank(), core.size()
    for call in range(150):
        dtype = DTYPES[rng.choice(list(DTYPES))]
        shapes = [(int(n),) for n in rng.integers(0, 3000, size=rng.integers(0, 9))]
        per_rank = [[rng.normal(size=s).astype(dtype) for s in shapes] for _ in range(size)]
        op = str(rng.choice(["adasum", "sum", "average"]))
        algorithm = str(rng.choice(ALGORITHMS))
        threshold = int(rng.choice([0, 1000, 10_000, 1 << 20]))
        got = core.grouped_allreduce(
            per_rank[rank], op, algorithm=algorithm, fusion_threshold=threshold
        )
        for t, want in enumerate(expected(per_rank, op, algorithm)):
            of_t = [arrays[t] for arrays in per_rank]
            largest = np.linalg.norm(np.sum(np.abs(np.asarray(of_t, float)), axis=0))
            what = f"call {call}, tensor {t}, {dtype}, {op}, {algorithm}, {threshold}"
            assert_close(got[t], want, allowed_error(want, of_t, dtype, size, largest), what)


@on_ranks(3)
def test_usable_after_a_disagreement():
    rank = core.rank()
    good = np.arange(40_000, dtype=np.float32) + 1
    for attempt in range(4):
        with pytest.raises(core.DisagreementError, match=r"algorithm: r(ing|vh)"):
            core.allreduce(good, algorithm="ring" if rank == 1 else "rvh")
        with pytest.raises(core.DisagreementError, match=r"fusion threshold: 1\d\d bytes"):
            core.allreduce(good, fusion_threshold=100 + 10 * rank)
        with pytest.raises(core.DisagreementError, match="float32"):
            core.allreduce(good[: 40_000 - (rank == 2)])
        # Equal vectors are their own mean, whatever was left in the buffer.
        np.testing.assert_allclose(core.allreduce(good * (attempt + 1)), good * (attempt + 1))


@on_ranks(2, fresh=True)
def test_the_buffer_is_bounded_by_the_threshold():
    megabyte = 1 << 20
    arrays = [np.full(megabyte // 4, 1.0 + core.rank(), np.float32) for _ in range(128)]
    core.grouped_allreduce(arrays[:1], fusion_threshold=megabyte)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = core.grouped_allreduce(arrays, fusion_threshold=megabyte)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    # Equal directions: the mean.
    assert all((r == 1.5).all() for r in results)
    # Two buckets of this rank, two of the other's, and what the allocator rounds up to.
    assert grown < (128 + 16) * megabyte, f"{grown / megabyte} MiB for 128 MiB of results"


@on_ranks(4)
def test_the_optimizer_uses_the_algorithm():
    import keras
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import reference

    deltas = np.random.default_rng(3).normal(size=(4, 6))
    for algorithm, combine in {
        None: reference.tree,
        "rvh": reference.tree,
        "ring": reference.ring,
        "hierarchical": lambda v: np.mean(v, axis=0),
        "hierarchical_sum": lambda v: np.sum(v, axis=0),
    }.items():
        for make in (keras.optimizers.SGD, tf.compat.v1.train.GradientDescentOptimizer):
            optimizer = adasum.DistributedOptimizer(make(1.0), algorithm=algorithm)
            kind = keras.Variable if make is keras.optimizers.SGD else tf.Variable
            variable = kind(np.zeros(6, "float32"))
            gradient = tf.constant(-deltas[core.rank()], tf.float32)
            optimizer.apply_gradients([(gradient, variable)])
            np.testing.assert_allclose(variable.numpy(), combine(deltas), atol=1e-5)


@on_ranks(2)
def test_shared_memory_is_used_here():
    core.init()
    assert native.core_library().adasum_shares_memory() == 1


def _share_memory(wanted):
    os.environ["TF_ADASUM_SHARED_MEMORY"] = "1" if wanted else "0"
    os.environ["TF_ADASUM_SMALL"] = "0"
    core.init()
    assert native.core_library().adasum_shares_memory() == int(wanted)
