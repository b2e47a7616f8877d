"""ResNet-50 v1.5 on ImageNet to 74.9%, with the hyper-parameters of MLPerf v0.5.

    mpirun -np 16 python examples/resnet50_imagenet.py --data /data/imagenet --local-steps 16 \
        --mixed-precision --xla --checkpoints /data/checkpoints

is the training of the paper's Table 2: 256 images a rank and step, an effective batch of 64K.
Started again after it was killed, it goes on from the last epoch's checkpoint. For a smoke run that
needs no data and seconds:

    mpirun -np 2 python examples/resnet50_imagenet.py --synthetic --train-examples 512 \
        --eval-examples 128 --classes 4 --width 8 --blocks 1,1,1,1 --image-size 32 --batch 16 \
        --warmup-epochs 1 --epochs 8 --target 0.9

Rank 0 prints MLPerf's log lines, `:::MLL ...`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf
from resnet50 import data
from resnet50.callbacks import Checkpoints, StopAt
from resnet50.mlperf_log import Progress, log
from resnet50.model import resnet
from resnet50.schedule import WarmUpAndSteps

import tf_adasum as adasum


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", type=Path, help="folder of TFRecord shards, or of train/CLASS/* and val/CLASS/*"
    )
    source.add_argument("--synthetic", action="store_true", help="made-up images instead")
    add("--train-examples", type=int, default=1281167, help="in the shards, or made up")
    add("--eval-examples", type=int, default=50000, help="likewise")
    add("--classes", type=int, default=1001, help="of made-up images")
    add("--checkpoints", type=Path, help="folder to save to after each epoch, and to go on from")
    add("--epochs", type=int, default=90, help="at most")
    add("--eval-every", type=int, default=4, help="epochs from one evaluation to the next")
    add("--target", type=float, default=0.749, help="accuracy to stop at")
    add("--seed", type=int, default=1, help="of weights, order and augmentation")

    add("--batch", type=int, default=256, help="images a rank and step")
    add("--local-steps", type=int, default=1, help="steps between two syncs; 16 in Table 2")
    add("--op", default="adasum", choices=["adasum", "average", "sum"], help="how to combine")
    add("--average-inner-state", action="store_true", help="average momenta at each sync")
    add("--base-rate", type=float, default=0.128, help="for 256 images a rank and step")
    add("--rate-factor", type=float, help="times this; default: 4 on several ranks (Table 2)")
    add("--warmup-epochs", type=float, default=5, help="rate climbs from 0")
    add("--decay-epochs", type=_numbers, default=[30, 60, 80], help="rate falls to a tenth")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", type=float, default=1e-4, help="of all but batch normalization")
    add("--label-smoothing", type=float, default=0.0, help="0 to 1; 0 for none")

    add(
        "--mixed-precision",
        nargs="?",
        const="float16",
        choices=["float16", "bfloat16"],
        help="compute in float16, with loss scaling, or bfloat16",
    )
    add("--xla", action="store_true", help="compile the steps with XLA")
    add("--width", type=int, default=64, help="filters of the first stage")
    add("--blocks", type=_numbers, default=[3, 4, 6, 3], help="bottlenecks of each stage")
    add("--image-size", type=int, default=224, help="height and width in pixels")
    parsed = parser.parse_args(arguments)
    if parsed.rate_factor is None:
        parsed.rate_factor = 4.0 if adasum.size() > 1 else 1.0
    return parsed


def use_own_gpu() -> None:
    """Each rank of a host takes one of its GPUs."""
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[adasum.local_rank() % len(gpus)], "GPU")


def open_source(arguments: argparse.Namespace) -> data.Source:
    size, seed = arguments.image_size, arguments.seed
    examples = arguments.train_examples, arguments.eval_examples
    if arguments.synthetic:
        return data.Synthetic(size, arguments.classes, seed, *examples)
    return data.open_folder(arguments.data, size, seed, *examples)


def compiled_model(arguments: argparse.Namespace, classes: int, steps: int) -> keras.Model:
    """The model with its optimizer, for so many steps an epoch and rank."""
    model = resnet(
        arguments.image_size,
        classes,
        width=arguments.width,
        blocks=arguments.blocks,
        weight_decay=arguments.weight_decay,
    )
    rate = arguments.base_rate * arguments.rate_factor * arguments.batch / 256
    log("opt_name", "sgd")
    log("opt_base_learning_rate", rate)
    log("opt_learning_rate_warmup_epochs", arguments.warmup_epochs)
    log("opt_learning_rate_decay_boundary_epochs", arguments.decay_epochs)
    log("opt_momentum", arguments.momentum)
    log("opt_weight_decay", arguments.weight_decay)
    schedule = WarmUpAndSteps(rate, steps, arguments.warmup_epochs, arguments.decay_epochs)
    optimizer = adasum.AdasumOptimizer(
        keras.optimizers.SGD(schedule, momentum=arguments.momentum),
        arguments.local_steps,
        op=arguments.op,
        average_inner_state=arguments.average_inner_state,
    )

    def smoothed(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return keras.losses.categorical_crossentropy(
            keras.ops.one_hot(keras.ops.reshape(labels, (-1,)), classes),
            logits,
            from_logits=True,
            label_smoothing=arguments.label_smoothing,
        )

    exact = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer,
        smoothed if arguments.label_smoothing else exact,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=arguments.xla,
    )
    return model


def main(arguments: Sequence[str] | None = None) -> tuple[keras.Model, keras.callbacks.History]:
    """Trains; every rank calls it with the same command line."""
    arguments = parse(arguments)
    use_own_gpu()
    keras.utils.set_random_seed(arguments.seed)
    if arguments.mixed_precision:
        keras.config.set_dtype_policy(f"mixed_{arguments.mixed_precision}")

    log("init_start")
    log("submission_benchmark", "resnet")
    log("seed", arguments.seed)
    source = open_source(arguments)
    ranks = adasum.size()
    steps = math.ceil(source.train_examples / (arguments.batch * ranks))
    log("global_batch_size", arguments.batch * ranks * arguments.local_steps)
    log("local_steps", arguments.local_steps)
    log("model_bn_span", arguments.batch)
    log("train_samples", source.train_examples)
    log("eval_samples", source.eval_examples)
    model = compiled_model(arguments, source.classes, steps)

    evaluated = [*range(arguments.eval_every, arguments.epochs, arguments.eval_every)]
    evaluated.append(arguments.epochs)
    callbacks = [
        *adasum.callbacks.standard(),
        Progress(evaluated, arguments.target),
        StopAt(arguments.target),
    ]
    first_epoch = 0
    if arguments.checkpoints:
        callbacks.append(Checkpoints(arguments.checkpoints, model))
        first_epoch = callbacks[-1].restore()
    log("init_stop", resumed_after_epoch=first_epoch)

    history = model.fit(
        data.train_batches(source, arguments.batch, first_epoch, arguments.epochs, steps),
        initial_epoch=first_epoch,
        epochs=arguments.epochs,
        steps_per_epoch=steps,
        validation_data=data.evaluation_batches(source, arguments.batch),
        validation_freq=evaluated,
        callbacks=callbacks,
        shuffle=False,
        verbose=0,
    )
    return model, history


if __name__ == "__main__":
    main()
