"""The paper's Figure 1: how orthogonal the workers' changes are, layer by layer, over a training.

What the paper did (section 3.6): ResNet-50 and BERT-Large on 64 GPUs. The orthogonality of a layer
is |Adasum(g1, ..., gn)|^2 / (|g1|^2 + ... + |gn|^2): 1 where the gradients are orthogonal, 1/n
where they are equal. The mean over the layers starts low, soon rises towards 1, and drops exactly
where the schedule lowers the learning rate. Layers differ; some of BERT's stay low.

What is scaled down here: 16 simulated workers (`simulation.py`), so that 1/n is 0.06, and a sync
after each step. The ResNet is `resnet.py`'s, of 33,410 weights, trained on Fashion-MNIST by
momentum SGD; the BERT `masked_language.py`'s, of two blocks and 43,553 weights, trained by Adam to
name hidden bytes in the sources of Python's standard library. In each step a worker takes 64 images
or 16 sequences, and it keeps its own momentum. The rate is constant until 60% of the training, and
then a tenth; what a momentum of 0.9 holds of the higher rate is down to a tenth 22 steps later, so
a fall comes late. The measure is the core's own, the one that `AdasumOptimizer.orthogonality` and
`callbacks.Orthogonality` give, of each weight of a layer by itself.

Takes 6 minutes on one core, with --quick 1. Goes on where it was stopped.

    python benchmarks/fig1_orthogonality.py
    python benchmarks/fig1_orthogonality.py --models bert --workers 32
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import lenet
import masked_language
import numpy as np
import report
import resnet
import runs
import simulation

PARTS = 25
"""Of a training: what is told is the mean of each."""
DROP = 15
"""The part that begins with a lower rate."""
LATER = 5
"""Parts after that in which a fall is looked for."""
LOW = 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    name: str
    rate: float
    """Until it falls to a tenth."""
    batch: int
    syncs: int


SETTINGS = {
    "resnet": Setting("ResNet, momentum SGD", rate=0.05, batch=64, syncs=150),
    "bert": Setting("BERT, Adam", rate=0.003, batch=16, syncs=300),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: what it is told by in a file of results."""

    model: str
    seed: int
    """Of the weights at first and of the order of the data."""
    syncs: int
    rate: float
    batch: int
    workers: int = 16


class Trainer:
    """Trains by simulated workers, and measures."""

    def __init__(self) -> None:
        # Of each model, with the number of its examples.
        self._simulations: dict[Run, tuple[simulation.Simulation, int]] = {}

    def train(self, run: Run) -> dict[str, Any]:
        """Trains.

        Returns:
            first: orthogonality at the first sync, the layers' mean.
            layers: each one's path to the means of its orthogonality in the parts.
            loss: of the training batches, the mean of each part.
        """
        key = dataclasses.replace(run, seed=0)
        if key not in self._simulations:
            self._simulations[key] = _simulation(run)
        simulated, examples = self._simulations[key]
        keras.utils.set_random_seed(run.seed)
        simulated.start([v.numpy() for v in _model(run.model).trainable_variables])
        a_sync = run.workers * run.batch
        epochs = -(-run.syncs // (examples // a_sync))
        order = simulation.windows(examples, run.workers, run.batch, epochs, 1, run.seed)
        measured, losses = [], []
        for window in itertools.islice(order, run.syncs):
            losses.append(simulated.window(window))
            measured.append(simulated.orthogonality)
        # NaN, at a sync at which no worker has changed a layer, makes that of its part.
        parts = np.array([np.mean(part, 0) for part in np.array_split(measured, PARTS)])
        paths = [variable.path for variable in simulated.model.trainable_variables]
        return {
            "first": _rounded(np.nanmean(measured[0])),
            "layers": {
                path: [_rounded(value) for value in of_layer]
                for path, of_layer in zip(paths, parts.T, strict=True)
            },
            "loss": [_rounded(np.mean(part)) for part in np.array_split(losses, PARTS)],
        }


def _model(name: str) -> keras.Model:
    return resnet.model() if name == "resnet" else masked_language.model(blocks=2)


def _simulation(run: Run) -> tuple[simulation.Simulation, int]:
    boundary = [run.syncs * DROP // PARTS]
    rates = [run.rate, run.rate / 10]
    rate = keras.optimizers.schedules.PiecewiseConstantDecay(boundary, rates)
    if run.model == "resnet":
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        data, _ = lenet.load("fashion_mnist")
    else:
        optimizer, loss = keras.optimizers.Adam(rate), masked_language.loss
        data = masked_language.data(run.syncs * run.workers * run.batch)
    simulated = simulation.Simulation(_model(run.model), optimizer, loss, data, run.workers)
    return simulated, len(data[0])


def _rounded(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one training; all but `layers_that_fall` are means over the layers."""

    start: float
    """At the first sync."""
    peak: float
    """The highest of the parts before the rate falls."""
    before: float
    """The last part before it does."""
    after: float
    """The lowest of the `LATER` parts after that."""
    end: float
    """The last part."""
    layers_that_fall: float
    """The part of them whose lowest of those parts is below the last one before."""
    lowest_layer: float
    """In the part of the peak, that of the layer with the lowest."""


def figures_of(result: dict[str, Any]) -> Figures:
    layers = np.array(list(result["layers"].values()), float)
    # Where no worker changes anything there is none.
    layers = layers[~np.isnan(layers).any(1)]
    mean = layers.mean(0)
    peak = int(np.argmax(mean[:DROP]))
    later = layers[:, DROP : DROP + LATER]
    return Figures(
        start=result["first"],
        peak=mean[peak],
        before=mean[DROP - 1],
        after=mean[DROP : DROP + LATER].min(),
        end=mean[-1],
        layers_that_fall=np.mean(later.min(1) < layers[:, DROP - 1]),
        lowest_layer=layers[:, peak].min(),
    )


Summary = dict[str, list[Figures]]
"""Of each model, the figures of each seed."""


HEADINGS = ["", "start", "peak", "before the drop", "after", "end", "layers that fall, %"]


def _spread(figures: Sequence[Figures], name: str) -> runs.Spread:
    return runs.Spread.of(getattr(each, name) for each in figures)


def cells(summary: Summary) -> list[list[str]]:
    """Under `HEADINGS`; mean (least - most) of the seeds."""
    return [
        [
            SETTINGS[model].name,
            *(_spread(of, name).text(2) for name in ("start", "peak", "before", "after", "end")),
            _spread(of, "layers_that_fall").percent(0),
        ]
        for model, of in summary.items()
    ]


def findings(summary: Summary) -> list[str]:
    """What the paper says, and whether it is so here with every seed."""
    said = []
    for model, of in summary.items():

        def say(holds: bool, claim: str, name: str = SETTINGS[model].name) -> None:
            said.append(f"{'yes' if holds else 'NO'}: {name}: {claim}")

        start, peak, before, after, lowest = (
            _spread(of, name).text(2)
            for name in ("start", "peak", "before", "after", "lowest_layer")
        )
        say(all(f.start < LOW for f in of), f"the mean starts low ({start})")
        say(all(f.peak > f.start for f in of), f"it rises (to {peak})")
        say(
            all(f.after < f.before for f in of),
            f"it falls when the rate does (from {before} to {after})",
        )
        if model == "bert":
            say(
                all(f.lowest_layer < LOW for f in of),
                f"a layer is still low when the mean is at its peak (the lowest: {lowest})",
            )
    return said


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "summary" not in figures:
        return None
    summary = {model: [Figures(**each) for each in of] for model, of in figures["summary"].items()}
    table = report.format_table(HEADINGS, cells(summary))
    said = "\n".join(f"- {line}" for line in figures["findings"])
    return (
        "The layers' mean at the first sync; the highest and the last of the parts (25ths of the "
        f"training) before the rate falls; the lowest of the {LATER} parts after that; the last "
        f"one. Mean (least-most) of the seeds:\n\n```\n{table}\n```\n\n"
        f"What the paper found, and whether it is so here with every seed:\n\n{said}"
    )


def plot(by_model: dict[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """The first seed's layers, thin, and all seeds' means, bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(by_model), 4), layout="constrained")
    panels = figure.subplots(1, len(by_model), squeeze=False, sharey=True)[0]
    for axes, (model, results) in zip(panels, by_model.items(), strict=True):
        syncs = results[0]["run"]["syncs"]
        middles = (np.arange(PARTS) + 0.5) * syncs / PARTS
        for values in results[0]["layers"].values():
            axes.plot(middles, np.array(values, float), linewidth=0.5)
        for result in results:
            mean = np.nanmean(np.array(list(result["layers"].values()), float), 0)
            axes.plot([0, *middles], [result["first"], *mean], color="#CC0000", linewidth=2)
        axes.axvline(syncs * DROP / PARTS, color="#000000", linestyle=":")
        axes.set(title=SETTINGS[model].name, xlabel="syncs", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("orthogonality")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--models", type=lambda text: text.split(","), help="(resnet,bert)")
    add("--workers", type=int, default=16, help="(16)")
    add("--syncs", type=int, help="of each training (150 of ResNet, 300 of BERT; quick: 30)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.models = options.models or list(SETTINGS)
    options.syncs = options.syncs or (30 if quick else None)
    return options


def planned(options: argparse.Namespace) -> list[Run]:
    runs_of = []
    for model in options.models:
        setting = SETTINGS[model]
        syncs = options.syncs or setting.syncs
        runs_of += [
            Run(model, seed, syncs, setting.rate, setting.batch, options.workers)
            for seed in range(options.seeds)
        ]
    return runs_of


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    trainer = Trainer()
    name = runs.name_of("fig1_orthogonality", options.quick)
    done = runs.Runs(name, options.output, options.fresh)
    plan = planned(options)
    progress = report.Progress(len(plan))
    by_model: dict[str, list[dict[str, Any]]] = {}
    for run in plan:
        result = done.get(run, lambda run=run: trainer.train(run))
        by_model.setdefault(run.model, []).append(result)
        progress.advance(f"{run.model}, seed {run.seed}")
    progress.close()
    summary = {model: [figures_of(each) for each in of] for model, of in by_model.items()}
    said = findings(summary)
    path = done.write(
        summary={model: [dataclasses.asdict(each) for each in of] for model, of in summary.items()},
        findings=said,
    )
    plot(by_model, path.with_suffix(".png"))
    print(f"\n{report.format_table(HEADINGS, cells(summary))}\n")
    print("What the paper found, and whether it is so here\n" + "\n".join(said))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
