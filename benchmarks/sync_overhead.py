"""What a sync costs in the training of ResNet-50: its share of a step, and memory.

Two ranks of this machine train keras.applications.ResNet50 (25.6 million weights, 102 MB) with SGD
and momentum, plain and wrapped into AdasumOptimizer with 1, 4 and 16 local steps, in turns. Images
are small (64 x 64) and batches too (4 a rank), so that a processor takes a step in half a second. A
sync moves the weights alone, so its time does not depend on image or batch, but its share of a step
does: a GPU at 224 x 224 and a batch of 256 takes some hundred milliseconds, a processor minutes.
So besides the share measured here there is the share it would have of steps of
--step-milliseconds.

The time of a sync is taken in three ways, each from when all ranks begin until the slowest is done:

    sync()       around optimizer.sync() with one step pending; a call that also asks whether all
                 ranks are through
    difference   what the first and the last step of a window take longer than those between; the
                 copy of the weights that a window starts with is part of it
    in all       what a window takes longer than as many steps of the plain optimizer; of a long
                 window not much more than the steps' own scatter

Memory is the most that rank 0 had at a time, in jobs of their own, with and without the wrapper.

The paper gives the throughput: for BERT-Large on 64 GPUs Adasum cost less than 2% of it (Table 4),
with ResNet-50 an epoch took 5.72 minutes instead of 5.61 (section 5.1).

Takes 4 to 6 minutes on 2 cores, with --quick 1 to 2. Run `make build` before.

    python benchmarks/sync_overhead.py
    python benchmarks/sync_overhead.py --image 128 --batch 16 --step-milliseconds 250
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jobs
import report

from tf_adasum import launch

TRAINING = Path(__file__).with_name("sync_overhead_training.py")
PLAIN = 0
DIRECT = "sync()"


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Seconds, with a number of local steps."""

    local_steps: int
    step: float
    """A step without a sync."""
    difference: float
    """What the sync of a window takes, by the difference of steps."""
    in_all: float
    """What a window takes longer than without the wrapper."""

    @property
    def share(self) -> float:
        """The sync's part of the training time."""
        return share(self.difference, self.local_steps, self.step)


def share(sync: float, local_steps: int, step: float) -> float:
    """The part of a window of steps and a sync that the sync takes, from 0 to 1."""
    return sync / (local_steps * step + sync)


def overheads(windows: Mapping[int, Sequence[Sequence[float]]]) -> list[Overhead]:
    """What the windows' steps tell.

    Args:
        windows: local steps -> for each window the seconds of its steps; `PLAIN` for those of the
            plain optimizer.

    Returns:
        One for each number of local steps but `PLAIN`. The step without a sync is the median of
        those between a window's first and last; with fewer than 3 local steps there is none, and
        that of the longest window is taken.
    """
    plain = statistics.median(step for window in windows[PLAIN] for step in window)
    between = {
        local_steps: statistics.median(step for window in of_n for step in window[1:-1])
        for local_steps, of_n in windows.items()
        if local_steps >= 3
    }
    found = []
    for local_steps in sorted(set(windows) - {PLAIN}):
        step = between.get(local_steps, between[max(between)])
        ends = sorted({0, local_steps - 1})
        difference = sum(
            statistics.median(window[end] for window in windows[local_steps]) - step for end in ends
        )
        whole = statistics.median(sum(window) for window in windows[local_steps])
        found.append(Overhead(local_steps, step, difference, whole - local_steps * plain))
    return found


def tables(found: Sequence[Overhead], direct: float, steps: Sequence[float]) -> str:
    """Shares measured here, and of steps (seconds) that take longer or shorter elsewhere."""
    rows = [
        [
            str(each.local_steps),
            *(report.number(1e3 * s) for s in (each.step, direct, each.difference, each.in_all)),
            f"{share(direct, each.local_steps, each.step):.1%}",
            f"{each.share:.1%}",
        ]
        for each in found
    ]
    headings = ["local steps", "step ms", "sync() ms", "difference ms", "in all ms"]
    measured = report.format_table([*headings, "share by sync()", "by difference"], rows)
    elsewhere = [
        [str(each.local_steps), *(f"{share(direct, each.local_steps, s):.2%}" for s in steps)]
        for each in found
    ]
    assumed = ["local steps", *(f"{1e3 * step:g} ms" for step in steps)]
    return (
        f"{measured}\n\nThe share that sync() would have of a step of\n"
        f"{report.format_table(assumed, elsewhere)}"
    )


def memory_table(memory: Sequence[Mapping[str, int]]) -> str:
    """Peaks with and without the wrapper, in MB and in copies of the weights."""
    without = next(m["peak_bytes"] for m in memory if m["local_steps"] == PLAIN)
    rows = []
    for each in memory:
        more = each["peak_bytes"] - without
        name = f"local_steps={each['local_steps']}" if each["local_steps"] else "plain optimizer"
        copies = f"{more / each['weight_bytes']:.2f}"
        rows.append([name, f"{each['peak_bytes'] / 1e6:.0f}", f"{more / 1e6:.0f}", copies])
    return report.format_table(["memory", "peak MB", "more MB", "copies of the weights"], rows)


def plot(found: Sequence[Overhead], direct: float, path: Path) -> None:
    """The share of the sync against the time of a step, for each number of local steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps = [10 * 10 ** (i / 20) for i in range(61)]
    for each, color in zip(found, ("#D55E00", "#0072B2", "#009E73", "#CC79A7"), strict=False):
        shares = [100 * share(direct, each.local_steps, step / 1e3) for step in steps]
        axes.loglog(steps, shares, color=color, label=f"local_steps={each.local_steps}")
        measured = 100 * share(direct, each.local_steps, each.step)
        axes.plot(1e3 * each.step, measured, color=color, marker="o")
    axes.axhline(1, color="#999999", linestyle=":")
    axes.set(
        title=f"A sync of ResNet-50 takes {1e3 * direct:.0f} ms (dots: measured)",
        xlabel="milliseconds of a step without sync",
        ylabel="share of the sync, percent",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--np", type=int, default=2, help="ranks (2)")
    add("--local-steps", type=report.integers, default=[1, 4, 16], help="(1,4,16)")
    add("--image", type=int, default=64, help="pixels on each side (64; at least 32)")
    add("--batch", type=int, default=4, help="images a rank and step (4)")
    add("--rounds", type=int, help="windows of each optimizer (12; quick: 3)")
    add(
        "--step-milliseconds",
        type=report.integers,
        default=[100, 300, 1000, 10000],
        help="steps of which the share is told (100,300,1000,10000)",
    )
    add("--time-limit", type=float, default=1200, help="of each job, in seconds (1200)")
    options = parser.parse_args(argv)
    if max(options.local_steps) < 3:
        parser.error("--local-steps needs one of at least 3, or there is no step without a sync")
    options.rounds = options.rounds or (3 if options.quick else 12)
    return options


def main() -> int:
    options = parse()
    started = time.monotonic()
    print(report.describe(), flush=True)
    contenders = [PLAIN, *options.local_steps]
    in_memory = [PLAIN, 1]
    progress = report.Progress(options.rounds * (len(contenders) + 1) + len(in_memory))
    start = [*launch.mpirun_command(options.np), sys.executable, str(TRAINING)]
    sizes = ["--image", str(options.image), "--batch", str(options.batch)]
    windows: dict[Any, list[list[float]]] = {}

    def take(result: dict[str, Any]) -> None:
        windows.setdefault(result["local_steps"], []).append(result["seconds"])
        progress.advance(f"local_steps={result['local_steps']}")

    chosen = ["--local-steps", ",".join(map(str, contenders)), "--rounds", str(options.rounds)]
    jobs.run([*start, "times", *chosen, *sizes], options.time_limit, take)
    direct = statistics.median(seconds for window in windows.pop(DIRECT) for seconds in window)
    found = overheads(windows)
    memory = []
    for local_steps in in_memory:
        command = [*start, "memory", "--local-steps", str(local_steps), *sizes]
        memory += jobs.run(command, options.time_limit)
        progress.advance(f"memory, local_steps={local_steps}")
    progress.close()
    steps = [step / 1e3 for step in options.step_milliseconds]
    print(f"\n{tables(found, direct, steps)}\n\n{memory_table(memory)}")
    figures = {
        "ranks": options.np,
        "image": options.image,
        "batch": options.batch,
        "seconds_taken": round(time.monotonic() - started),
        "sync_seconds": direct,
        "overheads": [{**dataclasses.asdict(each), "share": each.share} for each in found],
        "memory": memory,
        "windows": windows,
    }
    path = report.write("sync_overhead", options.output, figures)
    plot(found, direct, path.with_suffix(".png"))
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
