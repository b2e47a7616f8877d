"""Adasum in float64 NumPy, to be read as its definition. Every other implementation is tested
against it.

A worker's contribution is a list of arrays, one a layer: Adasum works on each layer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Pair = Callable[[np.ndarray, np.ndarray], np.ndarray]


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The pair (the paper's equation 5): (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b.

    Orthogonal vectors are added, equal ones averaged; a zero vector is neutral.

    Args:
        a: an array of any real dtype; products are taken in float64.
        b: an array of the same shape.

    Returns:
        A float64 array of that shape.

    Raises:
        ValueError: if the shapes differ.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"`a` and `b` must have the same shape. Received: {a.shape} and {b.shape}")
    # Scaled to a largest magnitude near 1, no square overflows or vanishes. A power of two costs
    # no digits.
    unit_a, exponent_a = _scaled(a)
    unit_b, exponent_b = _scaled(b)
    dot = np.vdot(unit_a, unit_b)
    along_a = dot / (2 * np.vdot(unit_a, unit_a)) if unit_a.any() else 0.0
    along_b = dot / (2 * np.vdot(unit_b, unit_b)) if unit_b.any() else 0.0
    # a takes half of b's projection on it away, which is along_a a in b's scale, and b likewise.
    # Where 3/2 of a number would be too large, or half of one denormal, all is moved away from
    # there for the time being.
    larger = max(exponent_a, exponent_b)
    shift = int(np.clip(larger, -900, 1000)) - larger
    half_on_a = along_a * np.ldexp(a, exponent_b - exponent_a + shift)
    half_on_b = along_b * np.ldexp(b, exponent_a - exponent_b + shift)
    result = (np.ldexp(a, shift) - half_on_a) + (np.ldexp(b, shift) - half_on_b)
    return np.ldexp(result, -shift)


def _scaled(x: np.ndarray) -> tuple[np.ndarray, int]:
    largest = np.max(np.abs(x), initial=0.0)
    if largest == 0 or not np.isfinite(largest):
        return x, 0
    exponent = int(np.clip(np.frexp(largest)[1], -1020, 1020))
    return np.ldexp(x, -exponent), exponent


def tree(vectors: Sequence[np.ndarray], pair: Pair = adasum) -> np.ndarray:
    """The vectors of all ranks combined in the order of the paper's Algorithm 1.

    For 4 ranks ((0, 1), (2, 3)). With p the largest power of two not above their number n and
    r = n - p, ranks (0, 1), ..., (2r - 2, 2r - 1) are combined first; the p results are the leaves:
    3 ranks give ((0, 1), 2), 6 give (((0, 1), (2, 3)), (4, 5)).

    Args:
        vectors: one array a rank, in rank order, all of one shape.
        pair: what combines two of them.

    Raises:
        ValueError: if there is no vector.
    """
    level = _at_least_one(vectors)
    leaves = 1 << (len(level).bit_length() - 1)
    pairs = len(level) - leaves
    level = [pair(level[2 * i], level[2 * i + 1]) for i in range(pairs)] + level[2 * pairs :]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def ring(vectors: Sequence[np.ndarray], pair: Pair = adasum) -> np.ndarray:
    """The vectors of all ranks combined one after the other: (((0, 1), 2), 3) (the paper's 4.2.3).

    Args and errors are those of `tree`.
    """
    first, *others = _at_least_one(vectors)
    for other in others:
        first = pair(first, other)
    return first


def hierarchical(
    vectors: Sequence[np.ndarray], hosts: Sequence[int], in_host: str = "average"
) -> np.ndarray:
    """The mean, or the sum, of each host's vectors, then the tree over the hosts.

    Args:
        vectors: one array a rank, in rank order, all of one shape.
        hosts: for each rank the number of its host. Hosts are in the order of their first ranks.
        in_host: "average" or "sum".

    Raises:
        ValueError: if there is no vector, or not one host for each.
    """
    of_host: dict[int, list[np.ndarray]] = {}
    for host, vector in zip(hosts, _at_least_one(vectors), strict=True):
        of_host.setdefault(host, []).append(vector)
    reduce = {"average": np.mean, "sum": np.sum}[in_host]
    return tree([reduce(of, axis=0) for of in of_host.values()])


def _at_least_one(vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(vectors) == 0:
        raise ValueError("`vectors` must hold at least one rank's vector. Received: none")
    return [np.asarray(vector, np.float64) for vector in vectors]


def orthogonality(vectors: Sequence[np.ndarray]) -> float:
    """|Adasum(g1, ..., gn)|^2 / (|g1|^2 + ... + |gn|^2) of one layer (the paper's section 3.6).

    1 where the vectors are orthogonal, 1/n where they are equal, NaN where all are zero.
    """
    combined = tree(vectors)
    norms = sum(float(np.vdot(v, v)) for v in _at_least_one(vectors))
    return float(np.vdot(combined, combined)) / norms if norms else float("nan")
