"""Figures as text: bytes, numbers and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def size_name(size: int) -> str:
    """Bytes in the largest unit that divides them: 64 KiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


def number(value: float | None) -> str:
    """Three digits that count, or a dash where there is no value."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN if there is none."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def format_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text under a line of headings; the first column to the left, the others right."""
    cells = [list(headings), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in cells
    )
