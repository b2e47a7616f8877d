"""The examples as modules, and what their runs are checked by."""

import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    """The module of an example, found as when it runs as a program."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    if "sklearn" in sys.modules and sys.modules["sklearn"] is None:
        del sys.modules["sklearn"]  # what tests/start has put there
    return importlib.import_module(name)


def run(name, arguments):
    """What an example's `main` returns for a command line."""
    return load(name).main(arguments.split())


def shares_ranks(test):
    """Marks a test that runs bodies of `on_ranks` itself, so that it stands beside their tests."""
    test.shares_ranks = True
    return test


def assert_equal_on_all_ranks(arrays, what):
    """All bits of the arrays. Every rank calls it."""
    from tf_adasum import core

    content = b"".join(np.asarray(array).tobytes() for array in arrays)
    digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    digests = core.allgather(digest[np.newaxis])
    assert (digests == digests[0]).all(), f"{what} differ between ranks"
