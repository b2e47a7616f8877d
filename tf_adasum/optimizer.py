"""A Keras optimizer that makes another one data-parallel (the paper's sections 4.1, 5.2)."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_adasum import collectives, core, native, partition, window
from tf_adasum.core import Adasum, Algorithm, Average, Op

# Before anything else fails in a way that does not tell.
native.check_keras(keras.__version__)


@keras.saving.register_keras_serializable(package="tf_adasum")
class AdasumOptimizer(keras.optimizers.Optimizer):
    """Makes training with a Keras optimizer data-parallel over all MPI ranks.

    Every rank takes `local_steps` steps of the wrapped optimizer on its own data. Then the change
    of the weights since the last sync, the delta, is combined over all ranks, variable by
    variable, and every rank goes on from the start of the window plus the combined delta (the
    paper's Figure 3). The effective batch is ranks x batch x local_steps. What the wrapped
    optimizer keeps (momentum, ...) stays each rank's own unless `average_inner_state` is set. On
    one rank it is the wrapped optimizer, bit for bit.

    A step is an update of the weights: with the wrapped optimizer's `gradient_accumulation_steps`
    that is every so many gradients, and with loss scaling, on either side of this wrapper, one
    whose gradient was finite. A rank that skips a step gets to the window's end one batch later
    than the others, who wait for it.

    The weights are made equal to rank 0's at the first step; a rank whose weights were others
    drops the gradient that it computed at them, though the step counts. When `fit` ends, all ranks
    hold the same weights. Each rank has to be given its own data, see `shard`.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or what `keras.optimizers.get` takes.
        local_steps: positive int, steps of the wrapped optimizer between two syncs.
        op: `Adasum`; `Average`, which is local SGD; or `Sum`.
        algorithm: "rvh", the paper's Algorithm 1 over all ranks; "ring", one rank after the other;
            "hierarchical", the mean of each host's ranks, then Adasum over the hosts; or
            "hierarchical_sum", likewise with their sum. By default what the environment's
            `TF_ADASUM_ALGORITHM` names, "hierarchical" where `HOROVOD_HIERARCHICAL_ALLREDUCE` is
            on, or else "rvh".
        fusion_threshold: bytes. Weights are reduced in buckets of at most so many bytes, or of one
            weight; two buckets are in memory at a time. By default the environment's
            `TF_ADASUM_FUSION_THRESHOLD` or `HOROVOD_FUSION_THRESHOLD`, or else 4 MiB on one host
            and 16 MiB over several.
        nonfinite: what becomes of a rank's delta that holds NaN or infinity: "skip" counts it as
            zero, with a warning, and the rank goes on from the others' weights; the third time in
            a row it is an error on all ranks. "raise" makes it one the first time.
        average_inner_state: whether what the wrapped optimizer keeps for each weight (momentum,
            ...) is averaged over the ranks at each sync, for as many bytes again for each. With
            momentum and several local steps it was better wherever it was measured
            (docs/choosing.md).
        overlap: whether a sync runs beside the next window's local steps, on a thread of its own.
            Its result is applied when that window ends, so it comes one window late: the rank goes
            on from its own weights, and its own change is then replaced by the combined one. When
            `fit` ends, or at `sync()`, nothing is left under way. Takes memory for two more copies
            of the trainable weights. Not with constraints, nor with `average_inner_state`.
        wire_dtype: "float16" or "bfloat16": float32 changes are sent as that, in half the bytes
            (the paper's section 4.4.1); dot products are still summed in float64. For float16 they
            are scaled by a power of two that is part of the optimizer's state: it grows after 200
            syncs, and a sync that does not fit is done again at half of it, so nothing is lost.
            Not with `overlap`, and not yet for variables on a GPU.
        error_feedback: whether what rounding to `wire_dtype` drops is kept for the rank's next
            change; takes one more copy of the weights. Made no difference where it was measured
            (docs/performance.md).
        partition_state: whether the ranks of a host share one replica's work (the paper's section
            4.3). They are then one worker of Adasum: each step takes the mean of their gradients
            (their sum with `algorithm="hierarchical_sum"`). Each weight has an owner among them,
            which alone keeps what the wrapped optimizer keeps for it, updates it, and combines its
            change with other hosts; so that state takes a fraction of the memory. Every rank's
            callbacks and checkpoints see whole weights; before the optimizer is saved all ranks
            call `gather_state`, which `callbacks.standard()` do. Not with constraints,
            `average_inner_state`, `wire_dtype`, `overlap` or `elastic`, nor under XLA, nor for
            variables on a GPU yet.
        elastic: whether the other ranks go on when the process of one dies; else the job ends. For
            Open MPI 5 started by `mpirun --with-ft ulfm`. They get new numbers, in the same order,
            and go on with each other's changes of the weights; where the rank died in the midst of
            a sync, from the weights of the last one, so that at most `local_steps` steps are lost.
            What the wrapped optimizer keeps stays each rank's own, and the dead one's is gone. All
            collectives of this process then work without the dead. Not with `overlap`. See
            `callbacks.OnShrink` and docs/reliability.md.
        name: the optimizer's name.

    Example:

    ```python
    optimizer = AdasumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), local_steps=16)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(shard(dataset), callbacks=callbacks.standard())
    ```

    Raises:
        ValueError: if an option is something else, the optimizer is wrapped already, or it is used
            under another `tf.distribute` strategy than OneDeviceStrategy.
        RuntimeError: if Keras does not run on TensorFlow, or if several ranks are to be `elastic`
            and MPI is not fault tolerant.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        local_steps: int = 1,
        *,
        op: Op | str = Adasum,
        algorithm: Algorithm | str | None = None,
        fusion_threshold: int | None = None,
        nonfinite: str = "skip",
        average_inner_state: bool = False,
        wire_dtype: str | None = None,
        error_feedback: bool = False,
        partition_state: bool = False,
        overlap: bool = False,
        elastic: bool = False,
        name: str | None = None,
    ):
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "AdasumOptimizer needs Keras on TensorFlow. "
                f"Received: KERAS_BACKEND={keras.backend.backend()}"
            )
        options = window.Options(
            local_steps=local_steps,
            op=op,
            algorithm=algorithm,
            fusion_threshold=fusion_threshold,
            nonfinite=nonfinite,
            average_inner_state=average_inner_state,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
            partition_state=partition_state,
            overlap=overlap,
            elastic=elastic,
        )
        window.check_strategy()
        options.take_effect()
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        if inner_optimizer is None:
            raise ValueError("`inner_optimizer` must be an optimizer. Received: None")
        if find(inner_optimizer) is not None:
            raise ValueError(f"`inner_optimizer` is wrapped already. Received: {inner_optimizer!r}")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self._options = options
        self._flight = window.new_flight()
        self._layout: partition.Layout | None = None
        self._gathered: tuple[list[int], list[Any]] | None = None
        self._loaded: list[Any] | None = None
        # Keras saves attributes that are optimizers too; all that they have is saved here already.
        for part in [inner_optimizer, *self._parts]:
            part.save_own_variables = part.load_own_variables = _has_nothing_of_its_own

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state: counters, and one `start` variable for each trainable variable.

        It is the same whatever the number of ranks, so a checkpoint fits any.
        """
        if self.built:
            return
        window.check_variables(self._options, variables)
        own = variables
        if self._options.partition_state and core.size() > 1:
            partition.check(self._options, self._innermost, variables)
            self._layout = partition.Layout(variables)
            own = self._layout.local_variables
        self._counters = {
            name: self.add_variable((), dtype="int64", name=name)
            for name in ("started", "local_step", "syncs", "skips")
        }
        self.orthogonality = self.add_variable(
            (len(variables),), dtype="float32", name="orthogonality"
        )
        self._starts = [self.add_variable_from_reference(v, name="start") for v in own]
        self._wire_scale, self._residuals = None, []
        if self._options.wire_dtype is not None:
            # Not by assigning, which is lost where build runs while a function is traced.
            self._wire_scale = self.add_variable(
                (2,),
                initializer=lambda shape, dtype: keras.ops.convert_to_tensor(
                    window.first_wire_scale(self._options), dtype
                ),
                dtype="int64",
                name="wire_scale",
            )
            if self._options.error_feedback:
                self._residuals = [
                    self.add_variable_from_reference(v, name="residual") for v in variables
                ]
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(own)
        super().build(variables)

    @property
    def local_steps(self) -> int:
        """Steps in a window."""
        return self._options.local_steps

    @local_steps.setter
    def local_steps(self, local_steps: int) -> None:
        self._options = dataclasses.replace(self._options, local_steps=local_steps)

    @property
    def op(self) -> Op:
        """How the ranks' deltas become one."""
        return self._options.op

    @property
    def partition_state(self) -> bool:
        """Whether the ranks of a host share one replica's work."""
        return self._options.partition_state

    @property
    def local_step(self) -> keras.Variable:
        """Steps since the last sync."""
        return self._counters["local_step"]

    @property
    def syncs(self) -> keras.Variable:
        """Syncs done so far."""
        return self._counters["syncs"]

    @property
    def _window(self) -> window.Window:
        is_partitioned = self._layout is not None
        kind = partition.PartitionedWindow if is_partitioned else window.Window
        return kind(
            **({"layout": self._layout} if is_partitioned else {}),
            variables=self._trainable_variables,
            starts=self._starts,
            states=self._averaged_state() if self._options.average_inner_state else [],
            orthogonality=self.orthogonality,
            wire_scale=self._wire_scale,
            residuals=self._residuals,
            options=self._options,
            flight=self._flight,
            name=self._name_on_all_ranks,
            inner_variables=self.inner_optimizer.variables,
            **self._counters,
        )

    @property
    def _name_on_all_ranks(self) -> str:
        """The name, without the number that Keras adds to names that it makes up."""
        made_up = re.fullmatch(r"adasum_optimizer(_\d+)?", self.name)
        return f"{'adasum_optimizer' if made_up else self.name}({type(self._innermost).__name__})"

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Takes a local step, and syncs after the last one of a window. Every rank calls it.

        Args:
            grads: one gradient, or None, for each trainable variable.
            trainable_variables: the variables; by default those given to `build`.
        """
        window.check_strategy()
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "`apply` needs `trainable_variables` the first time, or call `build` before."
                )
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        if core.size() == 1:
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        if self._layout is not None:
            grads = self._of_all_variables(grads, trainable_variables)
            self._partitioned_update.step(grads)
            return
        usable = self._window.begin_step()
        before = self._updates()
        tf.cond(
            usable,
            lambda: self.inner_optimizer.apply(grads, trainable_variables),
            self._skip_step,
        )
        self._window.end_step(self._updates() - before)

    def apply_gradients(self, grads_and_vars: Any) -> tf.Variable:
        """`apply` for an iterable of (gradient, variable) pairs; returns `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def sync(self) -> None:
        """Brings all ranks to the same weights now, if any took a step since the last sync.

        Every rank calls it, but they may come after different numbers of steps: a rank that is here
        takes part in the others' syncs until all are. A second call in a row changes nothing. Works
        eagerly and in a tf.function.
        """
        if core.size() == 1:
            return
        if self._layout is not None:
            self._partitioned_update.flush()
        elif self.built:
            self._window.flush()
        else:
            # Nothing to do, but a rank that disagrees about that gets to know.
            collectives.barrier(name="sync of an optimizer that has taken no step yet")

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Called by `fit` when it ends: syncs what is left of a window.

        With `use_ema` the wrapped optimizer then puts its averages into the weights. Each rank has
        averaged its own path, so the weights become the mean of the ranks' averages.
        """
        self.sync()
        if self._layout is None:
            self.inner_optimizer.finalize_variable_values(var_list)
        else:
            self.inner_optimizer.finalize_variable_values(self._layout.local_variables)
            self._window.share()
        if core.size() > 1 and any(optimizer.use_ema for optimizer in self._parts):
            averages = collectives.grouped_allreduce([v.value for v in var_list], op=Average)
            for variable, average in zip(var_list, averages, strict=True):
                variable.assign(average)

    def gather_state(self) -> None:
        """With `partition_state`: brings together what the ranks keep, so that it can be saved.

        Every rank calls it, at the same place, just before rank 0 saves the model or the optimizer.
        What is saved is that of the first host, and looks as if it was not partitioned: any number
        of ranks may load it, with `partition_state` or without. Until the next step or sync it may
        be saved, and until `forget_gathered_state` rank 0 keeps it, in the memory of one replica's
        state.
        """
        if self._layout is not None:
            state = partition.gather(self._layout, self._partitioned_variables)
            if state is not None:
                self._gathered = (self._progress, state)

    def forget_gathered_state(self) -> None:
        """Gives back the memory that `gather_state` took."""
        self._gathered = None

    def spread_loaded_state(self) -> None:
        """With `partition_state`: gives each rank its part of the state that rank 0 has loaded.

        Every rank calls it, after rank 0, or each, has loaded a model or weights with the
        optimizer; `callbacks.BroadcastState` does.
        """
        if self._layout is not None:
            partition.spread(self._layout, self.variables, self._loaded)
        self._loaded = self._gathered = None

    def forget_loaded_state(self) -> None:
        """Gives back the memory of what was loaded, where each rank has loaded the same."""
        self._loaded = None

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save the optimizer.

        Raises:
            RuntimeError: with `partition_state` on several ranks, unless `gather_state` was called
                after the last step and the last sync.
        """
        if self._layout is None:
            super().save_own_variables(store)
            return
        if self._gathered is None or self._gathered[0] != self._progress:
            raise RuntimeError(
                "With `partition_state` each rank has a part of the optimizer's state only: all "
                "ranks have to call `gather_state()` just before rank 0 saves, as "
                "`callbacks.standard()` do for ModelCheckpoint and BackupAndRestore."
            )
        # What every rank has is saved as it is now: callbacks may have changed the learning rate.
        parts = zip(self._partitioned_variables, self._gathered[1], strict=True)
        gathered = {id(variable): value for variable, value in parts}
        for i, variable in enumerate(self.variables):
            value = gathered.get(id(variable))
            store[str(i)] = keras.ops.convert_to_numpy(variable) if value is None else value

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load what `save_own_variables` saved."""
        if self._layout is None or len(store.keys()) != len(self.variables):
            super().load_own_variables(store)
            return
        self._gathered = None
        self._loaded = [store[str(i)][...] for i in range(len(self.variables))]
        for variable, value in zip(self.variables, self._loaded, strict=True):
            partition.take(self._layout, variable, value)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        if self._layout is not None and save_type == "checkpoint":
            raise NotImplementedError(
                "With `partition_state` each rank has a part of the optimizer's state only, so a "
                "tf.train.Checkpoint of it would lose the rest. Use model.save or "
                "model.save_weights, after `gather_state()`."
            )
        return super()._trackable_children(save_type, **kwargs)

    @property
    def _partitioned_update(self) -> partition.Update:
        return partition.Update(
            self._window, self.inner_optimizer, self._innermost, self._skip_step
        )

    def _of_all_variables(
        self, grads: Sequence[Any], variables: Sequence[keras.Variable] | None
    ) -> list[Any]:
        """The gradients in the order in which `build` got the variables; None for those left out.

        Which are left out must be equal on all ranks.
        """
        if variables is None:
            return list(grads)
        own = {id(v): grad for grad, v in zip(grads, variables, strict=True)}
        unknown = own.keys() - {id(v) for v in self._trainable_variables}
        if unknown:
            raise ValueError("`trainable_variables` has variables that `build` was not given.")
        if all(grad is None for grad in grads):
            raise ValueError("No gradients provided for any variable.")
        return [own.get(id(variable)) for variable in self._trainable_variables]

    @property
    def _progress(self) -> list[int]:
        """What a step or a sync changes, also a step that only accumulates its gradient."""
        counters = [self._counters[name] for name in ("started", "local_step", "syncs")]
        return [int(v) for v in (*(part._iterations for part in self._parts), *counters)]

    @property
    def _partitioned_variables(self) -> list[keras.Variable]:
        """Those of the variables of which each rank has some in full, and stand-ins for others."""
        if self._layout is None:
            return []
        return self._starts + [v for v in self.inner_optimizer.variables if len(v.shape) > 0]

    def _skip_step(self) -> None:
        for optimizer in self._parts:
            optimizer._iterations.assign_add(1)

    @property
    def _innermost(self) -> keras.optimizers.Optimizer:
        """The optimizer that updates the weights, below a LossScaleOptimizer."""
        return getattr(self.inner_optimizer, "inner_optimizer", self.inner_optimizer)

    @property
    def _parts(self) -> list[keras.optimizers.Optimizer]:
        """The innermost optimizer and, if it is a MultiOptimizer, those that it is made of."""
        return [self._innermost, *getattr(self._innermost, "optimizers", [])]

    def _updates(self) -> tf.Tensor:
        """How often the weights were updated so far."""
        return tf.cast(tf.convert_to_tensor(self._innermost.iterations), tf.int64)

    def _averaged_state(self) -> list[keras.Variable]:
        learning_rates = {id(optimizer._learning_rate) for optimizer in self._parts}
        return [
            v
            for v in self._innermost.variables
            if id(v) not in learning_rates and keras.backend.is_float_dtype(v.dtype)
        ]

    @property
    def variables(self) -> list[keras.Variable]:
        return self._variables + self.inner_optimizer.variables

    @property
    def iterations(self) -> keras.Variable:
        """The wrapped optimizer's: steps taken, not syncs."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        return self.inner_optimizer.scale_loss(loss)

    @property
    def loss_scale_factor(self) -> float | None:
        """By what the wrapped optimizer has the loss multiplied, or None.

        A LossScaleOptimizer around this one, which `compile` adds under the policy mixed_float16,
        sets it to None because it scales the loss itself. A LossScaleOptimizer inside is then
        taken out: its scale would be divided out of the gradients a second time.
        """
        inner = self.inner_optimizer
        factor = getattr(inner, "initial_scale", inner.loss_scale_factor)
        # Keras sets nothing that is None already, and the setter has something to say.
        return 1.0 if factor is None and self.partition_state else factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if not hasattr(self, "inner_optimizer"):
            return  # the base class's constructor
        if self.partition_state:
            raise ValueError(
                "With `partition_state` a LossScaleOptimizer has to be inside: "
                "AdasumOptimizer(LossScaleOptimizer(...)), and compile(auto_scale_loss=False)."
            )
        if self._innermost is self.inner_optimizer:
            self.inner_optimizer.loss_scale_factor = factor
        elif self.built:
            raise ValueError(
                "This optimizer was used with a LossScaleOptimizer inside, so the loss cannot be "
                "scaled outside as well. Make a new one, or compile with auto_scale_loss=False."
            )
        else:
            self.inner_optimizer = self._innermost

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **self._options.config(),
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AdasumOptimizer:
        inner_optimizer = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        # A model may well be loaded where its training could not be continued.
        if config.get("elastic") and core.size() > 1 and not core.is_fault_tolerant():
            warnings.warn(
                "The optimizer was saved with elastic=True, which this job cannot be, since it was "
                "not started by `mpirun --with-ft ulfm`: it is loaded with elastic=False.",
                stacklevel=2,
            )
            config = {**config, "elastic": False}
        return cls(**{**config, "inner_optimizer": inner_optimizer})


def _has_nothing_of_its_own(store: Any) -> None:
    """Instead of an optimizer's `save_own_variables` and `load_own_variables`."""


def find(optimizer: Any) -> AdasumOptimizer | None:
    """The AdasumOptimizer in a chain of wrapping optimizers, such as a LossScaleOptimizer's."""
    while optimizer is not None and not isinstance(optimizer, AdasumOptimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer
