"""A Keras training with all that a user's has, small: its weights have to be equal on all ranks."""

import hashlib

import keras
import numpy as np

import tf_adasum as adasum

random = np.random.default_rng(0)
x = random.normal(size=(512, 8)).astype("float32")
y = (x[:, 0] > 0).astype("int32")

keras.utils.set_random_seed(adasum.rank())
layers = keras.layers
model = keras.Sequential([layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(2)])
model.compile(
    optimizer=adasum.AdasumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), local_steps=4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    *adasum.shard((x, y)),
    batch_size=32,
    epochs=4,
    verbose=0,
    validation_data=(x, y),
    callbacks=adasum.callbacks.standard(),
).history
accuracy = history["val_accuracy"][-1]
assert accuracy > 0.85, history
assert int(model.optimizer.syncs) >= 8
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print(f"rank {adasum.rank()} ends with weights {digest[:8]}, accuracy {accuracy:.3f}", flush=True)
