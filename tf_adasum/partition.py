"""The parallelised update (the paper's section 4.3): a host's ranks share one replica's work.

The ranks of a host are one worker of Adasum, whose batch is all of theirs. Each owns some of the
variables, whole ones: it gets the host's gradients of them, keeps their optimizer's state, updates
them, and combines their change with those of their owners on the other hosts; then the host's ranks
read from each other what they do not own.

As many ranks of each host own variables as the host with the fewest ranks has, its *lanes*, and a
variable has the same lane on every host.

A rank's wrapped optimizer is built on as many variables as the model has. Those that it does not
own have small stand-ins there, so that all ranks' optimizers have the same variables, of which
each rank has some in full. A stand-in has the same size in every dimension, one that no dimension
of a variable has: so what an optimizer keeps for one, be it for each row only, is told apart from
what it keeps for the variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adasum import collectives, core, window
from tf_adasum.core import Algorithm
from tf_adasum.reductions import check_fusion_threshold, choose_algorithm


def owners_of(shapes: Sequence[Sequence[int]], item_bytes: Sequence[int], lanes: int) -> list[int]:
    """The lane of each variable's owner: the largest first, each to the lane that has least.

    So no lane has more than its share and the largest variable. Scalars, whose stand-ins look like
    them, are lane 0's.
    """
    sizes = [
        int(np.prod(shape, dtype=np.int64)) * bytes
        for shape, bytes in zip(shapes, item_bytes, strict=True)
    ]
    loads = [0] * lanes
    owner_of = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner_of[i] = loads.index(min(loads)) if len(shapes[i]) > 0 else 0
        loads[owner_of[i]] += sizes[i]
    return owner_of


class Layout:
    """Which variables this rank owns, and what stands for the others."""

    def __init__(self, variables: Sequence[keras.Variable]):
        self.lanes, self.lane = core.partition_place()
        dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
        self.owner_of = owners_of(
            [variable.shape for variable in variables],
            [dtype.size for dtype in dtypes],
            self.lanes,
        )
        self.names = window.names(variables)
        taken = {size for variable in variables for size in variable.shape}
        self._stand_in_size = min(set(range(1, len(taken) + 2)) - taken)
        self.local_variables = [
            variable if self.is_mine(i) else self._stand_in(variable)
            for i, variable in enumerate(variables)
        ]
        """For the wrapped optimizer: this rank's variables, and stand-ins for the others."""

    def is_mine(self, i: int) -> bool:
        return self.owner_of[i] == self.lane

    def mine(self, of_all: Sequence[Any]) -> list[Any]:
        """Those of as many things as there are variables that belong to this rank's."""
        return [each for i, each in enumerate(of_all) if self.is_mine(i)]

    def _stand_in(self, variable: keras.Variable) -> keras.Variable:
        shape = (self._stand_in_size,) * len(variable.shape)
        return keras.Variable("zeros", shape=shape, dtype=variable.dtype, name=variable.name)

    def is_stand_in(self, variable: keras.Variable) -> bool:
        """Whether a variable of the wrapped optimizer is one, or belongs to one."""
        return len(variable.shape) > 0 and set(variable.shape) == {self._stand_in_size}


def check(options: window.Options, optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Raises ValueError where what is partitioned cannot be."""
    if any(variable.constraint is not None for variable in variables):
        raise ValueError(
            "`partition_state` and constraints of variables do not go together yet: a constraint "
            "would have to be applied by all ranks after each sync of a flush."
        )
    if optimizer.global_clipnorm and optimizer.gradient_accumulation_steps:
        raise ValueError(
            "`partition_state` does not go together with both `global_clipnorm` and "
            "`gradient_accumulation_steps` of the wrapped optimizer: the norm of what was "
            "accumulated is known to no rank."
        )


@dataclasses.dataclass(frozen=True)
class PartitionedWindow(window.Window):
    """A window whose steps are those of a host rather than of a rank.

    `starts` holds that of each variable that this rank owns, and something else for others.
    """

    layout: Layout | None = None

    def _start_from_root(self) -> tf.Tensor:
        window._check_reducible(self.variables)
        changed = collectives.broadcast_variables(
            self.variables,
            name=f"{self._call_name}, first weights",
            variable_names=self.layout.names,
        )
        self.started.assign(1)
        return tf.logical_not(changed)

    def _keep_start(self) -> None:
        for start, variable in zip(
            self.layout.mine(self.starts), self.layout.mine(self.variables), strict=True
        ):
            start.assign(variable)
        self.started.assign(2)

    def end_step(self, steps: tf.Tensor) -> None:
        """To be called on all ranks of the host after each step, with the same number."""
        self.local_step.assign_add(steps)
        is_last = tf.convert_to_tensor(self.local_step) >= self.options.local_steps
        tf.cond(is_last, lambda: self._reduce(flush=False), self.share)

    def end(self) -> None:
        """Syncs with the other hosts, until none of them takes steps any more."""
        self._reduce(flush=True)

    def share(self) -> None:
        """Gives the host's ranks each other's variables."""
        resources = collectives.handles(self.variables)
        collectives.ops().adasum_share_from_owners(
            resources,
            collectives.order(resources),
            owner_of=self.layout.owner_of,
            fusion_threshold=check_fusion_threshold(self.options.fusion_threshold),
            names=self.layout.names,
            call_name=self._call_name,
        )

    def host_sum(self, numbers: Sequence[Any], what: str) -> tf.Tensor:
        """The sum of each number over the host's ranks, as float64."""
        return collectives.ops().adasum_host_sum(
            tf.stack([tf.cast(number, tf.float64) for number in numbers]),
            collectives.order(),
            call_name=f"{self._call_name}, {what}",
        )

    def reduce_to_owners(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over the host's ranks of those tensors whose variables this rank owns."""
        dtypes = self.layout.mine([tensor.dtype for tensor in tensors])
        owned = collectives.ops().adasum_reduce_to_owners(
            tensors,
            collectives.order(),
            Owned=dtypes,
            owner_of=self.layout.owner_of,
            lane=self.layout.lane,
            fusion_threshold=check_fusion_threshold(self.options.fusion_threshold),
            names=self.layout.names,
            call_name=f"{self._call_name}, gradients",
        )
        return list(owned) if dtypes else []

    def _reduce(self, flush: bool) -> None:
        self._open()
        resources = collectives.handles(self.variables)
        syncs, skipped, orthogonality = collectives.ops().adasum_partition_sync(
            resources,
            collectives.handles(self.layout.mine(self.starts)),
            pending=tf.convert_to_tensor(self.local_step) > 0,
            skips_in_a_row=tf.convert_to_tensor(self.skips),
            order=collectives.order(resources),
            owner_of=self.layout.owner_of,
            lane=self.layout.lane,
            op=self.options.op.value,
            algorithm="rvh",
            fusion_threshold=check_fusion_threshold(self.options.fusion_threshold),
            flush=flush,
            nonfinite=self.options.nonfinite,
            names=self.layout.names,
            call_name=self._call_name,
        )
        self.started.assign(1)
        self.local_step.assign(tf.zeros((), tf.int64))
        tf.cond(syncs > 0, lambda: self._note(syncs, skipped, orthogonality), window.nothing)


class Update:
    """The steps of the wrapped optimizer, taken by the ranks of a host together."""

    def __init__(
        self,
        window: PartitionedWindow,
        inner_optimizer: keras.optimizers.Optimizer,
        innermost: keras.optimizers.Optimizer,
        skip_step: Callable[[], None],
    ):
        self._window = window
        self._inner = inner_optimizer
        self._innermost = innermost
        self._skip_step = skip_step
        self._layout = window.layout

    def step(self, grads: Sequence[Any]) -> None:
        """Takes a step with the mean (or sum) of the host's gradients; every rank calls it."""
        own = [
            _dense(grad, variable)
            for grad, variable in zip(grads, self._window.variables, strict=True)
        ]
        has_gradient = [grad is not None for grad in grads]
        # Where the step's function also fetches the batch, and there is none left, the others must
        # not be told that this rank takes a step.
        with tf.control_dependencies(own):
            usable = self._window.begin_step()
            _, usable_ranks = tf.unstack(self._meet(stepping=True, usable=usable))
        own = tf.cond(usable, lambda: own, lambda: [tf.zeros_like(grad) for grad in own])
        self._take(own, usable_ranks, has_gradient)

    def flush(self) -> None:
        """Takes part in the steps of the host's other ranks until they come here too."""
        self._window._start()

        def one_step(_: tf.Tensor) -> list[tf.Tensor]:
            stepping, usable_ranks = tf.unstack(self._meet(stepping=False, usable=False))
            tf.cond(stepping > 0, lambda: self._take_without(usable_ranks), window.nothing)
            return [stepping > 0]

        tf.while_loop(lambda going_on: going_on, one_step, [tf.constant(True)])
        self._window.end()

    def _take_without(self, usable_ranks: tf.Tensor) -> None:
        self._window._open()
        zeros = [tf.zeros(v.shape, v.dtype) for v in self._window.variables]
        self._take(zeros, usable_ranks, [True] * len(zeros))

    def _meet(self, stepping: bool, usable: Any) -> tf.Tensor:
        """How many of the host's ranks take a step, and how many have a good gradient for it."""
        return self._window.host_sum([float(stepping), usable], "ranks that take a step")

    def _take(
        self, grads: Sequence[tf.Tensor], usable_ranks: tf.Tensor, has_gradient: Sequence[bool]
    ) -> None:
        sums = self._window.reduce_to_owners(grads)
        before = self._updates()
        tf.cond(
            usable_ranks > 0,
            lambda: self._apply(sums, usable_ranks, self._layout.mine(has_gradient)),
            self._skip_step,
        )
        self._window.end_step(self._updates() - before)

    def _updates(self) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(self._innermost.iterations), tf.int64)

    def _apply(
        self, sums: Sequence[tf.Tensor], ranks: tf.Tensor, has_gradient: Sequence[bool]
    ) -> None:
        # Keras wants all of them to be made in this branch.
        takes_sum = choose_algorithm(self._window.options.algorithm) == Algorithm.HIERARCHICAL_SUM
        sums = [tf.identity(g) if takes_sum else g / tf.cast(ranks, g.dtype) for g in sums]
        factor = self._factor(sums)
        mine = iter(zip(sums, has_gradient, strict=True))
        grads: list[tf.Tensor | None] = []
        for i, variable in enumerate(self._layout.local_variables):
            # Also stand-ins have one, so that a step counts, or is skipped, on all ranks alike.
            grad, has = (
                next(mine)
                if self._layout.is_mine(i)
                else (tf.zeros(variable.shape, variable.dtype), True)
            )
            if factor is not None:
                grad *= tf.cast(factor, grad.dtype)
            grads.append(grad if has else None)
        self._inner.apply(grads, self._layout.local_variables)

    def _factor(self, grads: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """What all gradients have to be multiplied with for what depends on all of them, which a
        rank's wrapped optimizer does not see: then it has nothing to do there."""
        scales_loss = self._inner is not self._innermost
        largest_norm = self._innermost.global_clipnorm
        if not scales_loss and not largest_norm:
            return None
        finite = [tf.reduce_all(tf.math.is_finite(grad)) for grad in grads]
        squares = [tf.reduce_sum(tf.square(tf.cast(grad, tf.float64))) for grad in grads]
        bad, square = tf.unstack(
            self._window.host_sum(
                [
                    tf.reduce_any(tf.logical_not(tf.stack(finite or [True]))),
                    tf.add_n(squares or [tf.zeros((), tf.float64)]),
                ],
                "norm of the gradients",
            )
        )
        factor = tf.ones((), tf.float64)
        if largest_norm:
            norm = tf.sqrt(square) / self._loss_scale()
            factor = largest_norm * tf.minimum(1 / norm, 1 / largest_norm)
        if scales_loss:
            # A loss scale is lowered, and the step skipped, on all of the host's ranks or on none.
            factor = tf.where(bad > 0, tf.constant(float("nan"), tf.float64), factor)
        return factor

    def _loss_scale(self) -> tf.Tensor:
        scale = getattr(self._inner, "dynamic_scale", None)
        factor = self._innermost.loss_scale_factor
        return tf.cast(
            tf.convert_to_tensor(scale) if scale is not None else factor or 1.0, tf.float64
        )


def _dense(grad: Any, variable: keras.Variable) -> tf.Tensor:
    if grad is None:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.cast(tf.convert_to_tensor(grad), variable.dtype)


def gather(layout: Layout, variables: Sequence[keras.Variable]) -> list[np.ndarray] | None:
    """Each variable of an optimizer as its owner on the first host has it, for rank 0; or None.

    Every rank calls it.
    """
    is_source = core.cross_rank() == 0 and layout.lane < layout.lanes
    has = [is_source and not layout.is_stand_in(v) for v in variables]
    owners = core.allgather(np.array([has]), name="state: owners").argmax(axis=0)
    state = []
    for i, (variable, owner) in enumerate(zip(variables, owners, strict=True)):
        value = keras.ops.convert_to_numpy(variable)
        is_mine = core.rank() == owner
        shape = core.allgather(
            np.array([value.shape] if is_mine else np.empty((0, value.ndim)), np.int64),
            name=f"state: shape of {i}",
        )[0]
        flat = core.allgather(
            value.reshape(-1) if is_mine else np.empty(0, value.dtype), name=f"state: {i}"
        )
        if core.rank() == 0:
            state.append(flat.reshape(shape))
    return state if core.rank() == 0 else None


def spread(
    layout: Layout, variables: Sequence[keras.Variable], state: Sequence[np.ndarray] | None
) -> None:
    """Gives every rank what it owns of a whole state that some ranks have; the first one's counts.

    Every rank calls it. Nothing is done where no rank has one.
    """
    has = core.allgather(np.array([state is not None]), name="state: has one")
    if not has.any():
        return
    root = int(has.argmax())
    for i, variable in enumerate(variables):
        own = keras.ops.convert_to_numpy(variable)
        value = np.asarray(state[i] if core.rank() == root else 0, own.dtype)
        shape = value.shape if core.rank() == root else (0,) * own.ndim
        shape = core.broadcast(np.array(shape, np.int64), root, name=f"state: shape of {i}")
        if core.rank() != root:
            value = np.empty(shape, own.dtype)
        take(layout, variable, core.broadcast(value, root, name=f"state: {i}"))


def take(layout: Layout, variable: keras.Variable, value: np.ndarray) -> None:
    """Assigns a value that is the variable's, but not where that is only a stand-in."""
    if not layout.is_stand_in(variable):
        variable.assign(value)
