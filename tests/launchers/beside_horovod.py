"""A training in which Horovod and tf_adasum each do a part, as each rank runs it.

Horovod makes the weights equal at the start and averages the metric, our optimizer does the update.
Arguments: who is initialised first, "horovod" or "tf_adasum"; and who is shut down by the program,
"horovod", "tf_adasum" or "nobody".
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tf_adasum as adasum

first, shut_down = sys.argv[1:]
if first == "horovod":
    hvd.init()
    adasum.init()
else:
    adasum.init()
    hvd.init()
assert (hvd.rank(), hvd.size()) == (adasum.rank(), adasum.size())
assert (hvd.local_rank(), hvd.local_size()) == (adasum.local_rank(), adasum.local_size())

keras.utils.set_random_seed(adasum.rank())  # so the weights differ
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
optimizer = adasum.AdasumOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), local_steps=2)
optimizer.build(model.trainable_variables)
random = np.random.default_rng(adasum.rank())
inputs = tf.constant(random.normal(size=(7, 8, 4)), tf.float32)
targets = tf.reduce_sum(inputs, axis=-1, keepdims=True)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)
    return hvd.allreduce(loss, op=hvd.Average, name="loss")


before = [w.numpy() for w in model.weights]
hvd.broadcast_variables([w.value for w in model.weights], root_rank=0)
assert adasum.rank() == 0 or any(
    (w.numpy() != b).any() for w, b in zip(model.weights, before, strict=True)
)
losses = [float(step(x, y)) for x, y in zip(inputs, targets, strict=True)]
optimizer.sync()

weights = np.concatenate([w.numpy().ravel() for w in model.weights])
for all_weights in (hvd.allgather(weights[None]), adasum.allgather(weights[None])):
    for of_rank in all_weights.numpy():
        np.testing.assert_array_equal(of_rank, weights)
assert losses[-1] < losses[0]
assert len(set(hvd.allgather(np.array(losses[-1:])).numpy())) == 1
assert optimizer.syncs == 4
rank = adasum.rank()
if shut_down != "nobody":
    # Horovod's shutdown on one rank is one on all, and may take MPI with it.
    adasum.barrier()
    {"horovod": hvd, "tf_adasum": adasum}[shut_down].shutdown()
sys.stdout.write(f"rank {rank} is equal\n")
