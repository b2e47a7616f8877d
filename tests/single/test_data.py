"""shard: every rank the same number of elements, and all elements used."""

import numpy as np
import pytest
import tensorflow as tf

from tf_adasum import core, shard


@pytest.fixture(params=[(12, 3), (13, 3), (2, 5), (7, 1)], ids=lambda p: f"{p[0]} on {p[1]}")
def parts(request, monkeypatch):
    """The length of the data, and a function that gives every rank's shard of it."""
    length, size = request.param
    monkeypatch.setattr(core, "size", lambda: size)

    def shards(data):
        for rank in range(size):
            monkeypatch.setattr(core, "rank", lambda rank=rank: rank)
            yield shard(data)

    return length, shards


def _check(length, parts):
    assert len({len(part) for part in parts}) == 1, (
        "the ranks would take different numbers of steps"
    )
    assert set(np.concatenate(parts).tolist()) == set(range(length)), "an element is lost"
    assert sum(len(part) for part in parts) < length + len(parts), "more is repeated than needed"


def test_arrays(parts):
    length, shards = parts
    x = np.arange(length)
    _check(length, list(shards(x)))
    _check(length, [part.numpy() for part in shards(tf.constant(x))])
    for xs, labels in shards((x, {"a": x * 2, "b": tf.constant(x)})):
        np.testing.assert_array_equal(xs * 2, labels["a"])
        np.testing.assert_array_equal(xs, labels["b"])


def test_datasets(parts):
    length, shards = parts
    dataset = tf.data.Dataset.range(length)
    pieces = list(shards(dataset))
    _check(length, [np.array(list(piece.as_numpy_iterator())) for piece in pieces])
    # Known, so that Keras shows how far it is.
    assert {int(piece.cardinality()) for piece in pieces} == {-(-length // len(pieces))}


def test_datasets_whose_length_nobody_knows(parts):
    length, shards = parts
    unknown = tf.data.Dataset.range(length).filter(lambda _: True)
    endless = tf.data.Dataset.range(length).repeat()
    seen = [list(piece.as_numpy_iterator()) for piece in shards(unknown)]
    assert sorted(x for piece in seen for x in piece) == list(range(length))
    for rank, piece in enumerate(shards(endless)):
        assert next(piece.as_numpy_iterator()) == rank % length


def test_bad_data(monkeypatch):
    monkeypatch.setattr(core, "size", lambda: 2)
    monkeypatch.setattr(core, "rank", lambda: 0)
    with pytest.raises(ValueError, match=r"one length, at least 1. Received: lengths \[2, 3\]"):
        shard((np.zeros(2), np.zeros(3)))
    with pytest.raises(ValueError, match=r"Received: lengths \[0\]"):
        shard(np.zeros((0, 4)))
    with pytest.raises(ValueError, match="Received: an empty dataset"):
        shard(tf.data.Dataset.range(0))
    with pytest.raises(ValueError, match=r"at least one dimension\. Received: int 3"):
        shard(3)
