"""A small masked language model like BERT, trained with LAMB on the sources of Python's library.

    mpirun -np 4 python examples/language_model.py

Its tokens are bytes. A seventh of each sequence is hidden, and the model learns to tell what was
there. In the paper's Table 3 this is BERT-Large on 64 GPUs.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_adasum as adasum

MASK = 256
VOCABULARY = 257
HIDDEN_PART = 1 / 7


def read_sequences(number: int, length: int) -> np.ndarray:
    """uint8 of shape (number, length): what comes first in the library's files, by their names."""
    text, needed = bytearray(), number * length
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= needed:
            return np.frombuffer(bytes(text[:needed]), np.uint8).reshape(number, length)
    raise ValueError(f"the library has {len(text)} bytes. Needed: {needed}")


def hide(sequence: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The sequence with a part of it masked, the whole, and how much each byte's loss counts.

    That is 0 where a byte can be seen; the mean over all bytes is then that over the hidden ones.
    """
    sequence = tf.cast(sequence, tf.int32)
    hidden = tf.random.stateless_uniform(tf.shape(sequence), seed) < HIDDEN_PART
    return tf.where(hidden, MASK, sequence), sequence, tf.cast(hidden, tf.float32) / HIDDEN_PART


@keras.saving.register_keras_serializable()
class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape: Sequence[int]) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform", name="vectors")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.vectors


def build_model(length: int, width: int, blocks: int) -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, width)(tokens))
    for _ in range(blocks):
        heard = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(heard, heard)])
        thought = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(thought)])
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def main(arguments: Sequence[str] | None = None) -> tuple[keras.Model, keras.callbacks.History]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=4)
    add("--sequences", type=int, default=8192, help="to train on; an eighth more are for tests")
    add("--length", type=int, default=64, help="bytes in a sequence")
    add("--batch", type=int, default=32, help="sequences a rank and step")
    add("--width", type=int, default=64, help="elements of the vector of a byte")
    add("--blocks", type=int, default=2, help="attention and dense layers, one after the other")
    add("--local-steps", type=int, default=4, help="steps between two syncs")
    add("--rate", type=float, default=0.01, help="highest learning rate")
    options = parser.parse_args(arguments)

    held_out = options.sequences // 8
    sequences = read_sequences(options.sequences + held_out, options.length)
    sequences = np.random.default_rng(0).permutation(sequences)
    data = tf.data.Dataset.from_tensor_slices(sequences)
    train = adasum.shard(data.skip(held_out)).shuffle(options.sequences)
    # Other parts are hidden in each epoch, but always the same ones in the tests.
    train = train.map(lambda s: hide(s, tf.random.uniform((2,), 0, 1 << 30, tf.int32)))
    test = data.take(held_out).enumerate()
    test = adasum.shard(test).map(lambda i, s: hide(s, tf.stack([i, 0])))

    steps = options.epochs * -(-options.sequences // (options.batch * adasum.size()))
    schedule = keras.optimizers.schedules.PolynomialDecay(options.rate, steps, 0.0)
    model = build_model(options.length, options.width, options.blocks)
    model.compile(
        optimizer=adasum.AdasumOptimizer(
            keras.optimizers.Lamb(schedule, weight_decay=0.01), local_steps=options.local_steps
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Of the hidden bytes only.
        weighted_metrics=["accuracy"],
    )
    history = model.fit(
        train.batch(options.batch),
        epochs=options.epochs,
        validation_data=test.batch(options.batch),
        callbacks=adasum.callbacks.standard(),
        verbose=2,
    )
    return model, history


if __name__ == "__main__":
    main()
