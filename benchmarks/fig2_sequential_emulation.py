"""The paper's Figure 2: how near Adasum comes to workers that take their steps one after the other.

What the paper did (section 3.7): in a run of LeNet-5 on MNIST with 64 workers, the update of every
step was worked out in three ways: by sequential emulation, that is each worker's gradient
corrected for the steps of those before it with the exact Hessian, by Adasum, and by synchronous
SGD, the sum. Its figure shows the relative errors of the latter two against the first: Adasum's is
lower throughout, and near zero at some steps; that of the sum falls as gradients get small.

What is scaled down here: the data is Fashion-MNIST, workers are simulated, and it is looked at
every --every steps. The run is that of `fig6_lenet.py` with Adasum. At weights w, with gradients
g_i, Hessians H_i and the schedule's rate r, the emulation is

    s_0 = g_0,   s_i = g_i - r H_i (s_0 + ... + s_(i-1)),   update = s_0 + ... + s_(N-1)

with products H_i v by forward-over-reverse differentiation, so without any approximation but
Taylor's first order. The errors are |update - Adasum(g)| / |update|, and likewise for the sum and,
which the paper does not show, the mean. Beside them is the error that Adasum would have if it were
scaled by the best factor, since its length is what differs most.

Why it is not as in the paper, as far as other rates tell (`--rate 0.0041 --every 4`, an eighth, and
`--rate 0.131 --every 4`): Adasum takes each step to be as long as leads to the least loss along its
own gradient (section 3.4). Steps of 0.0041 are shorter, bend the gradients after them little, and
the emulation is near the sum: median errors of 0.24 to 0.29 in the first 60% of the steps, Adasum's
0.91 to 0.93. Later, gradients being small, it is the other way: 1.5 and 2.5, Adasum 0.86 and 0.67.
At 0.131 the emulation itself is not finite in the first third of the steps: the steps are too long
for Taylor's first order. 0.0328 lies between, with steps of both kinds.

Takes some 2 minutes on 2 cores, with --quick half a one.

    python benchmarks/fig2_sequential_emulation.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import lenet
import numpy as np
import report
import simulation
import tensorflow as tf

from tf_adasum import core

WAYS = ("adasum", "sum", "average")


class Emulation:
    """Gradients and products with Hessians of a model's loss on some data.

    Args:
        model: whose trainable variables are changed by what follows.
        loss: of targets and predictions, a scalar.
        data: inputs and targets.
    """

    def __init__(self, model: keras.Model, loss, data: tuple[np.ndarray, np.ndarray]):
        self._model, self._loss = model, loss
        self._inputs, self._targets = map(tf.constant, data)
        self._variables = [v.value for v in model.trainable_variables]

    def load(self, weights: Sequence[np.ndarray]) -> None:
        for variable, weight in zip(self._variables, weights, strict=True):
            variable.assign(weight)

    @tf.function
    def gradient(self, examples: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self._batch_loss(examples)
        return tape.gradient(loss, self._variables)

    @tf.function
    def hessian_product(self, examples: tf.Tensor, vector: list[tf.Tensor]) -> list[tf.Tensor]:
        """Of the batch's Hessian with a vector, one tensor a variable."""
        with tf.autodiff.ForwardAccumulator(self._variables, vector) as forward:
            with tf.GradientTape() as tape:
                loss = self._batch_loss(examples)
            gradient = tape.gradient(loss, self._variables)
        return [forward.jvp(part) for part in gradient]

    def update(self, batches: np.ndarray, rate: float) -> list[np.ndarray]:
        """The sum of the gradients, each corrected for the steps before it.

        Args:
            batches: int32, [worker, example].
            rate: of each worker's step.
        """
        total = [np.zeros(v.shape, np.float32) for v in self._variables]
        for batch in batches:
            examples = tf.constant(batch)
            gradient = self.gradient(examples)
            bent = self.hessian_product(examples, [tf.constant(part) for part in total])
            for part, g, h in zip(total, gradient, bent, strict=True):
                part += g.numpy() - rate * h.numpy()
        return total

    def _batch_loss(self, examples: tf.Tensor) -> tf.Tensor:
        inputs, targets = tf.gather(self._inputs, examples), tf.gather(self._targets, examples)
        return self._loss(targets, self._model(inputs, training=True))


def errors(update: Sequence[np.ndarray], gradients: Sequence[Sequence[np.ndarray]]) -> dict:
    """Of each way to combine the gradients, and of Adasum times the best factor.

    Args:
        update: of the sequential emulation, one array a variable.
        gradients: [worker][variable].
    """
    want = _flat(update)
    found = {}
    for way in WAYS:
        got = _flat(core.simulate(gradients, way)[0])
        found[way] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if way == "adasum":
            factor = (got @ want) / (got @ got)
            scaled = np.linalg.norm(factor * got - want) / np.linalg.norm(want)
            found["adasum_scaled"] = float(scaled)
    return found


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays]).astype(np.float64)


def measure(options: argparse.Namespace, progress: report.Progress) -> list[dict]:
    """The errors at every `options.every`-th step of a training."""
    (images, labels), _ = lenet.load(options.data)
    data = images[: options.train_images], labels[: options.train_images]
    run = lenet.Run(options.workers, rate=options.rate, train_images=options.train_images)
    schedule = lenet.WarmupAndDecay(run.steps)
    schedule.peak.assign(run.rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(options.seed)
    training = simulation.Simulation(
        lenet.model(),
        keras.optimizers.SGD(schedule, momentum=run.momentum),
        loss,
        data,
        run.workers,
    )
    emulation = Emulation(lenet.model(), loss, data)
    order = simulation.windows(len(data[0]), run.workers, run.batch, run.epochs, 1, options.seed)
    found = []
    for step, examples in enumerate(order):
        if step % options.every == 0:
            emulation.load(training.weights)
            batches, rate = examples[:, 0], float(schedule(step))
            gradients = [
                [g.numpy() for g in emulation.gradient(tf.constant(batch))] for batch in batches
            ]
            point = errors(emulation.update(batches, rate), gradients)
            found.append({"step": step, "rate": rate, **point})
            progress.advance(f"step {step}: Adasum {point['adasum']:.2f}, sum {point['sum']:.2f}")
        training.window(examples)
    return found


def table(points: Sequence[dict]) -> str:
    """Medians over parts of the training."""
    rows = []
    for part in np.array_split(np.arange(len(points)), min(5, len(points))):
        of = [points[i] for i in part]
        rows.append(
            [
                f"{of[0]['step']}-{of[-1]['step']}",
                *(
                    f"{np.median([p[way] for p in of]):.3f}"
                    for way in ("adasum", "sum", "average", "adasum_scaled")
                ),
            ]
        )
    return report.format_table(["steps", "Adasum", "sum", "mean", "Adasum, scaled"], rows)


def finding(points: Sequence[dict]) -> str:
    nearer = sum(p["adasum"] < p["sum"] for p in points)
    least = min(p["adasum"] for p in points)
    return (
        f"Adasum is nearer than the sum at {nearer} of {len(points)} steps (the paper: at all); "
        f"its least error is {least:.3f} (the paper: near 0)."
    )


def section(figures: dict) -> str:
    """For docs/results.md."""
    points = figures["points"]
    return f"Relative errors, medians\n\n```\n{table(points)}\n```\n\n{finding(points)}"


def plot(points: Sequence[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps = [p["step"] for p in points]
    for way, name, color in (
        ("adasum", "Adasum", "#0072B2"),
        ("sum", "synchronous SGD (sum)", "#D55E00"),
        ("average", "mean", "#999999"),
    ):
        axes.semilogy(steps, [p[way] for p in points], color=color, label=name)
    axes.set(xlabel="step", ylabel="error relative to sequential emulation")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, help="(64; quick: 16)")
    add("--every", type=int, help="steps from one measurement to the next (2; quick: 6)")
    add("--train-images", type=int, help="(60000; quick: 8192)")
    add("--rate", type=float, default=lenet.BASE_RATE, help=f"the highest ({lenet.BASE_RATE})")
    add("--data", default="fashion_mnist", choices=["fashion_mnist", "mnist"])
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.workers = options.workers or (16 if options.quick else 64)
    options.every = options.every or (6 if options.quick else 2)
    options.train_images = options.train_images or (8192 if options.quick else 60000)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    steps = lenet.Run(options.workers, train_images=options.train_images).steps
    progress = report.Progress(-(-steps // options.every))
    points = measure(options, progress)
    progress.close()
    name = "fig2_sequential_emulation" + ("_quick" if options.quick else "")
    figures = {"workers": options.workers, "rate": options.rate, "points": points}
    path = report.write(name, options.output, figures)
    plot(points, path.with_suffix(".png"))
    print(f"\nErrors relative to sequential emulation, medians\n{table(points)}\n")
    print(f"{finding(points)}\n\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
