"""All ranks start from the same state."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import keras
import numpy as np

from tf_adasum import collectives, core, optimizer
from tf_adasum.callbacks.together import Together, append_once

# Odd and without a pattern: multiples of it modulo 2^31 are far apart and all different.
_SEED_STRIDE = 0x9E3779B1
_SEEDS = 2**31


class BroadcastState(Together):
    """Gives every rank root_rank's state before the first gradient.

    That is the weights, all that is not trained, the optimizer's state, which is created if it is
    not there yet, and the seeds of layers such as Dropout. What other callbacks load in
    `on_train_begin` counts: also the state and the epoch that `BackupAndRestore` restores on
    rank 0.

    Seeds become root_rank's plus a multiple of the distance to it, with root_rank's counter. Equal
    seeds would drop the same units for the first example of every rank, and so on, and make the
    ranks' gradients less independent than those of one large batch; these are different, and still
    all follow from root_rank's.

    Ranks that are in the same training already are left alone, since then each rank's momentum is
    its own: those that hold the same weights from their last sync on, be it in a second `fit` or
    where each rank has loaded what it had saved itself.

    A model that is built by its first batch has no state before: AdasumOptimizer makes its weights
    equal at the first step, and after the first batch there is a sync, and all that is not trained
    becomes root_rank's.

    Raises:
        ValueError: on all ranks, if the model is built on some only.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank
        self._awaits_first_batch = False
        self._batches_begun = 0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        append_once(self.neighbours, _AfterRestoring(self))
        own = getattr(model, "optimizer", None)
        if own is not None and optimizer.find(own) is None and core.size() > 1 and core.rank() == 0:
            warnings.warn(
                "The model's optimizer is not wrapped in AdasumOptimizer, so each rank trains for "
                f"itself. Received: {own!r}",
                stacklevel=2,
            )

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        if core.size() == 1:
            return
        self._awaits_first_batch = not self._is_built_everywhere()
        self._batches_begun = 0
        if self._awaits_first_batch:
            return
        adasum = optimizer.find(self.model.optimizer)
        if adasum is not None:
            built = core.allgather(
                np.array([adasum.built]),
                name=f"state: is the optimizer built? {adasum._options.agreed}",
            )
            # Some optimizers start their state from the weights, and the owners' is not broadcast.
            if adasum.partition_state and not built.all():
                self._broadcast(self.model.variables)
        if self.model.optimizer is not None and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        in_training = adasum is not None and int(adasum._window.started) > 0
        are_together = self._are_together(in_training)
        if adasum is not None and are_together:
            adasum.forget_loaded_state()
        if in_training and are_together:
            return
        variables = self._variables()
        self._broadcast([v for v in variables if _is_seed(v)] if are_together else variables)
        if adasum is not None and not are_together:
            adasum.spread_loaded_state()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if self._batches_begun > 0:
            self._after_first_batch()
        self._batches_begun += 1

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._after_first_batch()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._after_first_batch()

    def _after_first_batch(self) -> None:
        if not self._awaits_first_batch:
            return
        self._awaits_first_batch = False
        # Every rank is here after one batch, though not always after one step.
        if adasum := optimizer.find(self.model.optimizer):
            adasum.sync()
        self._broadcast(self.model.non_trainable_variables)

    def _is_built_everywhere(self) -> bool:
        built = core.allgather(np.array([self.model.built]), name="state: is the model built?")
        if not built.all() and built.any():
            raise ValueError(
                "The model must be built on all ranks or on none. "
                f"Received: not built on ranks {np.flatnonzero(~built).tolist()}"
            )
        return bool(built.all())

    def _variables(self) -> list[keras.Variable]:
        variables = [*self.model.variables]
        if self.model.optimizer is not None:
            adasum = optimizer.find(self.model.optimizer)
            parts = {id(v) for v in adasum._partitioned_variables} if adasum else set()
            variables += [v for v in self.model.optimizer.variables if id(v) not in parts]
        return list({id(variable): variable for variable in variables}.values())

    def _are_together(self, in_training: bool) -> bool:
        """Whether all ranks' states are the same, as far as they have to be."""
        if in_training:
            adasum = optimizer.find(self.model.optimizer)
            window = adasum._window
            in_mid_window = int(window.started) == 2
            shared = [window.syncs]
            # In mid-window the hosts of a partitioned optimizer hold different weights.
            if not (adasum._partitioned_variables and in_mid_window):
                shared += window.starts if in_mid_window else window.variables
            rates = [optimizer._learning_rate for optimizer in adasum._parts]
            shared += [rate for rate in rates if isinstance(rate, keras.Variable)]
        else:
            shared = [variable for variable in self._variables() if not _is_seed(variable)]
        digests = core.allgather(digest(shared, in_training)[np.newaxis], name="state: digest")
        return bool((digests == digests[0]).all())

    def _broadcast(self, variables: Sequence[keras.Variable]) -> None:
        collectives.broadcast_variables(variables, self.root_rank, name="state")
        distance = (core.rank() - self.root_rank) % core.size()
        for variable in variables:
            if distance > 0 and _is_seed(variable):
                seed, counter = keras.ops.convert_to_numpy(variable).tolist()
                variable.assign([(seed + distance * _SEED_STRIDE) % _SEEDS, counter])


class _AfterRestoring(keras.callbacks.Callback):
    """Behind all others: brings to all ranks what they have loaded on root_rank."""

    def __init__(self, state: BroadcastState):
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        if core.size() == 1:
            return
        self.state.on_train_begin()
        # Where BackupAndRestore leaves it for `fit`, which reads it next.
        epoch = self.model._initial_epoch
        known = np.array([-1 if epoch is None else epoch])
        (epoch,) = core.broadcast(known, self.state.root_rank, name="state: initial epoch").tolist()
        self.model._initial_epoch = None if epoch < 0 else epoch


def digest(variables: Sequence[keras.Variable], salt: object = None) -> np.ndarray:
    """16 bytes that differ, but for chance, if any bit of the variables does."""
    hashed = hashlib.blake2b(repr(salt).encode(), digest_size=16)
    for variable in variables:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        hashed.update(value.reshape(-1).view(np.uint8))
    return np.frombuffer(hashed.digest(), np.uint8)


def _is_seed(variable: keras.Variable) -> bool:
    return variable.name == "seed_generator_state"
