"""Normalisation by the root mean square, with few kernels.

On a CPU `F.rms_norm` is eight kernels, a quarter of a small model's decode step. x / sqrt(mean(x ** 2) + eps)
equals sqrt(D) * x / hypot(|x|, sqrt(D * eps)), which is four kernels if the weight contains sqrt(D).
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm:
    """The normalisation of vectors of dimension D. `weight`: (D,), already multiplied by `factor`."""

    __slots__ = ("_eps", "_least", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._least = weight.new_tensor(sqrt(len(weight) * eps)) if _by_length(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised vectors of x (..., D)."""
        if self._least is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        length = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
        return x.div(length.hypot_(self._least)).mul_(self._weight)

    @staticmethod
    def factor(dim: int, state: Tensor) -> float:
        """Return the factor of `Norm`'s weight, for the device and dtype of `state`."""
        return sqrt(dim) if _by_length(state) else 1.0


def _by_length(tensor: Tensor) -> bool:
    """Return True to use the four kernels: a GPU needs only one, and bfloat16 would round the factor."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32
