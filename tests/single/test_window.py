"""Names of variables that are comparable over ranks."""

from types import SimpleNamespace

import pytest

from tf_adasum.window import names


@pytest.mark.parametrize(
    "paths, want",
    [
        (["dense/kernel", "dense_1/kernel"], ["dense_0/kernel", "dense_1/kernel"]),
        (["dense_7/kernel", "dense_8/kernel"], ["dense_0/kernel", "dense_1/kernel"]),
        (["dense_8/kernel", "dense_7/kernel"], ["dense_1/kernel", "dense_0/kernel"]),
        (["model_3/dense_12/bias"], ["model/dense/bias"]),
        (["conv_10/w", "conv_9/w"], ["conv_1/w", "conv_0/w"]),  # by size, not by spelling
        (["city/w", "age/w"], ["city/w", "age/w"]),
        ([], []),
    ],
)
def test_names(paths, want):
    assert names([SimpleNamespace(path=path) for path in paths]) == want
