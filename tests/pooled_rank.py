"""A rank that runs test bodies, one after the other, as `pool.Pool` tells it."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Client
from pathlib import Path


def run(file: str, name: str, parameters: str) -> None:
    """Runs the body behind a test of a file, which is loaded only once."""
    module = sys.modules.get(Path(file).stem)
    if module is None:
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    getattr(module, name).body(**json.loads(parameters))


def _serve(address: str, output: str) -> None:
    printed = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout.reconfigure(line_buffering=True)
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    with Client(address) as pool, open(f"{output}.{number}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        pool.send((number, os.getpid()))
        while True:
            try:
                *body, timeout = pool.recv()
            except EOFError:
                return
            # The pool ends it sooner, unless pytest was killed.
            faulthandler.dump_traceback_later(timeout + 20, exit=True)
            failure = _failure_of(*body)
            faulthandler.cancel_dump_traceback_later()
            pool.send(failure)


def _failure_of(*body: str) -> str | None:
    environ = dict(os.environ)
    try:
        with warnings.catch_warnings():
            run(*body)
        _leave_together()
        _forget(environ)
    except BaseException:
        return traceback.format_exc()
    return None


def _leave_together() -> None:
    """Raises an error on all ranks if one of them is elsewhere, in another call."""
    core = sys.modules.get("tf_adasum.core")
    if core is not None and core.is_initialized():
        core.shutdown()


def _forget(environ: dict[str, str]) -> None:
    """Makes the process, as far as a body sees it, one that has just started."""
    for variable in os.environ.keys() - environ.keys():
        del os.environ[variable]
    for variable, value in environ.items():
        if os.environ.get(variable) != value:
            os.environ[variable] = value
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(None)
    if keras := sys.modules.get("keras"):
        keras.config.set_floatx("float32")
        keras.backend.clear_session()  # with the dtype policy, the seeds and the names
    if tf_keras := sys.modules.get("tf_keras"):
        tf_keras.backend.set_floatx("float32")
        tf_keras.backend.clear_session()
        tf_keras.mixed_precision.set_global_policy(None)
    gc.collect()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
