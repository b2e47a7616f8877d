"""The ranks of table1_partition.py: a model update, whole and partitioned, in turns."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

# Layers, width, rows of the table of words.
MODELS = {"large": (24, 1024, 30522), "base": (12, 768, 30522), "tiny": (4, 512, 4000)}


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Of BERT's trainable weights: embeddings, blocks, pooler, and the heads of its training."""
    layers, width, words = MODELS[model]
    norm = [(width,), (width,)]

    def dense(inputs: int, outputs: int) -> list[tuple[int, ...]]:
        return [(inputs, outputs), (outputs,)]

    shapes = [(words, width), (512, width), (2, width), *norm]
    for _ in range(layers):
        shapes += 4 * dense(width, width) + norm
        shapes += dense(width, 4 * width) + dense(4 * width, width) + norm
    shapes += dense(width, width)
    shapes += [*dense(width, width), *norm, (words,), *dense(width, 2)]
    return shapes


def weights_of(model: str) -> int:
    return sum(map(math.prod, shapes_of(model)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--optimizer", choices=["adam", "lamb"], required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_adasum as adasum
    from tf_adasum import core

    tf.config.threading.set_intra_op_parallelism_threads(1)
    core.init()
    shapes = shapes_of(options.model)
    variables = [
        keras.Variable("zeros", shape=shape, dtype="float32", name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]
    numbers = tf.random.Generator.from_seed(core.rank())
    gradients = [numbers.normal(shape, stddev=0.01) for shape in shapes]

    def updates(partition_state: bool) -> Callable[[], None]:
        inner = {"adam": keras.optimizers.Adam, "lamb": keras.optimizers.Lamb}[options.optimizer]
        optimizer = adasum.AdasumOptimizer(
            inner(1e-4), algorithm="hierarchical", partition_state=partition_state
        )
        optimizer.build(variables)
        state = sum(
            4 * math.prod(v.shape)
            for v in optimizer.variables
            if len(v.shape) > 0 and v.dtype == "float32"
        )
        of_ranks = core.allgather(np.array([state])).tolist()
        show(partition_state=partition_state, state_bytes=of_ranks)
        return tf.function(lambda: optimizer.apply(gradients, variables), jit_compile=False)

    kinds = {partition_state: updates(partition_state) for partition_state in (False, True)}
    for update in kinds.values():
        update()
    for _ in range(options.rounds):
        for partition_state, update in kinds.items():
            core.barrier()
            start = time.perf_counter()
            update()
            core.barrier()
            show(partition_state=partition_state, seconds=time.perf_counter() - start)


def show(**figures: object) -> None:
    from tf_adasum import core

    if core.rank() == 0:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
