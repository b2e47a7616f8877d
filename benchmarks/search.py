"""A learning rate for each method, found with the same number of trainings for each."""

from __future__ import annotations

from collections.abc import Callable

FAILED = 0.2
"""An accuracy at or below this counts as none: 10 classes guessed give 0.1."""


def best_rate(
    evaluate: Callable[[float], float], start: float, budget: int, failed: float = FAILED
) -> float:
    """The rate with the highest accuracy among at most `budget` that are tried.

    It climbs from `start` by factors of 2, first down, then up, and when neither is better by
    factors of the square root of 2. Rates above one that failed are not tried: they fail as well.
    While all have failed it goes down.

    Args:
        evaluate: rate -> accuracy, or another number of which more is better, such as a negative
            loss.
        start: where to begin; the first that is tried.
        budget: how many rates to try, at least 1.
        failed: a rate has failed if its accuracy is this or less.
    """
    tried = {0: evaluate(start)}  # by half octaves above the start
    stride = 2
    while len(tried) < budget:
        best = max(tried, key=tried.__getitem__)
        too_high = [place for place, accuracy in tried.items() if accuracy <= failed]
        if best in too_high:
            candidates = [min(tried) - stride]
        else:
            candidates = [best - stride, best + stride]
            candidates = [
                c for c in candidates if c not in tried and c < min(too_high, default=c + 1)
            ]
        if candidates:
            tried[candidates[0]] = evaluate(start * 2 ** (candidates[0] / 2))
        elif stride == 1:
            break
        else:
            stride = 1
    return start * 2 ** (max(tried, key=tried.__getitem__) / 2)
