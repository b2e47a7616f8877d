"""A small convolutional network on Fashion-MNIST, with Keras's `fit`.

    mpirun -np 4 python examples/keras_fashion_mnist.py

The data set is downloaded into ~/.keras/datasets the first time; `--data digits` takes instead the
handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import keras
import numpy as np

import tf_adasum as adasum

Images = tuple[np.ndarray, np.ndarray]
"""Images, float32 of shape (number, height, width, 1) in [0, 1], and their labels."""


def load_fashion_mnist() -> tuple[Images, Images]:
    if adasum.local_rank() == 0:
        keras.datasets.fashion_mnist.load_data()
    adasum.barrier()  # now the files are on every host
    (x, y), (x_test, y_test) = keras.datasets.fashion_mnist.load_data()
    return (_scaled(x, 255), y), (_scaled(x_test, 255), y_test)


def load_digits() -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = _scaled(digits.images[order], 16), digits.target[order]
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def _scaled(images: np.ndarray, white: int) -> np.ndarray:
    return (images[..., np.newaxis] / white).astype(np.float32)


def build_model(shape: Sequence[int]) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> tuple[keras.Model, keras.callbacks.History]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion_mnist", choices=["fashion_mnist", "digits"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--local-steps", type=int, default=1, help="steps between two syncs")
    parser.add_argument("--rate", type=float, default=0.03, help="learning rate")
    options = parser.parse_args(arguments)

    (x, y), test = load_digits() if options.data == "digits" else load_fashion_mnist()
    x, y = adasum.shard((x, y))  # this rank's part
    model = build_model(x.shape[1:])
    model.compile(
        optimizer=adasum.AdasumOptimizer(
            keras.optimizers.SGD(options.rate, momentum=0.9), local_steps=options.local_steps
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x,
        y,
        batch_size=options.batch,
        epochs=options.epochs,
        validation_data=adasum.shard(test),
        callbacks=adasum.callbacks.standard(),
        verbose=2,  # rank 0 prints, the metrics are those of all ranks' data
    )
    return model, history


if __name__ == "__main__":
    main()
