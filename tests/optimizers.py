"""Every optimizer that Keras ships, whatever its release."""

from collections.abc import Callable
from typing import Any


def every_optimizer() -> dict[str, Callable[[], Any]]:
    """By name, what makes one; some of them twice, with other options."""
    import keras

    o = keras.optimizers
    made = {
        "SGD": lambda: o.SGD(0.1),
        "momentum": lambda: o.SGD(0.1, momentum=0.9),
        "Nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
        "schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True)),
        "weight decay": lambda: o.SGD(0.1, momentum=0.9, weight_decay=0.01),
        "Adam amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    }
    for name in dir(o):
        kind = getattr(o, name)
        is_one = isinstance(kind, type) and issubclass(kind, o.Optimizer)
        if is_one and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "SGD"):
            made.setdefault(name, lambda kind=kind: kind(0.01))
    if hasattr(o, "MultiOptimizer"):
        made["MultiOptimizer"] = lambda: o.MultiOptimizer(
            o.OptimizerMap(o.Adam(0.01), {"w0": o.SGD(0.1, momentum=0.9)})
        )
    return made
