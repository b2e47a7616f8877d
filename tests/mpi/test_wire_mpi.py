"""Changes that are sent in half the bytes, over MPI, against the reference."""

import numpy as np
import pytest
import worker
from ranks import on_ranks

from tf_adasum import core, native, reference

HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the error of one rounding


def _changes(shapes, size, magnitude=0.01):
    rng = np.random.default_rng(3)
    shared = [rng.normal(size=shape) for shape in shapes]
    return [
        [np.asarray(magnitude * (s + rng.normal(size=s.shape)), np.float32) for s in shared]
        for _ in range(size)
    ]


@on_ranks(2, 3, 4)
def test_equals_reference_up_to_roundings():
    from syncs import sync

    rank, size = core.rank(), core.size()
    shapes = [(5000,), (17, 23), (), (0,), (1,)]
    changes = _changes(shapes, size)
    starts = [np.zeros(shape, np.float32) for shape in shapes]
    # float64 is not narrowed.
    wide = np.random.default_rng(4).normal(size=(size, 300))
    for dtype, unit in HALF.items():
        for threshold in (None, 4096):
            values = [np.asarray(c.copy()) for c in changes[rank]] + [wide[rank].copy()]
            done = sync(
                values,
                [*starts, np.zeros(300)],
                fusion_threshold=threshold,
                wire_dtype=dtype,
                wire_scale=(6, 0),
            )
            assert done.syncs == 1 and done.wire_scale == (6, 1 if dtype == "float16" else 0)
            for t in range(len(shapes)):
                of_t = [np.asarray(c[t], float) for c in changes]
                want = reference.tree(of_t)
                largest = sum(np.linalg.norm(c.ravel()) for c in of_t)
                error = np.linalg.norm((values[t] - want).ravel())
                assert error <= 4 * unit * largest, (dtype, t, error)
                # And it is narrow, or nothing would be sent in fewer bytes.
                if t == 0:
                    assert error > 1e-3 * unit * largest
            np.testing.assert_allclose(values[-1], reference.tree(list(wide)), rtol=1e-12)
            mine = np.concatenate([v.ravel().view(np.uint8) for v in values])
            assert len({row.tobytes() for row in core.allgather(mine[None])}) == 1


@on_ranks(2, 3)
def test_a_scale_at_which_a_change_overflows():
    from syncs import sync

    rank, size = core.rank(), core.size()
    # 100 times 2^10 is more than 65504; on one rank only.
    change = np.full(1000, 0.01, np.float32)
    if rank == size - 1:
        change[7] = 100
    for residuals in (None, [np.zeros(1000, np.float32)]):
        values, starts = [change.copy()], [np.zeros(1000, np.float32)]
        done = sync(values, starts, wire_dtype="float16", wire_scale=(10, 5), residuals=residuals)
        assert done.syncs == 1 and done.wire_scale == (9, 1)
        all_changes = [row.astype(float) for row in core.allgather(change[None])]
        want = reference.tree(all_changes)
        assert np.linalg.norm(values[0] - want) <= 4 * HALF["float16"] * 101


@on_ranks(2)
def test_a_scale_at_which_a_result_overflows():
    from syncs import sync

    # Orthogonal, so they add up: 40000 and 40000 in one element, at 2^0.
    change = np.array([40000, 40000 if core.rank() == 0 else -40000, 0], np.float32)
    values, starts = [change.copy()], [np.ones(3, np.float32)]
    values[0] += 1
    done = sync(values, starts, wire_dtype="float16", wire_scale=(0, 0))
    assert done.wire_scale == (-1, 1)
    np.testing.assert_allclose(values[0], [80001, 1, 1], rtol=2 * HALF["float16"])


@on_ranks(2)
def test_small_changes_that_a_fixed_scale_would_lose():
    from syncs import sync

    change = np.full(64, 1e-8 * (1 + core.rank()), np.float32)
    for exponent, expected in ((0, 0.0), (20, 1.5e-8)):
        values, starts = [change.copy()], [np.zeros(64, np.float32)]
        sync(values, starts, wire_dtype="float16", wire_scale=(exponent, 0))
        np.testing.assert_allclose(values[0], expected, rtol=1e-2)


@on_ranks(2)
def test_the_scale_grows_after_many_good_syncs():
    from syncs import sync

    scale = (3, 198)
    for want in ((3, 199), (4, 0), (4, 1)):
        values = [np.full(10, 0.5 + core.rank(), np.float32)]
        scale = sync(
            values, [np.zeros(10, np.float32)], wire_dtype="float16", wire_scale=scale
        ).wire_scale
        assert scale == want


@on_ranks(2)
def test_what_rounding_drops_comes_with_the_next_change():
    from syncs import sync

    # Equal on both ranks, so Adasum is the mean. bfloat16 has 8 digits: of 1 + 1/1000 the second
    # part is lost each time, unless it is kept.
    change, syncs = np.float32(1.001), 100
    for feedback in (False, True):
        weights, residual = np.zeros(8, np.float32), np.zeros(8, np.float32)
        for _ in range(syncs):
            values = [weights + change]
            sync(
                values,
                [weights],
                wire_dtype="bfloat16",
                residuals=[residual] if feedback else None,
            )
            weights = values[0]
        error = abs(weights[0] - syncs * change)
        assert error < 0.01 if feedback else error > 0.05, (feedback, error)
        assert (residual != 0).all() == feedback


@on_ranks(2)
def test_a_change_that_is_not_finite():
    from syncs import sync

    rank = core.rank()
    change = np.full(100, 0.5, np.float32)
    if rank == 1:
        change[3] = np.inf
    values, residuals = [change], [np.full(100, 0.25, np.float32)]
    done = sync(
        values,
        [np.zeros(100, np.float32)],
        wire_dtype="float16",
        wire_scale=(5, 0),
        residuals=residuals,
    )
    assert done.skipped == (rank == 1) and done.wire_scale == (5, 1)
    # The residual comes with the change; and stays where the change counts as zero.
    np.testing.assert_array_equal(values[0], np.full(100, 0.75, np.float32))
    np.testing.assert_array_equal(residuals[0], np.full(100, 0.0 if rank == 0 else 0.25))


@on_ranks(2)
def test_ranks_that_differ():
    from syncs import sync

    rank = core.rank()
    one = [np.ones(10, np.float32)]
    with pytest.raises(core.DisagreementError, match=r"wire dtype: (b?)float16, times 2\^0"):
        sync(one, one, wire_dtype=["float16", "bfloat16"][rank])
    with pytest.raises(core.DisagreementError, match=r"float16, times 2\^[34]"):
        sync(one, one, wire_dtype="float16", wire_scale=(3 + rank, 0))


@on_ranks(2)
def test_tensors_on_a_device_are_refused():
    import devices
    from syncs import sync

    one = [np.ones(10, np.float32)]
    with pytest.raises(ValueError, match="`wire_dtype` is for tensors in the host's memory"):
        sync(one, one, wire_dtype="float16", device=devices.EMULATED)
    core.barrier()


@on_ranks(2, fresh=True)
def test_half_the_bytes_are_sent():
    import os

    os.environ["TF_ADASUM_SHARED_MEMORY"] = "0"
    from syncs import sync

    def sent_by(**options):
        core.init()
        counted = native.core_library().adasum_sent_bytes
        before = counted()
        sync([np.ones(1_000_000, np.float32)], [np.zeros(1_000_000, np.float32)], **options)
        return counted() - before

    whole, half = sent_by(), sent_by(wire_dtype="float16")
    assert 4_000_000 <= whole < 4_100_000
    assert 2_000_000 <= half < 2_100_000


@pytest.mark.parametrize("wire_dtype, feedback", [("float16", True), ("bfloat16", False)])
@on_ranks(2)
def test_training_and_its_state(wire_dtype, feedback):
    import keras
    import tensorflow as tf

    import tf_adasum as adasum

    rank = adasum.rank()

    def train(compiled, **options):
        variable = keras.Variable(np.zeros((4, 3), "float32"))
        optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1), 2, **options)
        optimizer.build([variable])
        step = tf.function(lambda g: optimizer.apply([g], [variable]), jit_compile=compiled)
        rng = np.random.default_rng(rank)
        for _ in range(6):
            step(tf.constant(rng.normal(size=(4, 3)).astype("float32")))
        return variable.numpy(), optimizer

    want, _ = train(False)
    for compiled in worker.COMPILED:
        got, optimizer = train(compiled, wire_dtype=wire_dtype, error_feedback=feedback)
        np.testing.assert_allclose(got, want, atol=20 * HALF[wire_dtype] * np.abs(want).max())
        assert not np.array_equal(got, want)
        paths = " ".join(variable.path for variable in optimizer.variables)
        assert "wire_scale" in paths and ("residual" in paths) == feedback
        scale = next(v for v in optimizer.variables if v.path.endswith("wire_scale"))
        first = 10 if wire_dtype == "float16" else 0
        assert scale.numpy().tolist() == [first, 3 if wire_dtype == "float16" else 0]
    assert adasum.AdasumOptimizer.from_config(optimizer.get_config()).get_config() == (
        optimizer.get_config()
    )
