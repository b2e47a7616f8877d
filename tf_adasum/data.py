"""Giving each rank its part of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_adasum import collectives, core


def shard(data: Any) -> Any:
    """This rank's part of the data: every size()-th element, starting with the rank()-th.

    All ranks get the same number of elements, so that they take the same number of steps: where
    the number is no multiple of size(), the first elements are used once more to fill it up. On one
    rank the data comes back as it is.

    Args:
        data: a `tf.data.Dataset`, whose elements are dealt out as they are, batches if it is
            batched; or arrays or tensors of one length, as in `x` or `(x, y)`, nested in tuples,
            lists and dicts. Shard a dataset before it is shuffled: a shuffle is different on each
            rank, so a later shard would take some examples twice and others never.

    Returns:
        The same structure. A dataset of unknown cardinality is not filled up: its ranks may differ
        by one element. Where MPI is fault tolerant (`mpirun --with-ft ulfm`), a dataset is dealt
        out among the ranks that live, from the element on that a rank is at when it gets to know;
        its cardinality is then unknown. Arrays are not: what was a dead rank's part is left out
        until they are sharded again.

    Raises:
        ValueError: if there are no elements, or arrays differ in length.
    """
    if core.size() == 1:
        return data
    if isinstance(data, tf.data.Dataset) and core.is_fault_tolerant():
        return _shard_among_the_living(data)
    if isinstance(data, tf.data.Dataset):
        return _shard_dataset(data, core.rank(), core.size())
    lengths = {_length(array) for array in tf.nest.flatten(data)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "`data` must be a tf.data.Dataset or arrays of one length, at least 1. "
            f"Received: lengths {sorted(lengths)}"
        )
    indices = _indices(lengths.pop(), core.rank(), core.size())
    return tf.nest.map_structure(lambda array: _take(array, indices), data)


def _length(array: Any) -> int:
    if getattr(array, "shape", None) is None or len(array.shape) == 0:
        raise ValueError(
            "`data` must be a tf.data.Dataset or arrays with at least one dimension. "
            f"Received: {type(array).__name__} {array!r}"
        )
    return int(array.shape[0])


def _indices(length: int, rank: int, size: int) -> np.ndarray:
    each = -(-length // size)
    return (rank + size * np.arange(each)) % length


def _take(array: Any, indices: np.ndarray) -> Any:
    return tf.gather(array, indices) if isinstance(array, tf.Tensor) else array[indices]


def _shard_dataset(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    cardinality = _cardinality(dataset)
    if cardinality > 0 and cardinality % size:
        dataset = dataset.repeat().take(-(-cardinality // size) * size)
    return dataset.shard(size, rank)


def _shard_among_the_living(dataset: tf.data.Dataset) -> tf.data.Dataset:
    cardinality = _cardinality(dataset)
    place = collectives.ops().adasum_place

    def is_in_epoch(index: tf.Tensor, *_: Any) -> tf.Tensor:
        size = place().size
        return index < -(-cardinality // size) * size

    def is_mine(index: tf.Tensor, *_: Any) -> tf.Tensor:
        now = place()
        return tf.equal(index % now.size, now.rank)

    if cardinality > 0:
        numbered = dataset.repeat().enumerate().take_while(is_in_epoch)
    else:
        numbered = dataset.enumerate()
    return numbered.filter(is_mine).map(lambda _, element: element)


def _cardinality(dataset: tf.data.Dataset) -> int:
    cardinality = int(dataset.cardinality())
    if cardinality == 0:
        raise ValueError("`data` must have at least one element. Received: an empty dataset")
    return cardinality
