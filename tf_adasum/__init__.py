"""Adasum for TensorFlow and Keras: data-parallel training that keeps its accuracy at scale.

Names are loaded when they are first used, so `from tf_adasum import core` imports no TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    **dict.fromkeys(
        [
            "init",
            "shutdown",
            "is_initialized",
            "rank",
            "size",
            "local_rank",
            "local_size",
            "cross_rank",
            "cross_size",
            "Adasum",
            "Sum",
            "Average",
            "DisagreementError",
            "RankLostError",
            "Shrinking",
            "shrinkings",
        ],
        "core",
    ),
    **dict.fromkeys(
        [
            "allreduce",
            "grouped_allreduce",
            "allgather",
            "broadcast",
            "broadcast_variables",
            "barrier",
        ],
        "collectives",
    ),
    "orthogonality": "measures",
    "shard": "data",
    "AdasumOptimizer": "optimizer",
    "DistributedOptimizer": "legacy",
    "SyncHook": "legacy.v1",
}
_MODULES = {"callbacks", "core", "legacy", "reference"}

__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


if {"keras", "tensorflow"} <= sys.modules.keys():
    # So that keras.saving.load_model knows AdasumOptimizer although nobody has named it yet.
    importlib.import_module(f"{__name__}.optimizer")
