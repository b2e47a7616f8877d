"""When the ranks of `on_ranks` end: with the last test of a file on so many ranks."""

import pool
import pytest


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
