"""What happens between two syncs, whatever optimizer takes the steps (the paper's section 5.2).

A window starts at weights that are equal on all ranks, its `start`; every rank takes local steps of
its own; at its end the change since the start, the delta, is combined over the ranks and every rank
goes on from start + combined delta.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_adasum import collectives, core
from tf_adasum.core import Algorithm, Op
from tf_adasum.reductions import check_fusion_threshold, choose_algorithm

Variable = Any
"""A `tf.Variable` or a `keras.Variable`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user chooses for an optimizer; `AdasumOptimizer` says what each means.

    Raises:
        ValueError: if one of them is something else.
    """

    local_steps: int = 1
    op: Op | str = Op.ADASUM
    algorithm: Algorithm | str | None = None
    fusion_threshold: int | None = None
    nonfinite: str = "skip"
    average_inner_state: bool = False
    wire_dtype: str | None = None
    error_feedback: bool = False
    partition_state: bool = False
    overlap: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        steps = self.local_steps
        if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"`local_steps` must be a positive integer. Received: local_steps={steps!r}"
            )
        object.__setattr__(self, "local_steps", int(steps))
        object.__setattr__(self, "op", Op(self.op))
        choose_algorithm(self.algorithm)
        check_fusion_threshold(self.fusion_threshold)
        if self.nonfinite not in ("skip", "raise"):
            raise ValueError(
                f"`nonfinite` must be 'skip' or 'raise'. Received: nonfinite={self.nonfinite!r}"
            )
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                "`wire_dtype` must be None, 'float16' or 'bfloat16'. Received: "
                f"wire_dtype={self.wire_dtype!r}"
            )
        if self.partition_state:
            self._check_partition()
        if self.overlap and self.wire_dtype is not None:
            raise ValueError("`overlap` and `wire_dtype` do not go together yet.")
        if self.overlap and self.average_inner_state:
            raise ValueError(
                "`overlap` and `average_inner_state` do not go together: while a sync is under "
                "way, each rank's own state moves on."
            )
        if self.overlap and self.elastic:
            raise ValueError(
                "`overlap` and `elastic` do not go together: while a sync is under way, no rank "
                "holds the weights of the last one."
            )

    def _check_partition(self) -> None:
        others = {
            "average_inner_state": self.average_inner_state,
            "wire_dtype": self.wire_dtype is not None,
            "overlap": self.overlap,
            "elastic": self.elastic,
        }
        for option, is_on in others.items():
            if is_on:
                raise ValueError(f"`partition_state` and `{option}` do not go together yet.")
        hierarchical = (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_SUM)
        if self.algorithm is not None and Algorithm(self.algorithm) not in hierarchical:
            raise ValueError(
                "With `partition_state` the ranks of a host are one worker: `algorithm` must be "
                "None or 'hierarchical', for the mean of their gradients, or 'hierarchical_sum'. "
                f"Received: algorithm={Algorithm(self.algorithm).value!r}"
            )

    def config(self) -> dict[str, Any]:
        """For `get_config`: the arguments, as JSON has them."""
        config = dataclasses.asdict(self)
        # What the environment chose is not kept: another one may choose otherwise.
        algorithm = None if self.algorithm is None else Algorithm(self.algorithm).value
        return {**config, "op": self.op.value, "algorithm": algorithm}

    @property
    def agreed(self) -> str:
        """What has to be equal on all ranks beyond what the core compares."""
        return ", ".join(
            f"{option}={getattr(self, option)}"
            for option in (
                "local_steps",
                "nonfinite",
                "wire_dtype",
                "partition_state",
                "overlap",
                "elastic",
            )
        )

    def take_effect(self) -> None:
        """What has to be done before the ranks meet for the first time.

        Raises:
            RuntimeError: with `elastic`, if there are several ranks and MPI is not fault tolerant.
        """
        if self.elastic:
            core.go_on_without_the_dead()


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
    """int64 scalar: 0 at first, then 2 in a window and 1 between two."""
    local_step: Variable
    """int64 scalar: steps since the last sync; 0 at first."""
    syncs: Variable
    """int64 scalar: syncs done; 0 at first."""
    skips: Variable
    """int64 scalar: how many syncs in a row this rank's delta was not finite; 0 at first."""
    orthogonality: Variable
    """float32, one element a variable: of the last sync (the paper's section 3.6)."""
    options: Options
    name: str
    """Compared over the ranks and shown in errors, like the options and the variables' names."""
    flight: int
    """Of `new_flight`: tells apart the optimizers of this process whose syncs overlap."""
    wire_scale: Variable | None = None
    """With `wire_dtype`: int64, two elements, `first_wire_scale` at first."""
    residuals: Sequence[Variable] = ()
    """What rounding to `wire_dtype` dropped; one like each variable, zeros at first, or none."""
    inner_variables: Sequence[Variable] = ()
    """The wrapped optimizer's, made equal with the weights: some keep weights among them."""

    def begin_step(self) -> tf.Tensor:
        """To be called before each step of the wrapped optimizer.

        Returns:
            A boolean scalar: whether the step's gradient is good. The very first one of a rank is
            not if it was computed at weights that were not rank 0's, which the rank now has.

        Raises:
            ValueError: if a variable has a dtype in which changes cannot be combined.
        """
        usable = self._start()
        self._open()
        return usable

    def end_step(self, steps: tf.Tensor) -> None:
        """To be called after each step: syncs if it was the last one of the window.

        Args:
            steps: int64 scalar, how many steps were really taken: 0 where the wrapped optimizer
                only accumulated the gradient, or skipped it.
        """
        self.local_step.assign_add(steps)
        is_last = tf.convert_to_tensor(self.local_step) >= self.options.local_steps
        tf.cond(is_last, lambda: self._sync(flush=False), nothing)

    def flush(self) -> None:
        """Syncs now, if any rank took a step since the last sync.

        A rank that gets here goes on taking part in the others' syncs, with a delta of zero, until
        all ranks are here: so ranks may come after different numbers of steps.
        """
        # A rank that has skipped all of its steps has not met the others yet.
        self._start()
        self._sync(flush=True)

    def _start(self) -> tf.Tensor:
        """Whether this rank's weights are those that the ranks started from."""
        not_started = tf.equal(tf.convert_to_tensor(self.started), 0)
        return tf.cond(not_started, self._start_from_root, lambda: tf.constant(True))

    def _start_from_root(self) -> tf.Tensor:
        _check_reducible(self.variables)
        changed = collectives.broadcast_variables(
            self.variables,
            name=f"{self._call_name}, first weights",
            variable_names=names(self.variables),
        )
        collectives.broadcast_variables(
            self.inner_variables,
            name=f"{self._call_name}, first optimizer state",
        )
        self.started.assign(1)
        return tf.logical_not(changed)

    @property
    def _call_name(self) -> str:
        return f"{self.name}, {self.options.agreed}"

    def _open(self) -> None:
        """Keeps the start of a new window, unless this is in one already.

        Not when the last window ends: since then the user may have loaded other weights. And once
        in a window, also where the first gradients are only accumulated: constraints and averages
        may change the weights even then.
        """
        is_open = tf.equal(tf.convert_to_tensor(self.started), 2)
        tf.cond(is_open, nothing, self._keep_start)

    def _keep_start(self) -> None:
        for start, variable in zip(self.starts, self.variables, strict=True):
            start.assign(variable)
        self.started.assign(2)

    def _sync(self, flush: bool) -> None:
        if all(variable.constraint is None for variable in self.variables):
            self._reduce(flush)
            return

        # One by one: what a constraint makes of a round's result is what the next one starts from.
        def one_round(_: tf.Tensor) -> list[tf.Tensor]:
            going_on = collectives.allreduce(
                tf.constant(0.0 if flush else 1.0), Op.SUM, f"{self.name}: ranks that go on"
            )
            self._reduce(flush=False)
            return [tf.logical_and(flush, going_on > 0)]

        tf.while_loop(lambda again: again, one_round, [tf.constant(True)])

    def _reduce(self, flush: bool) -> None:
        self._open()
        resources = collectives.handles(self.variables)
        syncs, skipped, orthogonality, wire_scale = collectives.ops().adasum_sync(
            resources,
            collectives.handles(self.starts),
            collectives.handles(self.states),
            collectives.handles(self.residuals),
            pending=tf.convert_to_tensor(self.local_step) > 0,
            wire_scale=tf.zeros(2, tf.int64)
            if self.wire_scale is None
            else tf.convert_to_tensor(self.wire_scale),
            wire_dtype=self.options.wire_dtype or "",
            skips_in_a_row=tf.convert_to_tensor(self.skips),
            order=collectives.order(resources),
            op=self.options.op.value,
            algorithm=choose_algorithm(self.options.algorithm).value,
            fusion_threshold=check_fusion_threshold(self.options.fusion_threshold),
            flush=flush,
            flight=self.flight if self.options.overlap else -1,
            nonfinite=self.options.nonfinite,
            names=names(self.variables),
            call_name=self._call_name,
        )
        if flush or not self.options.overlap:
            # Also where nothing was to be done: the user may load other weights before the next
            # step.
            self.started.assign(1)
        # Steps are counted from here, also where an earlier change is still under way, or where
        # this window's are lost because a rank has died in the midst of its sync: the weights are
        # those of the last one then.
        self.local_step.assign(tf.zeros((), tf.int64))
        if self.wire_scale is not None:
            self.wire_scale.assign(wire_scale)
        tf.cond(syncs > 0, lambda: self._note(syncs, skipped, orthogonality), nothing)

    def _note(self, syncs: tf.Tensor, skipped: tf.Tensor, orthogonality: tf.Tensor) -> None:
        # A sum of changes can leave what the wrapped optimizer's own projection had ensured.
        for variable in self.variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.syncs.assign_add(syncs)
        skips = tf.convert_to_tensor(self.skips) + 1
        self.skips.assign(tf.where(skipped, skips, tf.zeros_like(skips)))
        self.orthogonality.assign(orthogonality)


def names(variables: Sequence[Variable]) -> list[str]:
    """The variables' paths in a form that is the same on all ranks.

    Keras numbers layers through a process's life: what is `dense` and `dense_1` on one rank may be
    `dense_4` and `dense_5` on another, which built other models before. So the numbers at the end
    of names are replaced by their order among those that occur.
    """
    paths = [getattr(variable, "path", None) or variable.name for variable in variables]
    parts = [[_split_number(part) for part in path.split("/")] for path in paths]
    occurring: dict[str, set[int]] = {}
    for base, number in itertools.chain.from_iterable(parts):
        occurring.setdefault(base, set()).add(number)
    order = {base: sorted(numbers) for base, numbers in occurring.items()}
    return [
        "/".join(
            f"{base}_{order[base].index(number)}" if len(order[base]) > 1 else base
            for base, number in path
        )
        for path in parts
    ]


def _split_number(part: str) -> tuple[str, int]:
    base, number = re.fullmatch(r"(.*?)(?:_(\d+))?", part).groups()
    return base, -1 if number is None else int(number)


def first_wire_scale(options: Options) -> list[int]:
    """Exponent and good syncs: changes up to 64 fit float16 then, and it grows from there."""
    return [10 if options.wire_dtype == "float16" else 0, 0]


_flights = itertools.count()


def new_flight() -> int:
    """A number for each optimizer of this process, which no other process has to know."""
    return next(_flights)


def check_variables(options: Options, variables: Sequence[Variable]) -> None:
    """Raises ValueError where an option does not go with the variables."""
    if options.overlap and any(variable.constraint is not None for variable in variables):
        raise ValueError(
            "`overlap` and constraints of variables do not go together: what a constraint makes of "
            "a rank's own weights is no change that can be combined later."
        )


def _check_reducible(variables: Sequence[Variable]) -> None:
    for variable, name in zip(variables, names(variables), strict=True):
        dtype = tf.as_dtype(variable.dtype)
        if dtype.base_dtype not in collectives.REDUCIBLE:
            raise ValueError(
                "Several ranks can train variables of float16, bfloat16, float32 or float64 "
                f"together. Received: {name!r} of dtype {dtype.name}"
            )


def check_strategy() -> None:
    """Raises ValueError under a tf.distribute strategy that may have several replicas."""
    strategy = tf.distribute.get_strategy()
    fitting = (tf.distribute.OneDeviceStrategy, tf.compat.v1.distribute.OneDeviceStrategy)
    if tf.distribute.has_strategy() and not isinstance(strategy, fitting):
        raise ValueError(
            "With tf_adasum every rank is a process of its own that trains on one device, and "
            "tf_adasum brings the ranks together: leave the strategy out, or use "
            "tf.distribute.OneDeviceStrategy, and start one process for each device, as in "
            f"`mpirun -np 4 python train.py`. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas"
        )


def nothing() -> None:
    """The branch of a tf.cond that has nothing to do."""
