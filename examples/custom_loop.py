"""A training loop of one's own with GradientTape, on scikit-learn's handwritten digits.

mpirun -np 4 python examples/custom_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_adasum as adasum


def load() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Images and labels to train on, and those to test: this rank's part of each."""
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    data = tf.data.Dataset.from_tensor_slices((x, y))
    # Shuffled alike on all ranks before it is dealt out, and by each rank for itself after.
    data = data.shuffle(len(x), seed=0, reshuffle_each_iteration=False)
    train = adasum.shard(data.take(1440)).shuffle(1440)
    # Not `adasum.shard`, which would test some images twice so that all parts have one length.
    test = data.skip(1440).shard(adasum.size(), adasum.rank())
    return train, test


def main(arguments: Sequence[str] | None = None) -> tuple[keras.Model, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="images a rank and step")
    parser.add_argument("--local-steps", type=int, default=4, help="steps between two syncs")
    options = parser.parse_args(arguments)

    train, test = load()
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), local_steps=options.local_steps
    )
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def correct(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        hits = tf.argmax(model(x), axis=1) == tf.cast(y, tf.int64)
        return tf.reduce_sum(tf.cast(hits, tf.float32))

    accuracies = []
    for epoch in range(options.epochs):
        losses = [float(step(x, y)) for x, y in train.batch(options.batch)]
        # All ranks: here the last, shorter window ends, and all hold the same weights.
        optimizer.sync()
        own = [
            sum(float(correct(x, y)) for x, y in test.batch(64)),
            float(len(test)),
            np.mean(losses) / adasum.size(),
        ]
        hits, images, loss = adasum.allreduce(tf.constant(own, tf.float32), op=adasum.Sum).numpy()
        accuracies.append(float(hits / images))
        if adasum.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracies[-1]:.4f}")
    return model, accuracies


if __name__ == "__main__":
    main()
