"""What happens between two syncs, whatever optimizer takes the steps (the paper's section 5.2).

A window starts at weights that are equal on all ranks, its `start`; every rank takes local steps of
its own; at its end the change since the start, the delta, is combined over the ranks and every rank
goes on from start + combined delta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adasum import collectives
from tf_adasum.core import Op

Variable = Any
"""A `tf.Variable` or a `keras.Variable`."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The state of a window and what is done to it; works eagerly, in graphs and under XLA.

    All of the variables belong in the optimizer's checkpoint: a window may be saved half-way.
    Every rank makes the same calls, but not always after the same number of steps.
    """

    variables: Sequence[Variable]
    """The weights."""
    starts: Sequence[Variable]
    """What all ranks held at the last sync; of the same shapes and dtypes."""
    states: Sequence[Variable]
    """Floating-point variables that are averaged over the ranks at each sync."""
    started: Variable
    """int64 scalar: whether the ranks' weights were made equal; 0 at first."""
    local_step: Variable
    """int64 scalar: steps since the last sync; 0 at first."""
    syncs: Variable
    """int64 scalar: syncs done; 0 at first."""
    skips: Variable
    """int64 scalar: how many syncs in a row this rank's delta was not finite; 0 at first."""
    orthogonality: Variable
    """float32, one element a variable: of the last sync (the paper's section 3.6)."""
    local_steps: int
    """Steps in a window."""
    op: Op
    nonfinite: str
    """"skip" or "raise"."""
    name: str
    """Compared over the ranks and shown in errors."""

    def begin_step(self) -> tf.Tensor:
        """To be called before each step of the wrapped optimizer.

        Returns:
            A boolean scalar: whether the step's gradient is good. The very first one of a rank is
            not if it was computed at weights that were not rank 0's, which the rank now has.
        """
        usable = tf.cond(
            tf.equal(tf.convert_to_tensor(self.started), 0),
            self._start_from_root,
            lambda: tf.constant(True),
        )
        # Not when the last window ends: since then the user may have loaded other weights.
        tf.cond(tf.equal(tf.convert_to_tensor(self.local_step), 0), self._keep_start, nothing)
        return usable

    def end_step(self, steps: tf.Tensor) -> None:
        """To be called after each step: syncs if it was the last one of the window.

        Args:
            steps: int64 scalar, how many steps were really taken: 0 where the wrapped optimizer
            only
                accumulated the gradient, or skipped it.
        """
        self.local_step.assign_add(steps)
        is_last = tf.convert_to_tensor(self.local_step) >= self.local_steps
        tf.cond(is_last, lambda: self._sync(flush=False), nothing)

    def flush(self) -> None:
        """Syncs now, if any rank took a step since the last sync.

        A rank that gets here goes on taking part in the others' syncs, with a delta of zero, until
        all ranks are here: so ranks may come after different numbers of steps.
        """
        self._sync(flush=True)

    def _start_from_root(self) -> tf.Tensor:
        changed = collectives.broadcast_variables(
            self.variables, name=f"{self.name}: first weights"
        )
        self.started.assign(1)
        return tf.logical_not(changed)

    def _keep_start(self) -> None:
        for start, variable in zip(self.starts, self.variables, strict=True):
            start.assign(variable)

    def _sync(self, flush: bool) -> None:
        syncs, skipped, orthogonality = collectives.ops().adasum_sync(
            collectives.handles(self.variables),
            collectives.handles(self.starts),
            collectives.handles(self.states),
            pending=tf.convert_to_tensor(self.local_step) > 0,
            skips_in_a_row=tf.convert_to_tensor(self.skips),
            order=collectives.order(),
            op=self.op.value,
            flush=flush,
            nonfinite=self.nonfinite,
            call_name=self.name,
        )
        tf.cond(syncs > 0, lambda: self._note(syncs, skipped, orthogonality), nothing)

    def _note(self, syncs: tf.Tensor, skipped: tf.Tensor, orthogonality: tf.Tensor) -> None:
        # A sum of changes can leave what the wrapped optimizer's own projection had ensured.
        for variable in self.variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.local_step.assign(tf.zeros((), tf.int64))
        self.syncs.assign_add(syncs)
        skips = tf.convert_to_tensor(self.skips) + 1
        self.skips.assign(tf.where(skipped, skips, tf.zeros_like(skips)))
        self.orthogonality.assign(orthogonality)


def nothing() -> None:
    """The branch of a tf.cond that has nothing to do."""
