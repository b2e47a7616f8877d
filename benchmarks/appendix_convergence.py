"""The bounds of the paper's appendix: how far Adasum turns the expected gradient, how long it makes
it, and how fast it converges.

Lemma A.2: for a and b drawn independently from X, E[Adasum(a, b)] and E[X] are at an angle whose
cosine is at least 0.942 (0.108 pi). Lemma A.3: E[Adasum(a, b)] is 1 to 2 times as long as E[X].
Section A.4: gradients that are all parallel converge at 1/N of the rate of sequential SGD, ones
that are orthogonal at its rate.

How it is checked here. For independent a and b

    E[Adasum(a, b)] = M E[X],  M = 2 I - E[a a^T / |a|^2]

exactly, which is worked out in float64 for distributions on finitely many vectors: random ones in
2 to 64 dimensions, and ones made by hill climbing to turn or to stretch as much as they can. The
core's Adasum of all pairs of a distribution (`core.simulate`) is held against M E[X] in one
program, so that the formula is known to be of the operator that is shipped. The paper's proof
bounds the turn by a single a, and says that a mean of many turns no more. That is so: M's
eigenvalues lie between 1 and 2, for which Kantorovich's inequality has the same bound. How near to
the bounds one gets is what the climbs show. A tree of k levels is drawn too: the paper has no bound
for it, and assumes that it stays below a right angle.

The rate: N workers hold quadratics f_i(w) = |A_i (w - w*)|^2 / 2 with one minimum w*. In the
parallel case all A_i are the same row, in the orthogonal one they are rows of an orthogonal matrix.
Sequential SGD takes one step a worker, Adasum one step for all of them; told is the number of
gradients until the distance to w* is a thousandth, as a multiple of sequential SGD's.

Takes a minute or two, with --quick some seconds.

    python benchmarks/appendix_convergence.py
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import report

from tf_adasum import core

SMALLEST_COSINE = 2 * math.sqrt(2) / 3
"""Of Lemma A.2, 0.9428: (2 - c) / sqrt(4 - 3 c) is least at c = cos^2 = 2/3."""


@dataclasses.dataclass(frozen=True)
class Turned:
    """What Adasum makes of the expected vector."""

    cosine: float
    """Between E[X] and E[Adasum]."""
    stretch: float
    """|E[Adasum]| / |E[X]|."""


def turned(vectors: np.ndarray, weights: np.ndarray) -> Turned:
    """By the formula.

    Args:
        vectors: [vector, dimension], what X may be; none of them zero.
        weights: their probabilities.
    """
    mean = weights @ vectors
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    combined = 2 * mean - (units * weights[:, None]).T @ (units @ mean)
    length, before = np.linalg.norm(combined), np.linalg.norm(mean)
    return Turned(float(mean @ combined / (length * before)), float(length / before))


def turned_by_core(vectors: np.ndarray) -> Turned:
    """By the core's Adasum of all pairs, each vector being as probable as the others."""
    pairs = [(a, b) for a in vectors for b in vectors]
    # Adasum is of each tensor by itself, so all pairs go in one call.
    both = [[np.ascontiguousarray(pair[i], np.float64) for pair in pairs] for i in (0, 1)]
    combined = np.mean(core.simulate(both)[0], axis=0)
    mean = vectors.mean(0)
    length, before = np.linalg.norm(combined), np.linalg.norm(mean)
    return Turned(float(mean @ combined / (length * before)), float(length / before))


def random_distribution(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Some vectors around a mean of random length, with random probabilities."""
    dimension, number = int(rng.integers(2, 65)), int(rng.integers(2, 33))
    center = rng.normal(size=dimension) * rng.choice([0.1, 1.0, 10.0])
    vectors = center + rng.normal(size=(number, dimension)) * rng.lognormal(size=(number, 1))
    return vectors, rng.dirichlet(np.ones(number))


def climb(
    measure: Callable[[np.ndarray, np.ndarray], float],
    vectors: np.ndarray,
    weights: np.ndarray,
    steps: int,
    rng: np.random.Generator,
) -> float:
    """The least that `measure` comes to while random changes that make it less are kept."""
    least, size = measure(vectors, weights), 0.5
    for _ in range(steps):
        new_vectors = vectors + size * rng.normal(size=vectors.shape)
        new_weights = weights * np.exp(size * rng.normal(size=weights.shape))
        new_weights /= new_weights.sum()
        value = measure(new_vectors, new_weights)
        if value < least:
            least, vectors, weights = value, new_vectors, new_weights
            size *= 1.5
        else:
            size *= 0.95
        size = min(max(size, 1e-4), 1.0)
    return least


def tree_cosine(levels: int, draws: int, rng: np.random.Generator) -> float:
    """The least cosine between E[X] and a tree's expectation, over random distributions.

    Each expectation is the mean of 500 trees of 2^levels vectors, by `core.simulate`.
    """
    ranks, trees = 2**levels, 500
    least = 1.0
    for _ in range(draws):
        vectors, weights = random_distribution(rng)
        chosen = rng.choice(len(vectors), size=(ranks, trees), p=weights)
        given = [[np.ascontiguousarray(vectors[i]) for i in of_rank] for of_rank in chosen]
        combined = np.mean(core.simulate(given)[0], axis=0)
        mean = weights @ vectors
        least = min(least, float(mean @ combined / np.linalg.norm(mean) / np.linalg.norm(combined)))
    return least


def gradients_until_close(workers: int, is_parallel: bool, is_adasum: bool, rate: float) -> int:
    """How many gradients it takes to a thousandth of the distance from the start to the minimum."""
    rows = np.eye(workers)
    if is_parallel:
        rows = np.tile(np.eye(1, workers), (workers, 1))
    minimum, w = np.zeros(workers), rows.sum(0)
    start, gradients = np.linalg.norm(w - minimum), 0
    while np.linalg.norm(w - minimum) > 1e-3 * start:
        if is_adasum:
            of_workers = [[row * (row @ (w - minimum))] for row in rows]
            w = w - rate * core.simulate(of_workers)[0][0]
        else:
            for row in rows:
                w = w - rate * row * (row @ (w - minimum))
        gradients += workers
    return gradients


def rates(workers: Sequence[int], rate: float) -> list[dict[str, float]]:
    """Gradients that Adasum takes, over those of sequential SGD."""
    rows = []
    for n in workers:
        ratios = {}
        for name, is_parallel in (("parallel", True), ("orthogonal", False)):
            sequential, adasum = (
                gradients_until_close(n, is_parallel, is_adasum, rate)
                for is_adasum in (False, True)
            )
            ratios[name] = adasum / sequential
        rows.append({"workers": n, **ratios})
    return rows


def bounds_table(figures: dict) -> str:
    rows = [
        ["random distributions", *(f"{figures['random'][k]:.4f}" for k in _BOUNDS)],
        ["made to turn or stretch", *(f"{figures['worst'][k]:.4f}" for k in _BOUNDS)],
        ["the paper's bound", f"{SMALLEST_COSINE:.4f}", "1.0000", "2.0000"],
    ]
    return report.format_table(["", "least cosine", "least stretch", "most stretch"], rows)


_BOUNDS = ("cosine", "least_stretch", "most_stretch")


def levels_table(figures: dict) -> str:
    rows = [[str(2 ** each["levels"]), f"{each['cosine']:.3f}"] for each in figures["trees"]]
    return report.format_table(["workers", "least cosine"], rows)


def rates_table(figures: dict) -> str:
    rows = [
        [str(each["workers"]), f"{each['parallel']:.2f}", f"{each['orthogonal']:.2f}"]
        for each in figures["rates"]
    ]
    return report.format_table(["workers", "parallel", "orthogonal"], rows)


def section(figures: dict) -> str:
    """For docs/results.md."""
    return (
        f"```\n{bounds_table(figures)}\n```\n\n"
        f"After a whole tree, of {figures['tree_draws']} random distributions:\n\n"
        f"```\n{levels_table(figures)}\n```\n\n"
        "Gradients until close, as a multiple of sequential SGD's (the paper: N and 1):\n\n"
        f"```\n{rates_table(figures)}\n```"
    )


def plot(points: Sequence[Turned], worst: dict[str, float], path: Path) -> None:
    """Each random distribution's angle and stretch, and the bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.subplots()
    angles = [math.acos(min(1.0, p.cosine)) / math.pi for p in points]
    axes.plot([p.stretch for p in points], angles, ".", color="#0072B2", alpha=0.4, markersize=3)
    axes.axhline(math.acos(SMALLEST_COSINE) / math.pi, color="#D55E00", label="bound of A.2")
    axes.axhline(
        math.acos(worst["cosine"]) / math.pi, color="#009E73", linestyle=":", label="made to turn"
    )
    for stretch in (1, 2):
        axes.axvline(stretch, color="#999999", label="bounds of A.3" if stretch == 1 else None)
    axes.set(xlabel="|E[Adasum]| / |E[X]|", ylabel="angle to E[X], parts of pi")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def measure(options: argparse.Namespace, advance: Callable[[str], None]) -> tuple[dict, list]:
    rng = np.random.default_rng(options.seed)
    points = [turned(*random_distribution(rng)) for _ in range(options.distributions)]
    advance("random distributions")
    off = 0.0
    for _ in range(10):
        vectors, _ = random_distribution(rng)
        formula = turned(vectors, np.full(len(vectors), 1 / len(vectors)))
        by_core = turned_by_core(vectors)
        off = max(off, abs(formula.cosine - by_core.cosine), abs(formula.stretch - by_core.stretch))
    advance("the formula against the core")

    def worst(of: Callable[[Turned], float]) -> float:
        climbs = []
        for _ in range(options.climbs):
            vectors, weights = random_distribution(rng)
            vectors, weights = vectors[:8, :4], weights[:8] / weights[:8].sum()
            climbs.append(
                climb(lambda v, p: of(turned(v, p)), vectors, weights, options.steps, rng)
            )
            advance("made to turn or stretch")
        return min(climbs)

    figures = {
        "random": {
            "cosine": min(p.cosine for p in points),
            "least_stretch": min(p.stretch for p in points),
            "most_stretch": max(p.stretch for p in points),
        },
        "worst": {
            "cosine": worst(lambda t: t.cosine),
            "least_stretch": worst(lambda t: t.stretch),
            "most_stretch": -worst(lambda t: -t.stretch),
        },
        "formula_differs_from_core_by": off,
        "tree_draws": options.draws,
        "trees": [],
    }
    for levels in options.levels:
        cosine = tree_cosine(levels, options.draws, rng)
        figures["trees"].append({"levels": levels, "cosine": cosine})
        advance(f"trees of {levels} levels")
    figures["rates"] = rates(options.workers, options.rate)
    advance("rates")
    return figures, points


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--distributions", type=int, help="random ones (20000; quick: 2000)")
    add("--climbs", type=int, help="of each kind (20; quick: 4)")
    add("--steps", type=int, help="of a climb (4000; quick: 1000)")
    add("--levels", type=report.integers, default=[1, 2, 4, 6], help="of trees (1,2,4,6)")
    add("--draws", type=int, help="distributions of which trees are drawn (10; quick: 2)")
    add("--workers", type=report.integers, default=[2, 4, 8, 16], help="(2,4,8,16)")
    add("--rate", type=float, default=0.05, help="of the quadratics (0.05)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for name, full, quick in (
        ("distributions", 20000, 2000),
        ("climbs", 20, 4),
        ("steps", 4000, 1000),
        ("draws", 10, 2),
    ):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(report.describe(), flush=True)
    progress = report.Progress(3 + 3 * options.climbs + len(options.levels))
    figures, points = measure(options, progress.advance)
    progress.close()
    name = "appendix_convergence" + ("_quick" if options.quick else "")
    path = report.write(name, options.output, figures)
    plot(points, figures["worst"], path.with_suffix(".png"))
    print(f"\n{bounds_table(figures)}\n")
    print(f"The formula is the core's up to {figures['formula_differs_from_core_by']:.1e}.\n")
    print(f"After a whole tree, of random distributions\n{levels_table(figures)}\n")
    print(f"Gradients until close, over sequential SGD's\n{rates_table(figures)}")
    print(f"\n{path}\n{path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
