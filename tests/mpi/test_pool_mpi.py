"""The ranks that bodies share: what is shown of failures, what ends, and what is forgotten."""

import importlib.util
import os
import random
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pool
import pytest
from ranks import on_ranks

from tf_adasum import core


def _fails(body, **parameters):
    """What a test of this body on 2 ranks says, and its ranks' processes, which have to be gone."""
    with pytest.raises(pytest.fail.Exception) as failure:
        body(2, **parameters)
    return str(failure.value)


def _assert_gone(folder):
    for pid in [int(path.name) for path in folder.iterdir()]:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", pid


@on_ranks(2)
def leaves_its_pid(folder):
    (Path(folder) / str(os.getpid())).touch()


@on_ranks(2)
def raises_on_rank_1(folder):
    (Path(folder) / str(os.getpid())).touch()
    print(f"printed by {core.rank()}")
    if core.rank() == 1:
        raise LookupError("the disk is gone")
    core.barrier()


@on_ranks(2, timeout=3)
def hangs_on_rank_1(folder):
    (Path(folder) / str(os.getpid())).touch()
    print(f"printed by {core.rank()}")
    while core.rank() == 1:
        time.sleep(0.1)


@on_ranks(2)
def kills_rank_1():
    if core.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(2)
def calls_once_more_on_rank_1():
    if core.rank() == 1:
        core.allreduce(np.ones(3))


@on_ranks(2)
def exits_with_an_error():
    import atexit

    atexit.register(os._exit, 3)


def test_bodies_share_ranks(tmp_path):
    for _ in range(3):
        leaves_its_pid(2, folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    pool.close()
    _assert_gone(tmp_path)


def test_a_failure_on_one_rank(tmp_path):
    said = _fails(raises_on_rank_1, folder=str(tmp_path))
    assert "rank 1: Traceback" in said and "LookupError: the disk is gone" in said
    # Rank 0 waits for ever, and it is shown where.
    assert "rank 0: had not ended" in said and "in barrier\n" in said
    assert "printed by 0" in said and "printed by 1" in said
    _assert_gone(tmp_path)
    # The next ones do not notice.
    leaves_its_pid(2, folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_body_that_does_not_end(tmp_path):
    started = time.monotonic()
    said = _fails(hangs_on_rank_1, folder=str(tmp_path))
    assert time.monotonic() - started < 30
    assert "rank 1: did not end within 3 s" in said and "in hangs_on_rank_1\n" in said
    assert "printed by 0" in said and "printed by 1" in said
    _assert_gone(tmp_path)


def test_a_rank_that_is_killed(tmp_path):
    assert "rank 1: exited\n" in _fails(kills_rank_1)
    # Also between two bodies.
    leaves_its_pid(2, folder=str(tmp_path))
    victim = next(tmp_path.iterdir()).name
    os.kill(int(victim), signal.SIGKILL)
    time.sleep(1)
    assert "exited after leaves_its_pid" in _fails(leaves_its_pid, folder=str(tmp_path))
    leaves_its_pid(2, folder=str(tmp_path))


def test_ranks_that_are_left_apart():
    said = _fails(calls_once_more_on_rank_1)
    assert "rank 0: Traceback" in said and "rank 1: Traceback" in said
    assert "call: shutdown" in said and "call: allreduce" in said


def test_an_exit_with_an_error():
    exits_with_an_error(2)
    with pytest.raises(pytest.fail.Exception, match="after exits_with_an_error: 3"):
        pool.close()


@on_ranks(2)
def leaves_much_behind():
    import keras

    os.environ["LEFT_BEHIND"] = os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
    del os.environ["TF_ENABLE_ONEDNN_OPTS"]
    warnings.simplefilter("error")
    keras.utils.set_random_seed(1)  # Python's, NumPy's and TensorFlow's too
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_float16")
    assert keras.layers.Dense(1).name == "dense"
    if importlib.util.find_spec("tf_keras"):
        import tf_keras

        tf_keras.backend.set_floatx("float64")
        tf_keras.mixed_precision.set_global_policy("mixed_float16")
        assert tf_keras.layers.Dense(1).name == "dense"
    core.init()


@on_ranks(2)
def finds_nothing():
    import keras
    import tensorflow as tf

    assert "LEFT_BEHIND" not in os.environ and "TF_ENABLE_ONEDNN_OPTS" in os.environ
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "error" not in {action for action, *_ in warnings.filters}
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"
    assert keras.layers.Dense(1).name == "dense"
    if importlib.util.find_spec("tf_keras"):
        import tf_keras

        assert tf_keras.backend.floatx() == "float32"
        assert tf_keras.mixed_precision.global_policy().name == "float32"
        assert tf_keras.layers.Dense(1).name == "dense"
    assert not core.is_initialized()
    # As in new processes, each rank has numbers of its own.
    for number in (
        random.random(),
        np.random.rand(),
        tf.random.uniform([]),
        keras.random.normal([]),
    ):
        of_0, of_1 = core.allgather(np.array([float(number)]))
        assert of_0 != of_1


def test_nothing_is_left_behind():
    leaves_much_behind(2)
    finds_nothing(2)
