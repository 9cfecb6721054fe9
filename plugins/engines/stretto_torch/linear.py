"""The product with a weight matrix, by the kernel that is fast for its size.

On a CPU, torch computes float32 products with MKL by default. On AMD, oneDNN has twice its speed for large
weights. It is called through a private operator of torch, costs about 8 us more per call, and generates code
for each new number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a weight from which oneDNN makes up for its more expensive call at 8 rows, the smallest number
# (measured on Zen 5). The choice depends on the weight alone: another kernel for other rows would give other
# bits.
_WORTHWHILE = 160_000


class Linear:
    """A weight (out_features, in_features), perhaps with a bias (out_features,)."""

    __slots__ = ("_bias", "_onednn", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._onednn = onednn and weight.numel() >= _WORTHWHILE

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` (rows, out_features) for x (rows, in_features)."""
        if self._onednn:
            return _onednn(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual + self(x)`, in one kernel if possible."""
        if self._onednn or self._bias is not None:
            return self(x).add_(residual)
        return torch.addmm(residual, x, self._transposed)


def prefers_onednn(
    choice: Literal["auto", "torch", "onednn"], rows: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether to use oneDNN for large products with this number of rows; `auto` measures."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if choice != "auto":
        return choice == "onednn"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x, weight = torch.randn(rows, 1024), torch.randn(1024, 1024)
    return _seconds(lambda: _onednn(x, weight, None)) < 0.9 * _seconds(lambda: F.linear(x, weight))


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise
    return linear(x, weight, bias, "none", [], "")


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the shortest time of several runs: other load on the machine only adds time."""
    call()
    times: list[float] = []
    for _ in range(5):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)
