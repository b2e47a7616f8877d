"""Which rank owns which variable; a single process; options."""

import keras
import numpy as np
import pytest

import tf_adasum as adasum
from tf_adasum import partition


def test_the_largest_come_first_to_the_lane_that_has_least():
    shapes = [(10,), (40,), (), (20,), (30,), (1, 1)]
    # 40 | 30, then 20 to the second, 10 to the first; the scalar to the first.
    assert partition.owners_of(shapes, [4] * 6, 2) == [0, 0, 0, 1, 1, 1]
    # Bytes count, not elements.
    assert partition.owners_of([(10,), (15,), (8,)], [8, 4, 4], 2) == [0, 1, 1]
    assert partition.owners_of(shapes, [4] * 6, 1) == [0] * 6
    assert partition.owners_of([], [], 3) == []


@pytest.mark.parametrize("lanes", [2, 3, 4, 8])
def test_no_lane_has_more_than_its_share_and_the_largest(lanes):
    rng = np.random.default_rng(lanes)
    for _ in range(20):
        sizes = rng.integers(2, 1000, size=rng.integers(1, 60)).tolist()
        owner_of = partition.owners_of([(s,) for s in sizes], [4] * len(sizes), lanes)
        loads = np.bincount(owner_of, weights=sizes, minlength=lanes)
        assert loads.max() <= sum(sizes) / lanes + max(sizes)


def test_one_process_is_the_wrapped_optimizer():
    def weights(optimizer):
        variables = [keras.Variable(np.full(shape, 0.5), name="w") for shape in [(3,), (2, 2)]]
        optimizer.build(variables)
        for step in range(3):
            optimizer.apply([keras.ops.full(v.shape, 0.1 * (step + 1)) for v in variables])
        return [v.numpy() for v in variables]

    plain = weights(keras.optimizers.Adam(0.1))
    wrapped = weights(adasum.AdasumOptimizer(keras.optimizers.Adam(0.1), 2, partition_state=True))
    for a, b in zip(plain, wrapped, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"average_inner_state": True},
        {"wire_dtype": "float16"},
        {"overlap": True},
        {"algorithm": "rvh"},
        {"algorithm": "ring"},
    ],
)
def test_options_that_do_not_go_with_it(options):
    with pytest.raises(ValueError, match="partition_state"):
        adasum.AdasumOptimizer(keras.optimizers.SGD(0.1), partition_state=True, **options)


def test_config_keeps_it():
    optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.1), partition_state=True)
    again = adasum.AdasumOptimizer.from_config(optimizer.get_config())
    assert again.partition_state
