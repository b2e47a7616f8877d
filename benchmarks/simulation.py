"""Many workers in one process: they take their local steps in turn, and the core brings them
together over threads, in the code that MPI ranks run.

Each worker has its own data order, and its own copy of everything that the Keras optimizer and the
model keep (momentum, batch-norm statistics, dropout seeds). There is one model and one optimizer,
whose variables are the worker's whose turn it is, so any Keras optimizer will do.
`tests/mpi/test_simulation_mpi.py` holds this against `AdasumOptimizer` on MPI ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_adasum import core

INNER_STATES = ("local", "averaged", "reset")
JOINS = ("sum", "adasum")


class Simulation:
    """Workers that train copies of a model, with a sync after each window of local steps.

    `start` begins a training; another one may follow, without tracing the graph again.

    Args:
        model: a built `keras.Model`.
        optimizer: a `keras.optimizers.Optimizer`, new. A learning rate that changes has to be a
            `LearningRateSchedule`, of the worker's own steps.
        loss: a function of targets and predictions to a scalar.
        data: inputs and targets, two arrays of as many examples.
        workers: their number.

    Attributes:
        orthogonality: of the last sync, one number a trainable variable (the paper's 3.6).
        sent_bytes: by all workers together in all syncs, in messages between hosts.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
        data: tuple[np.ndarray, np.ndarray],
        workers: int,
    ):
        optimizer.build(model.trainable_variables)
        self.model, self.workers = model, workers
        self._optimizer, self._loss = optimizer, loss
        self._inputs, self._targets = map(tf.constant, data)
        self._start_variables = [tf.Variable(v) for v in model.trainable_variables]
        self._own = [*optimizer.variables, *model.non_trainable_variables]
        self._first = [np.stack([v.numpy()] * workers) for v in self._own]
        self._of_workers = [tf.Variable(first) for first in self._first]
        self._ended = [
            tf.Variable(np.stack([v.numpy()] * workers)) for v in model.trainable_variables
        ]
        self._states = [
            i
            for i, variable in enumerate(optimizer.variables)
            if keras.backend.is_float_dtype(variable.dtype)
            and not variable.path.endswith("/learning_rate")
        ]
        self.start([v.numpy() for v in model.trainable_variables])

    def start(
        self,
        weights: Sequence[np.ndarray],
        *,
        op: core.Op | str = core.Adasum,
        inner_state: str = "local",
        outer_momentum: float = 0.0,
        joined_by: str = "sum",
        wire_dtype: str | None = None,
        error_feedback: bool = False,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """Begins a training; all but the weights is what it was when this object was made.

        Args:
            weights: what all workers start from, one array a trainable variable.
            op, wire_dtype, error_feedback: as in `AdasumOptimizer`.
            inner_state: what becomes of the optimizer's own floating-point variables at a sync:
                "local", they stay each worker's; "averaged", as `average_inner_state=True` does;
                or "reset", to what they were at first.
            outer_momentum: at each sync, this times what the last one changed is joined with the
                combined change, and the weights go on from the start plus that.
            joined_by: "sum", or "adasum" of each unit of a layer, an index of the last dimension.
            hosts: for each worker the number of its host; by default all are on one.
        """
        if inner_state not in INNER_STATES:
            raise ValueError(
                f"`inner_state` must be one of {INNER_STATES}. Received: {inner_state!r}"
            )
        if joined_by not in JOINS:
            raise ValueError(f"`joined_by` must be one of {JOINS}. Received: {joined_by!r}")
        self.orthogonality: list[float] = []
        self.sent_bytes = 0
        self._options = {"op": op, "wire_dtype": wire_dtype, "hosts": hosts}
        self._inner_state = inner_state
        self._outer_momentum, self._joined_by = outer_momentum, joined_by
        self._last_changes = [np.zeros_like(weight) for weight in weights]
        self._go_on_from(weights)
        for stacked, first in zip(self._of_workers, self._first, strict=True):
            stacked.assign(first)
        self._skips = [0] * self.workers
        # What AdasumOptimizer begins with.
        self._wire_scale = (10 if wire_dtype == "float16" else 0, 0)
        self._residuals = None
        if wire_dtype is not None and error_feedback:
            zeros = [np.zeros_like(weight) for weight in weights]
            self._residuals = [zeros] * self.workers

    def _go_on_from(self, weights: Sequence[np.ndarray]) -> None:
        self._starts = list(weights)
        for variable, start in zip(self._start_variables, weights, strict=True):
            variable.assign(start)

    def window(self, examples: np.ndarray) -> float:
        """Local steps of every worker, then a sync.

        Args:
            examples: int32, [worker, local step, example of the batch]: indices into the data.

        Returns:
            The mean loss of all the workers' batches.

        Raises:
            ValueError: where some worker's change is not finite for the third time in a row, as
                `AdasumOptimizer` does.
        """
        loss = self._turns(tf.constant(examples, tf.int32))
        ended = [variable.numpy() for variable in self._ended]
        averaged = self._states if self._inner_state == "averaged" else []
        states = [self._of_workers[i].numpy() for i in averaged]
        done = core.simulate_sync(
            _by_worker(ended, self.workers),
            self._starts,
            states=_by_worker(states, self.workers),
            wire_scale=self._wire_scale,
            residuals=self._residuals,
            skips_in_a_row=self._skips,
            **self._options,
        )
        weights = done.values[0]
        if self._outer_momentum:
            self._last_changes, weights = self._with_momentum(weights)
        self._go_on_from(weights)
        for place, i in enumerate(averaged):
            self._of_workers[i].assign(np.stack([of_rank[place] for of_rank in done.states]))
        if self._inner_state == "reset":
            for i in self._states:
                self._of_workers[i].assign(self._first[i])
        self._wire_scale, self._residuals = done.wire_scale, done.residuals
        self._skips = done.skips_in_a_row
        self.orthogonality = done.orthogonality
        self.sent_bytes += done.sent_bytes
        return float(loss)

    def _with_momentum(self, ended: Sequence[np.ndarray]) -> tuple[list[np.ndarray], ...]:
        """What a sync changes with `outer_momentum`, and the weights after it."""
        changes, weights = [], []
        for end, start, last in zip(ended, self._starts, self._last_changes, strict=True):
            joined = np.add if self._joined_by == "sum" else adasum_of_units
            changes.append(joined(end - start, self._outer_momentum * last).astype(start.dtype))
            weights.append(start + changes[-1])
        return changes, weights

    @property
    def weights(self) -> list[np.ndarray]:
        """What all workers hold since the last sync, one array a trainable variable."""
        return self._starts

    def states(self) -> list[np.ndarray]:
        """The optimizer's variables, each with the workers as its first dimension."""
        return [stacked.numpy() for stacked in self._of_workers[: len(self._optimizer.variables)]]

    def load(self) -> keras.Model:
        """The model, with the last sync's weights and the workers' mean of what else it keeps."""
        for variable, weight in zip(self.model.trainable_variables, self._starts, strict=True):
            variable.assign(weight)
        kept = self._of_workers[len(self._optimizer.variables) :]
        for variable, stacked in zip(self.model.non_trainable_variables, kept, strict=True):
            if keras.backend.is_float_dtype(variable.dtype):
                variable.assign(stacked.numpy().mean(0))
        return self.model

    @tf.function(input_signature=[tf.TensorSpec([None, None, None], tf.int32)])
    def _turns(self, examples: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(())
        for worker in tf.range(self.workers):
            for variable, start in zip(
                self.model.trainable_variables, self._start_variables, strict=True
            ):
                variable.assign(start)
            for variable, stacked in zip(self._own, self._of_workers, strict=True):
                variable.assign(stacked[worker])
            for step in tf.range(tf.shape(examples)[1]):
                total += self._step(examples[worker, step])
            for variable, stacked in zip(
                [*self.model.trainable_variables, *self._own],
                [*self._ended, *self._of_workers],
                strict=True,
            ):
                value = tf.convert_to_tensor(variable)
                stacked.scatter_nd_update([[worker]], tf.expand_dims(value, 0))
        return total / tf.cast(tf.size(examples[:, :, 0]), tf.float32)

    def _step(self, examples: tf.Tensor) -> tf.Tensor:
        inputs, targets = (tf.gather(of, examples) for of in (self._inputs, self._targets))
        with tf.GradientTape() as tape:
            loss = self._loss(targets, self.model(inputs, training=True))
        variables = self.model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        return loss


def adasum_of_units(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Adasum of each index of the last dimension by itself; of vectors as they are."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    others = tuple(range(max(1, a.ndim - 1)))
    half_dot = (a * b).sum(others) / 2
    # A unit of zeros is neutral.
    along_a, along_b = (half_dot / np.maximum((x * x).sum(others), 1e-300) for x in (a, b))
    return (1 - along_a) * a + (1 - along_b) * b


def _by_worker(stacked: Sequence[np.ndarray], workers: int) -> list[list[np.ndarray]]:
    return [[of_all[worker] for of_all in stacked] for worker in range(workers)]


def steps(examples: int, workers: int, batch: int, epochs: int) -> int:
    """How many each worker takes: in each epoch as many as there are whole batches for all."""
    return epochs * (examples // (workers * batch))


def windows(
    examples: int,
    workers: int,
    batch: int,
    epochs: int,
    local_steps: int,
    seed: int | Sequence[int],
) -> Iterator[np.ndarray]:
    """The order of the data: each epoch shuffles all examples anew and deals them out.

    Yields:
        int32, [worker, local step, example of the batch]; the last one may be of fewer steps.
    """
    rng = np.random.default_rng(seed)
    a_worker = examples // (workers * batch)
    dealt = [
        rng.permutation(examples)[: a_worker * workers * batch].reshape(a_worker, batch, workers)
        for _ in range(epochs)
    ]
    order = np.concatenate(dealt).transpose(2, 0, 1).astype(np.int32)
    for begin in range(0, order.shape[1], local_steps):
        yield order[:, begin : begin + local_steps]
