"""Which tests are run, and when the ranks that they share end."""

import os
from pathlib import Path

import pool
import pytest

# Tests that need more memory or time than a test should are run on request only.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--heavy",
        action="store_true",
        help="also run tests that take many GiB (or TF_ADASUM_HEAVY=1)",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("heavy")
    if mark is None:
        return
    if not (item.config.getoption("--heavy") or os.environ.get("TF_ADASUM_HEAVY", "0") == "1"):
        pytest.skip("heavy: run it with --heavy or TF_ADASUM_HEAVY=1")
    needed, free = mark.kwargs["gib"], _free_gib()
    if free < needed:
        pytest.skip(f"heavy: needs {needed} GiB of free memory, there are {free:.1f}")


def _free_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / (1 << 20)
    return 0.0


# When the ranks of `on_ranks` end: with the last test of a file on so many ranks.


def _group(item):
    ranks = item.callspec.params["ranks"] if hasattr(item.obj, "body") else 0
    return item.path, ranks


def pytest_collection_modifyitems(items):
    files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], _group(item)[1]))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or _group(nextitem) != _group(item):
        pool.close()


def pytest_unconfigure():
    pool.close()
