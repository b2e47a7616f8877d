"""The ResNet of the example resnet50_imagenet.py, narrow and shallow, for LeNet's images."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import keras
import report

sys.path.append(str(report.ROOT / "examples"))
from resnet50.model import resnet  # noqa: E402


def model(width: int = 8, blocks: Sequence[int] = (1, 1, 1)) -> keras.Model:
    """ResNet v1.5 for 28 x 28 pixels, to 10 classes' logits: by default 34,546 weights.

    Args:
        width: filters of the first stage; each later stage has twice as many.
        blocks: how many bottlenecks each stage has.
    """
    return resnet(28, 10, width=width, blocks=blocks, weight_decay=0.0, channels=1)
