"""How parallel the ranks' deltas are, epoch by epoch (the paper's section 3.6)."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tf_adasum import core, optimizer
from tf_adasum.callbacks.together import Together
from tf_adasum.optimizer import AdasumOptimizer

# What makes it a curve in TensorBoard. tf.summary.scalar would do, but only where the package
# tensorboard is installed, which does not come with TensorFlow any more.
_SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class=1)


class Orthogonality(Together):
    """Puts the orthogonality of the last sync into the logs, and into TensorBoard.

    For each weight that is |Adasum(g1, ..., gn)|^2 / (|g1|^2 + ... + |gn|^2) of the n ranks' deltas
    g: 1 where they are orthogonal, 1/n where they are equal. It falls out of the sync, so it costs
    nothing. The logs get `orthogonality`, the mean over the weights, and `orthogonality/<path>` for
    each; NaN where it is not known, as on one rank or with another `op` than Adasum.

    At the end of an epoch the last sync may be one of fewer than `local_steps` steps, and with
    uneven numbers of batches one of fewer ranks. All ranks log rank 0's values.

    Args:
        log_dir: a folder, where rank 0 writes them as scalars for TensorBoard, over the number of
            steps. TensorBoard's own callback, placed later, writes those of each epoch too.
        every: a number of batches, after which they go to the batch's logs and to `log_dir`, in
            addition to the ends of epochs; by default only those.

    Raises:
        ValueError: if `every` is not a positive integer; at the start of `fit`, if the model's
            optimizer is no AdasumOptimizer.
    """

    def __init__(self, log_dir: str | None = None, every: int | None = None):
        super().__init__()
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"`every` must be a positive integer. Received: every={every!r}")
        self.log_dir = log_dir
        self.every = every
        # With nothing to do at a batch's end, Keras need not wait for it.
        self.async_safe = every is None
        self._writer: tf.summary.SummaryWriter | None = None
        self._batches = 0

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self._adasum()
        self._batches = 0
        if self.log_dir is not None and core.rank() == 0:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._batches += 1
        if self.every and self._batches % self.every == 0:
            self._report(self._values(self._own()), logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.come_together()
        # A rank that came early has seen another last sync than one with more batches.
        of_rank_0 = core.broadcast(self._own(), name="orthogonality")
        self._report(self._values(of_rank_0), logs)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _adasum(self) -> AdasumOptimizer:
        found = optimizer.find(self.model.optimizer)
        if found is None:
            raise ValueError(
                "Orthogonality needs a model that is compiled with an AdasumOptimizer. "
                f"Received: optimizer={self.model.optimizer!r}"
            )
        return found

    def _own(self) -> np.ndarray:
        adasum = self._adasum()
        values = keras.ops.convert_to_numpy(adasum.orthogonality)
        return values if int(adasum.syncs) > 0 else np.full_like(values, np.nan)

    def _values(self, values: np.ndarray) -> dict[str, float]:
        known = values[~np.isnan(values)]
        paths = [variable.path for variable in self._adasum()._trainable_variables]
        return {
            "orthogonality": float(known.mean()) if known.size else float("nan"),
            **{f"orthogonality/{p}": v for p, v in zip(paths, values.tolist(), strict=True)},
        }

    def _report(self, values: dict[str, float], logs: dict[str, float] | None) -> None:
        if logs is not None:
            logs.update(values)
        if self._writer is None:
            return
        with self._writer.as_default(step=int(self._adasum().iterations)):
            for name, value in values.items():
                tf.summary.write(name, np.float32(value), metadata=_SCALAR)
