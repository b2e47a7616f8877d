"""Trainings that together take long: each one's result is on disk as soon as it is there, so that a
program that was killed goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import report


class Runs:
    """The runs of one JSON file, told apart by what they were started with.

    Args:
        name: of the file, without `.json`.
        folder: where it is, or is to be.
        fresh: forget what is there.
        others: names of files whose runs are taken over where they are wanted.
    """

    def __init__(self, name: str, folder: Path, fresh: bool = False, others: Sequence[str] = ()):
        self._name, self._folder = name, folder
        self._done, *of_others = (
            json.loads(path.read_text())["runs"] if path.exists() and not fresh else []
            for path in (folder / f"{each}.json" for each in (name, *others))
        )
        self._of_others = [run for of_file in of_others for run in of_file]

    def has(self, run: Any) -> bool:
        """Whether its result is there."""
        return self._find(run) is not None

    def get(self, run: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a run, a dataclass: the one that is there, or what `make` returns."""
        found = self._find(run)
        if found is None:
            found = self._find(run, self._of_others) or self._made(run, make)
            self._done.append(found)
            self.write()
        return found

    def write(self, **figures: Any) -> Path:
        """Writes the file: the runs, and the figures that were made of them.

        One that would say the same is left as it is: it says when and where that was measured.
        """
        path = self._folder / f"{self._name}.json"
        content = {**figures, "runs": self._done}
        if path.exists():
            there = json.loads(path.read_text())
            if all(there.get(key) == value for key, value in content.items()):
                return path
        return report.write(self._name, self._folder, content)

    @staticmethod
    def _made(run: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        started = time.monotonic()
        result = make()
        return {
            "run": dataclasses.asdict(run),
            **result,
            "seconds": round(time.monotonic() - started, 1),
            "commit": report.software().get("commit"),
        }

    def _find(
        self, run: Any, among: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, Any] | None:
        wanted = dataclasses.asdict(run)
        # Of fields that were added since, a run had the defaults.
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(run)
            if field.default is not dataclasses.MISSING
        }
        among = self._done if among is None else among
        return next((each for each in among if {**defaults, **each["run"]} == wanted), None)


def parser(description: str | None) -> Any:
    """`report.parser`'s, with the options of programs that have runs."""
    made = report.parser(description)
    made.add_argument(
        "--fresh", action="store_true", help="run all again, also what is in the JSON file already"
    )
    made.add_argument("--seeds", type=int, help="of each configuration (3; quick: 1)")
    return made


def name_of(name: str, quick: bool) -> str:
    """Of the JSON file: short runs have one of their own."""
    return f"{name}_quick" if quick else name


@dataclasses.dataclass(frozen=True)
class Spread:
    """Several seeds' values."""

    mean: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        values = list(values)
        # Exactly, so that the mean of equal values is between them.
        return Spread(statistics.mean(values), min(values), max(values))

    def percent(self, digits: int = 1) -> str:
        """`88.1 (87.9-88.4)`, or one number where there was one seed."""
        return self.text(digits, 100)

    def text(self, digits: int, factor: float = 1) -> str:
        """As `percent`, of another unit."""
        mean, least, most = (f"{factor * v:.{digits}f}" for v in dataclasses.astuple(self))
        return mean if self.least == self.most else f"{mean} ({least}-{most})"


def accuracies(results: Sequence[dict[str, Any]]) -> Spread:
    return Spread.of(result["accuracy"] for result in results)


def first_epoch(accuracy: Sequence[float], target: float) -> int | None:
    """The first after which the target was reached, counted from 1."""
    return next((epoch for epoch, a in enumerate(accuracy, 1) if a >= target), None)


def epochs_text(epochs: Sequence[int | None]) -> str:
    """`9, 10, never`: those of each seed."""
    return ", ".join("never" if of_seed is None else str(of_seed) for of_seed in epochs)
