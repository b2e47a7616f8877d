"""A learning rate for each method, found with the same number of trainings for each."""

from __future__ import annotations

from collections.abc import Callable

FAILED = 0.2
"""An accuracy at or below this counts as none: 10 classes guessed give 0.1."""


def best_rate(evaluate: Callable[[float], float], start: float, budget: int) -> float:
    """The rate with the highest accuracy among at most `budget` that are tried.

    It climbs from `start` by factors of 2, first down, then up, and when neither is better by
    factors of the square root of 2. Rates above one that failed are not tried: they fail as well.
    While all have failed it goes down.

    Args:
        evaluate: rate -> accuracy, from 0 to 1.
        start: where to begin; the first that is tried.
        budget: how many rates to try, at least 1.
    """
    tried = {0: evaluate(start)}  # by half octaves above the start
    stride = 2
    while len(tried) < budget:
        best = max(tried, key=tried.__getitem__)
        failed = [place for place, accuracy in tried.items() if accuracy <= FAILED]
        if best in failed:
            candidates = [min(tried) - stride]
        else:
            candidates = [best - stride, best + stride]
            candidates = [
                c for c in candidates if c not in tried and c < min(failed, default=c + 1)
            ]
        if candidates:
            tried[candidates[0]] = evaluate(start * 2 ** (candidates[0] / 2))
        elif stride == 1:
            break
        else:
            stride = 1
    return start * 2 ** (max(tried, key=tried.__getitem__) / 2)
