"""How much the ranks' contributions agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_adasum import reference


def orthogonality(per_rank_tensors: Sequence[Sequence[np.ndarray]]) -> list[float]:
    """How parallel the ranks' tensors are, each by itself (the paper's section 3.6).

    That is |Adasum(g1, ..., gn)|^2 / (|g1|^2 + ... + |gn|^2), computed in float64: 1 where the
    ranks' tensors are orthogonal, 1/n where they are equal, NaN where all are zero.

    Args:
        per_rank_tensors: for each rank its tensors, `[rank][tensor]`, of the same shapes on all.

    Returns:
        One number for each tensor.

    Raises:
        ValueError: if there is no rank, or ranks differ in the number or shapes of tensors.
    """
    numbers = {len(tensors) for tensors in per_rank_tensors}
    if len(numbers) != 1:
        raise ValueError(
            "`per_rank_tensors` must hold at least one rank, and as many tensors for each. "
            f"Received: {[len(tensors) for tensors in per_rank_tensors]} tensors"
        )
    return [reference.orthogonality(vectors) for vectors in zip(*per_rank_tensors, strict=True)]
