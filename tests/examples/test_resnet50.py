"""ImageNet's program in a narrow form on two ranks, and its parts by themselves."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import running
from ranks import on_ranks, run

from tf_adasum import launch

# Two stages, 8 steps an epoch on each of two ranks.
NARROW = (
    "--synthetic --train-examples 256 --eval-examples 50 --classes 8 --width 4 --blocks 1,1 "
    "--image-size 32 --batch 16 --warmup-epochs 1"
)
# Nothing that a checkpoint of rank 0 would leave out.
TO_TARGET = (
    f"{NARROW} --local-steps 3 --average-inner-state --base-rate 0.5 --epochs 12 --eval-every 2 "
    "--target 0.9"
)


def _parse(printed):
    """(key, value, metadata) of each of MLPerf's lines."""
    lines = re.findall(r"^:::MLL (\d+\.\d+) (\w+): (.*)$", printed, re.MULTILINE)
    seconds = [float(time) for time, _, _ in lines]
    assert seconds == sorted(seconds)
    said = [(key, json.loads(text)) for _, key, text in lines]
    return [(key, content["value"], content["metadata"]) for key, content in said]


def _run(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model, history = running.run("resnet50_imagenet", arguments)
    return model, history, _parse(printed.getvalue())


@running.shares_ranks
@pytest.mark.parametrize("ranks", [2])
def test_reaches_the_target_and_so_does_a_run_that_was_killed(ranks, tmp_path):
    program = str(Path(__file__).with_name("killed_resnet50.py"))
    arguments = [*TO_TARGET.split(), "--checkpoints", str(tmp_path)]
    command = [*launch.mpirun_command(ranks), sys.executable, program, "3", *arguments]
    killed = run(command, 200)
    assert killed.code != 0, killed.output
    keys = [key for key, _, _ in _parse(killed.output)]
    assert "run_start" in keys and "run_stop" not in keys
    go_on(ranks, folder=str(tmp_path))


@on_ranks(2, timeout=200)
def go_on(folder):
    import tf_adasum as adasum

    model, history, log = _run(TO_TARGET)
    epochs = history.epoch[-1] + 1
    losses, accuracies = history.history["loss"], history.history["val_accuracy"]
    # Stopped by the accuracy, after the first evaluation that reached it, on all ranks.
    assert epochs < 12 and epochs % 2 == 0 and len(accuracies) == epochs // 2
    assert accuracies[-1] >= 0.9 and all(a < 0.9 for a in accuracies[:-1]) and epochs > 2
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.optimizer.iterations) == 8 * epochs
    assert int(model.optimizer.syncs) == 3 * epochs  # after 3, 6 and 8 steps
    running.assert_equal_on_all_ranks(model.get_weights(), "weights")
    running.assert_equal_on_all_ranks([np.array([*losses, *accuracies])], "metrics")

    keys = [key for key, _, _ in log]
    if adasum.rank() != 0:
        assert log == []
    else:
        said = {key: value for key, value, _ in log}
        assert said["global_batch_size"] == 16 * 2 * 3 and said["eval_samples"] == 50
        assert said["opt_base_learning_rate"] == 4 * 0.5 * 16 / 256
        assert keys.index("init_stop") < keys.index("run_start") < keys.index("block_start")
        assert keys.count("epoch_start") == keys.count("epoch_stop") == epochs
        assert keys.count("eval_start") == keys.count("block_stop") == epochs // 2
        evaluated = [(m["epoch_num"], v) for key, v, m in log if key == "eval_accuracy"]
        assert evaluated == list(zip(range(2, epochs + 1, 2), accuracies, strict=True))
        # Of all 50 images, none twice: a whole number of them was right.
        assert all(abs(50 * a - round(50 * a)) < 1e-4 for a in accuracies)
        assert keys[-1] == "run_stop" and log[-1][2]["status"] == "success"

    # The killed run goes on after the last epoch that it has saved.
    resumed, history, log = _run(f"{TO_TARGET} --checkpoints {folder}")
    assert history.epoch[0] in (1, 2) and history.epoch[-1] + 1 == epochs
    if adasum.rank() == 0:
        (found,) = (m["resumed_after_epoch"] for key, _, m in log if key == "init_stop")
        assert found == history.epoch[0]
    for got, want in zip(resumed.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.heavy(2)
@on_ranks(2, timeout=200)
def test_mixed_precision_xla_and_label_smoothing():
    import keras

    model, history, _ = _run(
        f"{NARROW} --blocks 1 --mixed-precision --xla --label-smoothing 0.1 --base-rate 0.5 "
        "--epochs 3 --eval-every 3"
    )
    assert model.jit_compile and isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.layers[1].compute_dtype == "float16" and model.outputs[0].dtype == "float32"
    losses = history.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    # Smoothing by 0.1 over 8 classes costs this much even where the model is right.
    assert min(losses) > 0.4
    assert np.isfinite(history.history["val_loss"]).all()
    running.assert_equal_on_all_ranks(model.get_weights(), "weights")


def test_model():
    import keras

    resnet = running.load("resnet50.model").resnet
    model = resnet(224, 1000)
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert trained == 25_557_032  # ResNet-50's
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert len(convolutions) == 53
    # Version 1.5: the 3x3 strides, and the projection beside it.
    strided = [(x.kernel_size[0], x.filters) for x in convolutions if x.strides == (2, 2)]
    assert sorted(strided) == sorted(
        [(7, 64), *((3, 64 << i) for i in (1, 2, 3)), *((1, 256 << i) for i in (1, 2, 3))]
    )
    assert len(model.losses) == 53 + 2  # decay of kernels and the last bias
    plain = resnet(32, 10, width=4, blocks=[1, 1], weight_decay=0)
    assert not plain.losses and plain(np.zeros((2, 32, 32, 3), "f")).shape == (2, 10)
    # Of w, the decay adds 1e-4 w to the gradient.
    one = resnet(32, 10, width=4, blocks=[1], weight_decay=1e-4)
    kernel = one.layers[-2].kernel
    np.testing.assert_allclose(
        kernel.regularizer(kernel), 0.5e-4 * (kernel.numpy() ** 2).sum(), rtol=1e-5
    )


def test_schedule():
    rate = running.load("resnet50.schedule").WarmUpAndSteps(0.512, 100, 5, (30, 60, 80))
    for step, want in [
        (0, 0.0),
        (250, 0.256),
        (499, 0.512 * 499 / 500),
        (500, 0.512),
        (2999, 0.512),
        (3000, 0.0512),
        (5999, 0.0512),
        (6000, 0.00512),
        (8000, 0.000512),
        (9999, 0.000512),
    ]:
        np.testing.assert_allclose(rate(step), want, rtol=1e-6, err_msg=f"step {step}")
    again = type(rate).from_config(rate.get_config())
    assert float(again(3000)) == float(rate(3000))
    assert float(type(rate)(0.5, 10, 0)(0)) == 0.5


LABELS = 12  # of as many images, each in a colour of its own


def _image(label):
    """One colour, in a shape of its own."""
    return np.full((40 + label, 60 - label, 3), 20 * label, np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same images as TFRecord shards and as folders."""
    import tensorflow as tf

    def feature(value):
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    records, images = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("images")
    for split, part in (("train", "train"), ("validation", "val")):
        for shard in range(4):
            path = str(records / f"{split}-{shard:05d}-of-00004")
            with tf.io.TFRecordWriter(path) as writer:
                for label in range(shard, LABELS, 4):
                    # In both kinds of files that ImageNet consists of.
                    encode = tf.io.encode_png if label == 5 else tf.io.encode_jpeg
                    encoded = encode(_image(label)).numpy()
                    features = {
                        "image/encoded": feature(encoded),
                        "image/class/label": feature(label),
                        "image/class/text": feature(b"not read"),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
                    folder = images / part / f"class-{label:02d}"
                    folder.mkdir(parents=True)
                    (folder / "image.jpeg").write_bytes(encoded)
    return str(records), str(images)


@running.shares_ranks
@pytest.mark.parametrize("ranks", [2])
def test_input(ranks, folders):
    read_input(ranks, records=folders[0], images=folders[1])


@on_ranks(2)
def read_input(records, images):
    import itertools

    from tf_adasum import core

    data = running.load("resnet50.data")
    means = np.array([123.68, 116.78, 103.94])

    def labels_of_ranks(batches):
        """Also checks the images, which are of one colour whatever part of them is seen."""
        seen = []
        for batch, labels in batches:
            assert batch.shape[1:] == (16, 16, 3) and batch.dtype == np.float32
            for image, label in zip(batch.numpy(), labels.numpy(), strict=True):
                np.testing.assert_allclose(
                    image, np.broadcast_to(20.0 * label - means, image.shape), atol=4
                )
                seen.append(int(label))
        return [row.tolist() for row in core.allgather(np.array([seen]))]

    for folder, classes in ((records, 1001), (images, LABELS)):
        source = data.open_folder(Path(folder), 16, 3, LABELS, LABELS)
        assert (source.classes, source.train_examples, source.eval_examples) == (
            classes, LABELS, LABELS,
        )  # fmt: skip
        # Each image is evaluated once.
        parts = labels_of_ranks(data.evaluation_batches(source, 4))
        assert sorted(itertools.chain(*parts)) == list(range(LABELS))
        # An epoch is all images, in an order of its own, that depends on the epoch alone.
        first, second = (
            labels_of_ranks(data.train_batches(source, 3, epoch, epoch + 1, 2)) for epoch in (4, 5)
        )
        both = labels_of_ranks(data.train_batches(source, 3, 4, 6, 2))
        assert sorted(itertools.chain(*first)) == list(range(LABELS))
        assert first != second
        assert both == [one + other for one, other in zip(first, second, strict=True)]
        # A rank whose part is short begins it again.
        assert len(labels_of_ranks(data.train_batches(source, 4, 0, 1, 3))[0]) == 12

    with pytest.raises(FileNotFoundError, match="neither train-"):
        data.open_folder(Path(images) / "train", 16, 3, 1, 1)
    # Augmentation is random, but the same each time.
    source = data.Synthetic(16, 4, 3, 20, 10)
    x, y = next(iter(data.train_batches(source, 10, 0, 1, 1)))
    again, _ = next(iter(data.train_batches(source, 10, 0, 1, 1)))
    np.testing.assert_array_equal(x, again)
    assert set(y.numpy()) <= set(range(4)) and len(set(y.numpy())) > 1


def test_crops():
    import tensorflow as tf

    data = running.load("resnet50.data")
    rows = np.arange(224, dtype=np.uint8)[:, None, None]
    encoded = tf.io.encode_png(np.broadcast_to(rows, (224, 300, 3)))
    # 128 pixels: the shorter side becomes 146.3, and the middle 128 of these remain.
    image = data._central_crop(encoded, 128).numpy() + np.array(data._CHANNEL_MEANS, "f")
    scale = 224 / 146
    np.testing.assert_allclose(image[:, 64, 0], (np.arange(9, 137) + 0.5) * scale - 0.5, atol=0.5)
    crops = [
        data._random_crop(encoded, tf.constant([1, i], tf.int64), 32).numpy() for i in range(20)
    ]
    spans = [float(crop[-1, 0, 0] - crop[0, 0, 0]) for crop in crops]
    assert len(set(spans)) > 10 and min(spans) > 0
    # Two values of one image where it is mirrored half of the time.
    columns = np.broadcast_to(rows.transpose(1, 0, 2), (224, 224, 3))
    flips = [
        np.sign(np.diff(data._random_crop(tf.io.encode_png(columns), [1, i], 32)[0, :, 0]).sum())
        for i in range(20)
    ]
    assert set(flips) == {-1.0, 1.0}
