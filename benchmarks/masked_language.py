"""A small BERT, and a masked language model's data: text that every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

LENGTH = 8
"""Bytes in a sequence. One is hidden in each."""
MASK = 256
VOCABULARY = 257


def data(number: int) -> tuple[np.ndarray, np.ndarray]:
    """So many sequences of the sources of Python's standard library.

    Its modules, in the order of their names, are one text, which is cut into sequences; they are
    shuffled, always in the same way. The first ones are the same whatever the number.

    Returns:
        Inputs, int32 of shape (number, LENGTH): bytes, and MASK where one is hidden. And the bytes
        that are hidden.

    Raises:
        ValueError: where the library has not as much text.
    """
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    there = len(text) // LENGTH
    if there < number:
        raise ValueError(f"Python's library has {there} sequences. Needed: {number}")
    rng = np.random.default_rng(0)
    chosen = rng.permutation(there)[:number]
    sequences = np.frombuffer(text, np.uint8, there * LENGTH).reshape(there, LENGTH)
    inputs = sequences[chosen].astype(np.int32)
    hidden = np.arange(number), rng.integers(0, LENGTH, number)
    targets = inputs[hidden]
    inputs[hidden] = MASK
    return inputs, targets


def loss(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean over the hidden bytes of the cross-entropy, in nats."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))


class Embeddings(keras.layers.Layer):
    """Learned vectors: the sum of a byte's and its position's.

    The former by a product with ones and zeros, which makes the gradient dense. Of a sparse one, in
    which a byte has as many rows as times it occurs, Keras's Adam would add up the rows' squares,
    and not square their sum.
    """

    def __init__(self, width: int, name: str):
        super().__init__(name=name)
        self.width = width

    def build(self, shape: Sequence[int]) -> None:
        self.bytes = self.add_weight(
            shape=(VOCABULARY, self.width), initializer="uniform", name="bytes"
        )
        self.positions = self.add_weight(
            shape=(LENGTH, self.width), initializer="uniform", name="positions"
        )

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        return tf.one_hot(tokens, VOCABULARY) @ self.bytes + self.positions


class AtMask(keras.layers.Layer):
    """Of each sequence the vector at the hidden byte."""

    def call(self, tokens: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, tf.argmax(tokens, axis=1), axis=1, batch_dims=1)


def model(width: int = 32, blocks: int = 1) -> keras.Model:
    """A BERT whose tokens are bytes: of each sequence the logits of the hidden one.

    As in BERT a layer normalization comes after each sum, and not before each part.
    """
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.LayerNormalization(name="embeddings_norm")(Embeddings(width, "embeddings")(tokens))
    for block in range(blocks):
        name = f"block{block}_{{}}".format
        heard = layers.MultiHeadAttention(4, width // 4, name=name("attention"))(x, x)
        x = layers.LayerNormalization(name=name("attention_norm"))(layers.Add()([x, heard]))
        thought = layers.Dense(4 * width, "gelu", name=name("dense1"))(x)
        thought = layers.Dense(width, name=name("dense2"))(thought)
        x = layers.LayerNormalization(name=name("dense_norm"))(layers.Add()([x, thought]))
    x = layers.Dense(width, "gelu", name="head")(AtMask()(tokens, x))
    x = layers.LayerNormalization(name="head_norm")(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x))
