"""What the ranks of `rank.py` say of themselves."""

from __future__ import annotations

import sys
from pathlib import Path

RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]


def places(output: str) -> list[str]:
    """The ranks' lines, in the order of ranks."""
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def one_host(size: int) -> list[str]:
    """What `places` has to be where one job of so many ranks is on one host."""
    total = size * (size + 1) // 2
    return [f"rank {r} of {size}, local {r} of {size}, sum {total}" for r in range(size)]
