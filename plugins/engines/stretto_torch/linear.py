"""The product with a weight matrix, by whichever kernel is fast for its size.

On a CPU, float32 products go to MKL by default. On AMD, oneDNN has twice its speed for large weights; it
is reached through an operator that torch keeps private, costs some 8 us more a call, and generates code
for each new number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a weight from which oneDNN makes up for its dearer call at 8 rows, the fewest there are
# (measured on Zen 5). The choice is by weight alone: another kernel for other rows would give other bits.
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
        """`x @ weight.T + bias` (rows, out_features) of x (rows, in_features)."""
        if self._onednn:
            return _onednn(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in one kernel where there is one."""
        if self._onednn or self._bias is not None:
            return self(x).add_(residual)
        return torch.addmm(residual, x, self._transposed)


def prefers_onednn(
    wanted: Literal["auto", "torch", "onednn"], rows: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether large products of so many rows should go to oneDNN; `auto` measures."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if wanted != "auto":
        return wanted == "onednn"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x, weight = torch.randn(rows, 1024), torch.randn(1024, 1024)
    return _seconds(lambda: _onednn(x, weight, None)) < 0.9 * _seconds(lambda: F.linear(x, weight))


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise
    return linear(x, weight, bias, "none", [], "")


def _seconds(call: Callable[[], Tensor]) -> float:
    """The least of several runs: what else the machine does only ever adds."""
    call()
    times: list[float] = []
    for _ in range(5):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return min(times)
