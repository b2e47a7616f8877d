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


# When the ranks of `on_ranks` end: with the last test on so many ranks, since starting TensorFlow
# takes longer than most tests. So these tests come last, and in the order of their ranks.


def _shared_ranks(item: pytest.Item) -> int:
    """How many ranks the test shares with others."""
    return item.callspec.params["ranks"] if getattr(item.obj, "shares_ranks", False) else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {path: i for i, path in enumerate(dict.fromkeys(item.path.parent for item in items))}
    items.sort(key=lambda item: (folders[item.path.parent], _shared_ranks(item)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or _shared_ranks(nextitem) != _shared_ranks(item):
        pool.close()


def pytest_unconfigure() -> None:
    # They are there still where pytest was interrupted.
    pool.end()
