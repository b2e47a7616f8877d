"""ResNet v1.5: a bottleneck strides in its 3x3 convolution, not in its first one."""

from __future__ import annotations

from collections.abc import Sequence

import keras

_MOMENTUM, _EPSILON = 0.9, 1e-5


def resnet(
    image_size: int,
    classes: int,
    *,
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 6, 3),
    weight_decay: float = 1e-4,
    channels: int = 3,
) -> keras.Model:
    """A residual network of bottleneck blocks; by default ResNet-50.

    Args:
        image_size: height and width of the images, float32 of shape (batch, height, width,
            channels).
        classes: number of logits, which are float32 whatever the dtype policy is.
        width: filters of the first stage; each later stage has twice as many.
        blocks: how many bottlenecks each stage has.
        weight_decay: half of it times the sum of squares is added to the loss, for all but batch
            normalization, as in MLPerf v0.5.
        channels: of the images.
    """
    decay = keras.regularizers.L2(weight_decay / 2) if weight_decay else None
    images = keras.Input((image_size, image_size, channels))
    x = _activated(_convolution(images, width, 7, 2, decay))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, repeats in enumerate(blocks):
        for block in range(repeats):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(x, width << stage, stride, block == 0, decay)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(classes, kernel_regularizer=decay, bias_regularizer=decay)(x)
    return keras.Model(images, keras.layers.Activation("linear", dtype="float32")(x))


def _bottleneck(
    x: keras.KerasTensor, filters: int, stride: int, project: bool, decay: object
) -> keras.KerasTensor:
    shortcut = x
    if project:
        shortcut = _normalized(_convolution(x, 4 * filters, 1, stride, decay))
    x = _activated(_convolution(x, filters, 1, 1, decay))
    x = _activated(_convolution(x, filters, 3, stride, decay))
    x = _normalized(_convolution(x, 4 * filters, 1, 1, decay))
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def _convolution(
    x: keras.KerasTensor, filters: int, size: int, stride: int, decay: object
) -> keras.KerasTensor:
    if stride > 1 and size > 1:
        # "same" would pad by an amount that depends on the image's size, and on one side only.
        x = keras.layers.ZeroPadding2D(size // 2)(x)
    return keras.layers.Conv2D(
        filters,
        size,
        stride,
        padding="valid" if stride > 1 else "same",
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(),
        kernel_regularizer=decay,
    )(x)


def _normalized(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.BatchNormalization(momentum=_MOMENTUM, epsilon=_EPSILON)(x)


def _activated(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.ReLU()(_normalized(x))
