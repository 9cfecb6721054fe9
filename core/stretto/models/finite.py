"""Look for NaN and infinity in weights, at a small part of the cost of hashing them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["not_finite"]


def not_finite(name: str, tensor: Tensor) -> str:
    """Return a text that names the tensor if it has a NaN or an infinite value; empty if it has none."""
    import torch

    # torch computes no minimum of 8-bit floats; engines do not train in these dtypes.
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return ""
    # An element that is NaN makes both NaN. This is ten times as fast as `isfinite`, which writes a mask.
    lowest, highest = torch.aminmax(tensor.detach())
    if math.isfinite(lowest) and math.isfinite(highest):
        return ""
    wrong = int((~tensor.isfinite()).sum())
    return (
        f"weights are not finite: {wrong} of {tensor.numel()} values of tensor {name!r} are NaN or infinite"
    )
