"""The paper's Table 2: 16 local steps against 1 over TCP, in time per epoch and epochs needed.

What the paper did (section 5.2): TensorFlow's ResNet-50 of MLPerf v0.5 on 16 V100 joined by TCP at
40 Gbit/s, 256 images a GPU, momentum SGD with 4 times the default rate, target 74.9%. With 16 local
steps between two syncs (64K examples) an epoch took 1.98 minutes and 84 were needed, with 1 (4K)
2.58 minutes and 68: 166.32 and 175.44 minutes.

What is scaled down here: the ResNet of `fig5_resnet_large_batch.py`, its data, schedule and tests,
by 4 workers with 32 images each, so 128 and 2048 examples between two syncs. As there, one epoch is
7.5 of the paper's. Trainings that both programs need are made once. With 16 local steps there are
48 syncs in all, the paper had some 1,600.

1. Epochs: workers are simulated (`simulation.py`), which gives what as many MPI ranks would. The
   rate is searched for each number of local steps with --budget trainings, on a seed that no
   reported run has; the paper took 4 times the default for both.
2. Time per epoch: 4 MPI ranks train with `AdasumOptimizer`, 2 on each of two "hosts": network
   namespaces of this machine, joined by links of limited speed (`namespaces.py`). 1, 16 and no
   syncs take turns, an epoch each; the median counts. The hosts share this machine's cores. The
   weights are 0.13 MB, ResNet-50's 102, so --links are slower than the paper's 40 Gbit/s: one at
   which an epoch is about 1.30 times faster with 16 local steps, as in the paper, has the paper's
   share of communication. Where this machine is busy with other work, these times mean nothing.

Time to accuracy is the product, with the seeds' median. The second part needs root, iproute2 and
Open MPI; without it the table has epochs alone.

Takes some 15 minutes on one core and then 3 on two, with --quick 1. Goes on where it was stopped.

    sudo python benchmarks/table2_local_steps.py
    sudo python benchmarks/table2_local_steps.py --only timing --links 1gbit,200mbit,50mbit
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jobs
import lenet
import namespaces
import report
import resnet
import runs
import search
import two_hosts
from resnet import Run

LOCAL_STEPS = (1, 16)
HOSTS = 2
# A sync of the narrow ResNet has to wait for its link; more would let it pass at once.
BURST = "32kb"
SEARCH_SEED = 1000
TRAINING = Path(__file__).with_name("table2_local_steps_training.py")
PAPER_FASTER = 2.58 / 1.98


@dataclasses.dataclass(frozen=True)
class Timing:
    """A job of ranks that train: what it is told by in the file of results."""

    link: str
    """How fast each host can send, as `tc` writes it."""
    workers: int
    batch: int
    epochs: int
    train_images: int


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of Table 2, over the seeds."""

    local_steps: int
    rate: float
    accuracy: list[list[float]]
    """Of each seed, after each epoch."""

    def epochs(self, target: float) -> list[int | None]:
        """Of each seed, until the target."""
        return [runs.first_epoch(of_seed, target) for of_seed in self.accuracy]

    def efficiency(self, target: float, seconds_per_epoch: float) -> two_hosts.Efficiency:
        """With the seeds' median; no epochs where half of them did not get there."""
        median = statistics.median(epochs or math.inf for epochs in self.epochs(target))
        epochs = median if median < math.inf else None
        return two_hosts.Efficiency(self.local_steps, seconds_per_epoch, epochs)


Train = Callable[[Run], Mapping[str, Any]]


def measure_epochs(options: argparse.Namespace, train: Train) -> list[Column]:
    columns = []
    for local_steps in LOCAL_STEPS:

        def run(rate: float, seed: int, local_steps: int = local_steps) -> Run:
            return Run(
                options.workers,
                options.batch,
                "adasum",
                rate,
                seed,
                local_steps,
                epochs=options.epochs,
                train_images=options.train_images,
            )

        def score(rate: float, run: Callable[[float, int], Run] = run) -> float:
            return resnet.score(train(run(rate, SEARCH_SEED))["accuracy"], options.target)

        rate = search.best_rate(score, resnet.BASE_RATE, options.budget)
        of = [train(run(rate, seed)) for seed in range(options.seeds)]
        columns.append(Column(local_steps, rate, [each["accuracy"] for each in of]))
    return columns


def measure_time(timing: Timing, time_limit: float) -> dict[str, Any]:
    """Trains on hosts that are made for it; `two_hosts.trainings_of` of what rank 0 printed.

    Raises:
        namespaces.UnavailableError: if there cannot be such hosts.
    """
    given = {
        "--local-steps": ",".join(map(str, (0, *LOCAL_STEPS))),
        "--epochs": timing.epochs,
        "--train-images": timing.train_images,
        "--batch": timing.batch,
    }
    words = [str(word) for pair in given.items() for word in pair]
    with namespaces.hosts(HOSTS, timing.link, BURST) as hosts:
        start = hosts.mpirun_command(timing.workers // HOSTS)
        lines = jobs.run([*start, sys.executable, str(TRAINING), *words], time_limit)
    return {"trainings": two_hosts.trainings_of(lines)}


Seconds = dict[str, dict[int, float]]
"""By link and local steps, 0 for no syncs: those of an epoch."""


def seconds_of(timings: Sequence[Mapping[str, Any]]) -> Seconds:
    """The medians, of the results of `measure_time` with their `run`s."""
    return {
        timing["run"]["link"]: {
            training["local_steps"]: statistics.median(training["epoch_seconds"])
            for training in timing["trainings"]
        }
        for timing in timings
    }


def table_epochs(columns: Sequence[Column], examples: int, target: float) -> str:
    """Examples are those of a step of all workers."""
    rows = []
    for column, paper in zip(columns, two_hosts.PAPER, strict=True):
        best = [max(of_seed, default=0.0) for of_seed in column.accuracy]
        rows.append(
            [
                str(column.local_steps),
                str(examples * column.local_steps),
                f"{column.rate:.4f}",
                runs.epochs_text(column.epochs(target)),
                runs.Spread.of(best).percent(),
                str(paper.epochs),
            ]
        )
    headings = ["local steps", "effective batch", "rate", "epochs", "best accuracy, %"]
    return report.format_table([*headings, "the paper's epochs"], rows)


def tables_time(columns: Sequence[Column], target: float, seconds: Seconds) -> list[str]:
    """Table 2 for each link, with the paper's as the last."""
    texts = []
    for link, of in seconds.items():
        efficiencies = [two_hosts.Efficiency(0, of[0], None)]
        efficiencies += [column.efficiency(target, of[column.local_steps]) for column in columns]
        texts.append(f"{link}\n{two_hosts.table_2(efficiencies)}")
    return [*texts, f"The paper's, 40gbit\n{two_hosts.table_2(two_hosts.PAPER, 'min')}"]


def findings(columns: Sequence[Column], target: float, seconds: Seconds) -> list[str]:
    """What the paper says, and whether it is so here."""
    said = []

    def say(claim: str, holds: bool, figures: str) -> None:
        said.append(f"{'yes' if holds else 'NO'}: {claim} ({figures})")

    one, sixteen = (column.epochs(target) for column in columns)
    say(
        "with 16 local steps the target is reached",
        all(sixteen),
        f"{runs.epochs_text(sixteen)}, and with 1 {runs.epochs_text(one)}",
    )
    for link, of in seconds.items():
        say(
            f"an epoch is faster with 16 local steps, {link}",
            of[16] < of[1],
            f"{of[1] / of[16]:.2f} times, the paper's {PAPER_FASTER:.2f}",
        )
        times = [
            column.efficiency(target, of[column.local_steps]).seconds_to_accuracy
            for column in columns
        ]
        say(
            f"so is the time to accuracy, {link}",
            None not in times and times[1] < times[0],
            f"{report.number(times[1])} and {report.number(times[0])} s, "
            "the paper's 166.32 and 175.44 min",
        )
    return said


def section(figures: dict[str, Any]) -> str | None:
    """For docs/results.md."""
    if "columns" not in figures:
        return None
    columns = [Column(**column) for column in figures["columns"]]
    target, seconds = figures["target"], seconds_of(figures["timings"])
    texts = [table_epochs(columns, figures["examples"], target)]
    texts += tables_time(columns, target, seconds)
    said = "\n".join(f"- {line}" for line in figures["findings"])
    return (
        f"Epochs until {target:.1%} of the test images, of each seed, and time to accuracy at each "
        f"speed of the link, with the seeds' median:\n\n"
        + "\n\n".join(f"```\n{text}\n```" for text in texts)
        + f"\n\nWhat the paper found, and whether it is so here:\n\n{said}"
    )


def plot(columns: Sequence[Column], target: float, seconds: Seconds, path: Path) -> None:
    """Accuracy of each seed, over epochs and over the seconds that they take on each link."""
    from matplotlib.figure import Figure

    panels = {"epochs": {column.local_steps: 1.0 for column in columns}}
    panels |= {f"seconds, {link}": of for link, of in seconds.items()}
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, (name, lengths) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        for column, color in zip(columns, ("#000000", "#0072B2"), strict=True):
            length = lengths[column.local_steps]
            for seed, of_seed in enumerate(column.accuracy):
                axes.plot(
                    [length * epoch for epoch in range(1, len(of_seed) + 1)],
                    [100 * accuracy for accuracy in of_seed],
                    color=color,
                    marker=".",
                    alpha=0.7,
                    label=None if seed else f"{column.local_steps} local steps",
                )
        axes.axhline(100 * target, color="#999999", linewidth=0.8)
        axes.set(xlabel=name, ylim=(60, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.supylabel("test accuracy, percent")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--only", choices=["epochs", "timing"], help="one of the two parts")
    add("--workers", type=int, default=4, help="an even number (4)")
    add("--batch", type=int, default=32, help="of a worker (32)")
    add("--epochs", type=int, help="of the schedule (12; quick: 2)")
    add("--train-images", type=int, help="(8192; quick: 1024)")
    add("--target", type=float, help="test accuracy (0.86; quick: 0.5)")
    add("--budget", type=int, help="rates that each search tries (4; quick: 1)")
    add("--links", type=lambda text: text.split(","), help="(400mbit,100mbit; quick: none)")
    add("--timed-epochs", type=int, help="of each kind and link (7; quick: 2)")
    add("--time-limit", type=float, default=600, help="of each job, in seconds (600)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.seeds = options.seeds or (1 if quick else 3)
    options.epochs = options.epochs or (2 if quick else 12)
    options.train_images = options.train_images or (1024 if quick else 8192)
    options.target = options.target or (0.5 if quick else 0.86)
    options.budget = options.budget or (1 if quick else 4)
    # Starting TensorFlow on four ranks takes a minute.
    options.links = options.links or ([] if quick else ["400mbit", "100mbit"])
    options.timed_epochs = options.timed_epochs or (2 if quick else 7)
    return options


def time_all(
    options: argparse.Namespace, done: runs.Runs, progress: report.Progress
) -> list[dict[str, Any]]:
    """What is there of the links, measured now or before."""
    timings = []
    for link in options.links:
        timing = Timing(
            link, options.workers, options.batch, options.timed_epochs, options.train_images
        )
        if options.only == "epochs" and not done.has(timing):
            continue
        try:
            timings.append(
                done.get(timing, lambda timing=timing: measure_time(timing, options.time_limit))
            )
        except namespaces.UnavailableError as error:
            print(f"Two hosts cannot be made here: {error}.", file=sys.stderr)
            break
        progress.advance(f"{link}, {options.workers} ranks")
    return timings


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    done = resnet.runs_of("table2_local_steps", options)
    trainings = len(LOCAL_STEPS) * (options.seeds + options.budget)
    progress = report.Progress(trainings + len(options.links))
    timings = time_all(options, done, progress)
    if options.only == "timing":
        progress.close()
        done.write()
        print(seconds_of(timings))
        return 0
    trainer = resnet.Trainer(lenet.load("fashion_mnist"))

    def train(run: Run) -> Mapping[str, Any]:
        result = done.get(run, lambda: trainer.train(run))
        progress.advance(
            f"{run.local_steps} local steps, rate {run.rate:.4f}: "
            f"{max(result['accuracy'], default=0):.1%}"
        )
        return result

    columns = measure_epochs(options, train)
    progress.close()
    target, seconds, examples = (
        options.target,
        seconds_of(timings),
        options.workers * options.batch,
    )
    said = findings(columns, target, seconds)
    path = done.write(
        target=target,
        examples=examples,
        columns=[dataclasses.asdict(column) for column in columns],
        timings=timings,
        findings=said,
        paper_table_2=[dataclasses.asdict(column) for column in two_hosts.PAPER],
    )
    plot(columns, target, seconds, path.with_suffix(".png"))
    print(f"\nEpochs until {target:.1%}\n{table_epochs(columns, examples, target)}\n")
    print("\n\n".join(tables_time(columns, target, seconds)))
    print("\nWhat the paper found, and whether it is so here\n" + "\n".join(said))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
