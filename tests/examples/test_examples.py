"""Each example in a small form on two ranks."""

import sys
from unittest import mock

import numpy as np
import pytest
import running
from ranks import on_ranks, run

from tf_adasum import launch


@on_ranks(2)
def test_keras_fashion_mnist():
    model, history = running.run(
        "keras_fashion_mnist", "--data digits --epochs 2 --local-steps 2 --rate 0.1"
    )
    logs = history.history
    assert logs["loss"][1] < 0.7 * logs["loss"][0]
    assert logs["val_accuracy"][1] > 0.5  # chance: 0.1
    assert int(model.optimizer.syncs) == 2 * 12  # of 23 steps an epoch
    running.assert_equal_on_all_ranks(model.get_weights(), "weights")
    running.assert_equal_on_all_ranks([np.array(v) for v in logs.values()], "metrics")


@on_ranks(2)
def test_fashion_mnist_is_on_disk_before_all_ranks_read_it():
    import keras

    import tf_adasum as adasum

    example = running.load("keras_fashion_mnist")
    images = np.full((3, 28, 28), 255, np.uint8)
    labels = np.array([0, 9, 5], np.uint8)
    with mock.patch.object(
        keras.datasets.fashion_mnist, "load_data", return_value=((images, labels),) * 2
    ) as load_data:
        (x, y), (x_test, _) = example.load_fashion_mnist()
    assert load_data.call_count == (2 if adasum.local_rank() == 0 else 1)
    assert x.shape == x_test.shape == (3, 28, 28, 1) and x.dtype == np.float32
    assert x.min() == x.max() == 1 and y.tolist() == [0, 9, 5]


@on_ranks(2)
def test_custom_loop():
    model, accuracies = running.run("custom_loop", "--epochs 3")
    assert accuracies[-1] > 0.85  # chance: 0.1
    running.assert_equal_on_all_ranks(model.get_weights(), "weights")
    running.assert_equal_on_all_ranks([np.array(accuracies)], "accuracies")


@on_ranks(2)
def test_language_model():
    import tensorflow as tf

    example = running.load("language_model")
    text = example.read_sequences(100, 50)
    assert text.shape == (100, 50) and b"import" in text.tobytes()
    seen, whole, counts = (np.array(part) for part in example.hide(text, tf.constant([1, 2])))
    hidden = seen == example.MASK
    assert (whole == text).all() and (seen[~hidden] == text[~hidden]).all()
    assert abs(hidden.mean() - example.HIDDEN_PART) < 0.02
    assert (counts[~hidden] == 0).all() and np.allclose(counts[hidden] * example.HIDDEN_PART, 1)

    model, history = running.run(
        "language_model",
        "--sequences 512 --length 32 --epochs 2 --width 16 --blocks 1 --batch 16 --rate 0.05",
    )
    # A uniform guess among all tokens costs log 257 = 5.5; those that occur are fewer.
    assert history.history["val_loss"][-1] < 4
    assert history.history["val_loss"][-1] < history.history["loss"][0]
    running.assert_equal_on_all_ranks(model.get_weights(), "weights")


@running.shares_ranks
@pytest.mark.parametrize("ranks", [2])
def test_resume(ranks, tmp_path):
    backup = str(tmp_path / "backup")
    program = [sys.executable, str(running.EXAMPLES / "resume.py"), "--epochs", "4"]
    command = [*launch.mpirun_command(ranks), *program, "--backup", backup, "--kill-in-epoch", "3"]
    killed = run(command, 200, TF_ADASUM_TEST_IMPORTS="all")
    assert killed.code != 0 and "weights after epoch" not in killed.output, killed.output
    go_on(ranks, backup=backup)
    assert not (tmp_path / "backup").exists()


@on_ranks(2)
def go_on(backup):
    resumed, epochs = running.run("resume", f"--epochs 4 --backup {backup}")
    # Rank 0 may have been writing the second epoch's backup when rank 1 was killed.
    assert epochs in ([2, 3], [1, 2, 3])
    uninterrupted, epochs = running.run("resume", "--epochs 4")
    assert epochs == [0, 1, 2, 3]
    assert resumed == uninterrupted
    running.assert_equal_on_all_ranks([np.frombuffer(resumed.encode(), np.uint8)], "hashes")
