"""ImageNet, in TFRecord shards or in one folder a class, and made-up images for a smoke run.

What a rank reads in an epoch follows from the seed, the epoch and the rank alone, so a training
that is started again goes on with the examples that it would have seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tensorflow as tf

import tf_adasum as adasum

# Of ImageNet's training images, for red, green and blue; in units of 1/255.
_CHANNEL_MEANS = (123.68, 116.78, 103.94)
_CROP_AREA, _CROP_RATIO = (0.05, 1.0), (0.75, 1.33)
# The shorter side of an image before the central crop, over the side of the crop.
_BEFORE_CROP = 256 / 224
_SHUFFLED_IMAGES = 10_000

_AUTOTUNE = tf.data.AUTOTUNE


class Source(Protocol):
    """Where (image, label) pairs come from: float32 (size, size, 3) and int64 scalars."""

    train_examples: int
    eval_examples: int
    classes: int

    def train(self, epoch: tf.Tensor) -> tf.data.Dataset:
        """This rank's part of an epoch, shuffled and augmented."""

    def evaluation(self) -> tf.data.Dataset:
        """This rank's part of the evaluation's examples; each of those is in one rank's part."""


def train_batches(
    source: Source, batch: int, first_epoch: int, epochs: int, steps: int
) -> tf.data.Dataset:
    """Batches of this rank for the epochs from `first_epoch` to `epochs`, `steps` for each.

    Parts of a dataset are of nearly the same length; a rank whose part is short sees some of its
    examples twice, so that all take the same number of steps.
    """

    def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        return source.train(epoch).repeat().batch(batch, drop_remainder=True).take(steps)

    return tf.data.Dataset.range(first_epoch, epochs).flat_map(of_epoch).prefetch(_AUTOTUNE)


def evaluation_batches(source: Source, batch: int) -> tf.data.Dataset:
    """All of this rank's part; the last batch may be smaller."""
    return source.evaluation().batch(batch).prefetch(_AUTOTUNE)


def open_folder(folder: Path, size: int, seed: int, train: int, evaluation: int) -> Source:
    """The source that a folder holds.

    Args:
        folder: of `train-00000-of-01024`, ... and `validation-00000-of-00128`, ...; or of `train`
            and `val`, with one folder of images a class in each.
        size: height and width of the images.
        seed: of the order and the augmentation.
        train: how many examples the `train-*` files hold, which they do not say.
        evaluation: likewise.

    Raises:
        FileNotFoundError: if it holds neither.
    """
    if (folder / "train").is_dir():
        return _from_folders(folder, size, seed)
    if any(folder.glob("train-*")):
        return _from_records(folder, size, seed, train, evaluation)
    raise FileNotFoundError(
        f"{folder} holds neither train-*-of-* and validation-*-of-* nor folders train and val"
    )


Encoded = Callable[[tf.Tensor | None], tf.data.Dataset]
"""From an epoch, or None for the evaluation, to this rank's (encoded image, label) pairs."""


@dataclass(frozen=True)
class _EncodedImages:
    """JPEG or PNG images, wherever they lie."""

    encoded: Encoded
    size: int
    seed: int
    train_examples: int
    eval_examples: int
    classes: int

    def train(self, epoch: tf.Tensor) -> tf.data.Dataset:
        def augmented(index: tf.Tensor, example: tuple) -> tuple:
            encoded, label = example
            seed = tf.stack([_seed(self.seed, epoch), index * adasum.size() + adasum.rank()])
            return _random_crop(encoded, seed, self.size), label

        # Of the few examples of a small dataset, each repetition is augmented anew.
        return self.encoded(epoch).enumerate().map(augmented, _AUTOTUNE)

    def evaluation(self) -> tf.data.Dataset:
        def centred(encoded: tf.Tensor, label: tf.Tensor) -> tuple:
            return _central_crop(encoded, self.size), label

        return self.encoded(None).map(centred, _AUTOTUNE)


def _from_records(folder: Path, size: int, seed: int, train: int, evaluation: int) -> Source:
    """Labels of ImageNet's shards count from 1, so there are 1001 classes, as in the reference."""

    def encoded(epoch: tf.Tensor | None) -> tf.data.Dataset:
        name = "validation" if epoch is None else "train"
        files = sorted(str(path) for path in folder.glob(f"{name}-*"))
        paths = tf.data.Dataset.from_tensor_slices(files)
        if epoch is not None:
            # The same order on all ranks, so that each gets other files in each epoch.
            paths = paths.shuffle(len(files), _seed(seed, epoch), reshuffle_each_iteration=False)
        few = len(files) < adasum.size()
        if not few:
            paths = paths.shard(adasum.size(), adasum.rank())
        records = paths.interleave(
            tf.data.TFRecordDataset, min(16, len(files)), num_parallel_calls=_AUTOTUNE
        )
        if few:
            records = records.shard(adasum.size(), adasum.rank())
        if epoch is not None:
            records = records.shuffle(
                _SHUFFLED_IMAGES, _seed(seed + 1, epoch), reshuffle_each_iteration=False
            )
        return records.map(_parse, _AUTOTUNE)

    return _EncodedImages(encoded, size, seed, train, evaluation, classes=1001)


def _from_folders(folder: Path, size: int, seed: int) -> Source:
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    listed = {
        part: [
            (str(path), label)
            for label, name in enumerate(names)
            for path in sorted((folder / part / name).iterdir())
        ]
        for part in ("train", "val")
    }

    def encoded(epoch: tf.Tensor | None) -> tf.data.Dataset:
        files, labels = zip(*listed["val" if epoch is None else "train"], strict=True)
        examples = tf.data.Dataset.from_tensor_slices((list(files), list(labels)))
        if epoch is not None:
            examples = examples.shuffle(
                len(files), _seed(seed, epoch), reshuffle_each_iteration=False
            )
        examples = examples.shard(adasum.size(), adasum.rank())
        return examples.map(
            lambda path, label: (tf.io.read_file(path), tf.cast(label, tf.int64)), _AUTOTUNE
        )

    return _EncodedImages(encoded, size, seed, len(listed["train"]), len(listed["val"]), len(names))


@dataclass(frozen=True)
class Synthetic:
    """Images that cost nothing to read: a pattern of 8 x 8 for each class, and noise.

    A network can learn them, so a smoke run shows whether training works.
    """

    size: int
    classes: int
    seed: int
    train_examples: int
    eval_examples: int

    def train(self, epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.data.Dataset.range(self.train_examples).shuffle(
            min(self.train_examples, _SHUFFLED_IMAGES),
            _seed(self.seed, epoch),
            reshuffle_each_iteration=False,
        )
        return self._made_of(order)

    def evaluation(self) -> tf.data.Dataset:
        return self._made_of(tf.data.Dataset.range(-self.eval_examples, 0))

    def _made_of(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        return indices.shard(adasum.size(), adasum.rank()).map(self._example, _AUTOTUNE)

    def _example(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([tf.constant(self.seed, tf.int64), index])
        label = tf.random.stateless_uniform((), seed, 0, self.classes, tf.int64)
        of_class = tf.stack([tf.constant(self.seed + 1, tf.int64), label])
        pattern = tf.random.stateless_normal((8, 8, 3), of_class)
        image = tf.image.resize(pattern, (self.size, self.size), "nearest")
        noise = tf.random.stateless_normal((self.size, self.size, 3), seed)
        return 64.0 * image + 32.0 * noise, label


def _seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    return tf.cast(epoch, tf.int64) * 1_000_003 + seed


def _parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    example = tf.io.parse_single_example(
        record,
        {
            "image/encoded": tf.io.FixedLenFeature((), tf.string),
            "image/class/label": tf.io.FixedLenFeature((), tf.int64),
        },
    )
    return example["image/encoded"], example["image/class/label"]


def _random_crop(encoded: tf.Tensor, seed: tf.Tensor, size: int) -> tf.Tensor:
    """A random part of the image in a random aspect ratio, half of the time mirrored."""

    def of_jpeg() -> tf.Tensor:
        # Only the part is decoded, which saves most of the work.
        begin, extent = _random_window(tf.io.extract_jpeg_shape(encoded), seed)
        window = tf.concat([begin[:2], extent[:2]], 0)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def of_others() -> tf.Tensor:
        image = _decoded(encoded)
        begin, extent = _random_window(tf.shape(image), seed)
        return tf.slice(image, begin, extent)

    image = tf.cond(tf.io.is_jpeg(encoded), of_jpeg, of_others)
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return _normalized(tf.image.resize(image, (size, size)))


def _random_window(shape: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros((1, 0, 4)),
        seed,
        min_object_covered=0.1,
        aspect_ratio_range=_CROP_RATIO,
        area_range=_CROP_AREA,
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, extent


def _central_crop(encoded: tf.Tensor, size: int) -> tf.Tensor:
    image = _decoded(encoded)
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    scaled = tf.round(shape * (size * _BEFORE_CROP / tf.reduce_min(shape)))
    image = tf.image.resize(image, tf.cast(scaled, tf.int32))
    return _normalized(tf.image.resize_with_crop_or_pad(image, size, size))


def _decoded(encoded: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def _normalized(image: tf.Tensor) -> tf.Tensor:
    image = image - tf.constant(_CHANNEL_MEANS)
    return tf.ensure_shape(image, (*image.shape[:2], 3))
