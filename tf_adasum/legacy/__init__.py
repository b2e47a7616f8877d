"""Optimizers of other families than Keras 3's, under Horovod's name for all of them.

One family a file; what they share is in `wrapper`, what happens between two syncs in
`tf_adasum.window`. `callbacks` is for `fit` of tf_keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from tf_adasum.core import Adasum, Op


def DistributedOptimizer(
    optimizer: Any, op: Op | str = Adasum, backward_passes_per_step: int = 1, **options: Any
) -> Any:
    """Makes training with an optimizer of any family data-parallel over all MPI ranks.

    What `AdasumOptimizer` says about steps, windows and syncs holds for every family. The result
    is of the optimizer's own family, so it goes wherever the optimizer went:

    | `optimizer` | result |
    |---|---|
    | `keras.optimizers.Optimizer` (Keras 3) | `AdasumOptimizer` |
    | `tf_keras.optimizers.Optimizer` (Keras 2) | `legacy.keras2.AdasumOptimizer` |
    | `tf_keras.optimizers.legacy.Optimizer` | `legacy.keras2_legacy.AdasumOptimizer` |
    | `tf.compat.v1.train.Optimizer` | `legacy.v1.AdasumOptimizer` |

    Args:
        optimizer: one of the above.
        op: `Adasum`; `Average`, which is local SGD; or `Sum`.
        backward_passes_per_step: positive int, steps of `optimizer` between two syncs: the
            `local_steps` of `AdasumOptimizer`.
        **options: the others of `AdasumOptimizer`.

    Raises:
        TypeError: if `optimizer` is something else.
        ValueError: if an option is, or the optimizer is wrapped already.
    """
    return _wrapper_for(optimizer)(optimizer, backward_passes_per_step, op=op, **options)


def _wrapper_for(optimizer: Any) -> type:
    # A package that the optimizer does not come from is not imported: it may be missing.
    packages = {base.__module__.split(".")[0] for base in type(optimizer).__mro__}
    if "tf_keras" in packages:
        from tf_adasum.legacy import keras2, keras2_legacy

        for module in (keras2, keras2_legacy):
            if isinstance(optimizer, module.Optimizer):
                return module.AdasumOptimizer
    if "tensorflow" in packages:
        from tf_adasum.legacy import v1

        if isinstance(optimizer, v1.Optimizer):
            return v1.AdasumOptimizer
    if "keras" in packages:
        import keras

        from tf_adasum.optimizer import AdasumOptimizer

        if isinstance(optimizer, keras.optimizers.Optimizer):
            return AdasumOptimizer
    raise TypeError(
        "`optimizer` must be an instance of keras.optimizers.Optimizer, "
        "tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer or "
        f"tf.compat.v1.train.Optimizer. Received: {optimizer!r} of type {type(optimizer)}"
    )


def __getattr__(name: str) -> Any:
    # Not before it is asked for: tf_keras may not be installed.
    if name == "callbacks":
        return importlib.import_module(f"{__name__}.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
