"""What an allreduce costs by the LogGP model: formulas for Adasum's algorithms and for sums.

A message of m bytes takes L + 2 o + m G seconds: the latency of the wire, the time that each of
both ends is busy with it, and the time per byte. In pieces, each after the first costs g more. An
exchange is two messages at a time, one each way. P ranks hold n bytes each, T tensors; S ranks are
on a node and share its connection to others, so that when all of them send, G counts S times
between nodes.

Nothing overlaps in the model: where the code combines a piece while the next one comes, it is an
upper bound. Numbers of ranks that are no power of two are folded into the tree as in the code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

PIECE_BYTES = 256 << 10
"""Of a message, in the core."""
SUM_BYTES = 24
"""Of a tensor in the sum of dot products: a.b, a.a and b.b in float64."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Between two ranks. Seconds; G in seconds per byte, with both sending."""

    L: float
    o: float
    g: float
    G: float

    def exchange(self, size: float, sharing: int = 1) -> float:
        """The time of an exchange of messages of `size` bytes, with `sharing` ranks on the link."""
        pieces = max(1, math.ceil(size / PIECE_BYTES))
        return self.L + 2 * self.o + (pieces - 1) * self.g + size * self.G * sharing


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Seconds per byte of one operand."""

    dot3: float
    combine: float
    add: float
    copy: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks in nodes, in order: the first node_size ranks are the first node's."""

    inside: Link
    between: Link
    arithmetic: Arithmetic
    node_size: int

    def exchange(self, distance: int, size: float) -> float:
        """All ranks exchange with the one at this distance, at a time."""
        if distance < self.node_size:
            return self.inside.exchange(size)
        return self.between.exchange(size, sharing=self.node_size)

    def with_every(self, ranks: int, size: float) -> float:
        """Each rank exchanges with each other one of the first `ranks`, one after the other."""
        near = min(self.node_size, ranks)
        inside = (near - 1) * self.inside.exchange(size)
        return inside + (ranks - near) * self.between.exchange(size, sharing=near)

    def sum_over(self, ranks: int, tensors: int, stride: int = 1) -> float:
        """Dot products are summed over this many ranks, `stride` apart, by recursive doubling."""
        return sum(self.exchange(stride * d, SUM_BYTES * tensors) for d in _distances(ranks))


Cost = Callable[[Cluster, int, float, int], float]


def rvh(cluster: Cluster, ranks: int, size: float, tensors: int) -> float:
    """Algorithm 1 over all ranks: seconds for `size` bytes a rank."""
    tree = _tree(cluster, ranks, size, tensors, stride=1)
    return tree + 2 * size * cluster.arithmetic.copy


def ring(cluster: Cluster, ranks: int, size: float, tensors: int) -> float:
    """The line (4.2.3): each rank combines a slice of all vectors, one after the other."""
    arithmetic, slice_bytes = cluster.arithmetic, size / ranks
    step = slice_bytes * (arithmetic.dot3 + arithmetic.combine)
    step += cluster.sum_over(ranks, tensors)
    moving = 2 * cluster.with_every(ranks, slice_bytes)
    return moving + (ranks - 1) * step + 2 * size * arithmetic.copy


def hierarchical(cluster: Cluster, ranks: int, size: float, tensors: int) -> float:
    """Mean or sum in each node, a slice a rank; RVH over nodes for each slice; gather."""
    arithmetic = cluster.arithmetic
    lanes = min(cluster.node_size, ranks)
    slice_bytes = size / lanes
    cost = 2 * cluster.with_every(lanes, slice_bytes)
    cost += (lanes - 1) * slice_bytes * arithmetic.add + 2 * size * arithmetic.copy
    nodes = -(-ranks // lanes)
    return cost + _tree(cluster, nodes, slice_bytes, tensors, stride=lanes)


def rabenseifner_sum(cluster: Cluster, ranks: int, size: float, tensors: int = 0) -> float:
    """A plain sum by recursive halving and doubling."""
    add = dataclasses.replace(cluster.arithmetic, dot3=0, combine=cluster.arithmetic.add)
    adding = dataclasses.replace(cluster, arithmetic=add)
    return _tree(adding, ranks, size, 0, stride=1)


def ring_sum(cluster: Cluster, ranks: int, size: float, tensors: int = 0) -> float:
    """A plain sum around a ring, in which one link of each node leads to the next one."""
    part = size / ranks
    step = cluster.inside.exchange(part)
    if ranks > cluster.node_size:
        # Every rank waits for the one before it, so the slowest link sets the pace.
        step = max(step, cluster.between.exchange(part))
    return 2 * (ranks - 1) * step + (ranks - 1) * part * cluster.arithmetic.add


ALGORITHMS: dict[str, Cost] = {"rvh": rvh, "ring": ring, "hierarchical": hierarchical}
SUMS: dict[str, Cost] = {"Rabenseifner sum": rabenseifner_sum, "ring sum": ring_sum}


def serialised(seconds: float, ranks: int, cores: int) -> float:
    """With more ranks than cores of one machine, everything waits for its turn on a core."""
    return seconds * max(1.0, ranks / cores)


def _tree(cluster: Cluster, leaves: int, size: float, tensors: int, stride: int) -> float:
    """Recursive halving over leaves that are `stride` ranks apart, each of as many lanes.

    tensors: 0 where there are no dot products to be summed.
    """
    arithmetic = cluster.arithmetic
    of_tree = 1 << (leaves.bit_length() - 1)
    folded = of_tree < leaves
    cost, part, behind = 0.0, float(size), 1
    for level, d in enumerate(([1] if folded else []) + list(_distances(of_tree))):
        is_fold = folded and level == 0
        # A leaf's neighbour is further away where pairs of ranks stand for leaves.
        away = stride * d * (1 if is_fold or not folded else 2)
        half = part / 2
        cost += 2 * cluster.exchange(away, half)
        cost += half * (arithmetic.dot3 + arithmetic.combine)
        behind = 2 if is_fold else 2 * d
        if tensors:
            cost += cluster.sum_over(stride, tensors)
            cost += cluster.sum_over(behind, tensors, stride)
        if not is_fold:
            part = half
    # A pair that stands for one leaf: one of the two goes on with the whole, and gives it back.
    return cost + (cluster.exchange(stride, size) if folded else 0)


def _distances(ranks: int) -> list[int]:
    """1, 2, 4, ... below the number of ranks."""
    return [1 << i for i in range((ranks - 1).bit_length())]
