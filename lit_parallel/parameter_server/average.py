"""Sums of gradients, divided: one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

#: Elements that are averaged at a time: they stay in the innermost caches.
_BLOCK = 1 << 15
_FULL_PRECISION_BYTES = 4


def average_into(target: Tensor, others: Sequence[Tensor], divisor: int) -> None:
    """Adds other vectors to one, in their order, and divides it.

    Cost: each vector is read once and the first one written once; no memory is taken.

    Args:
        target: 1-D; changed in place.
        others: Like it.
        divisor: Of the sum, often more than the number of vectors: who has none counts as zeros.
    """
    if divisor == 1 and not others:
        return
    if target.itemsize < _FULL_PRECISION_BYTES:
        # NumPy knows no bfloat16, and is slow at float16; sums could overflow before they are divided.
        target.div_(divisor)
        for theirs in others:
            target.add_(theirs, alpha=1 / divisor)
        return
    array, sources, scale = target.numpy(), [theirs.numpy() for theirs in others], 1 / divisor
    with np.errstate(all="ignore"):  # infinite gradients are no news
        for start in range(0, len(array), _BLOCK):
            block = array[start : start + _BLOCK]
            for source in sources:
                block += source[start : start + _BLOCK]
            block *= scale
