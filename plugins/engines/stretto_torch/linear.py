"""The product with a weight matrix, by the kernel that is fast for its size.

On a CPU, torch computes float32 products with MKL. On AMD, oneDNN is faster for large weights: on Zen 5 twice
at any number of rows, on Zen 3 a third at 8 rows and not at 64. It is called through private operators of
torch, costs about 8 us more per call, generates code for each new number of rows, and keeps a second copy of
the weight in its own order, packed again after each change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a weight from which oneDNN makes up for its more expensive call at 8 rows (measured on Zen 5).
# It depends on the weight alone: another kernel for other rows would give other bits.
_WORTHWHILE = 160_000
# Rows for which a weight is packed. Other numbers of rows use the same order.
_PACKED_FOR = 32


class Linear:
    """A weight (out_features, in_features), perhaps with a bias. When it has changed, call `pack`."""

    __slots__ = ("_bias", "_onednn", "_packed", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._onednn = onednn and weight.numel() >= _WORTHWHILE
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Copy the weight into the order of its kernel, if that is another one."""
        if self._onednn:
            self._packed = None  # one copy at a time
            reorder: Any = torch.ops.mkldnn._reorder_linear_weight
            self._packed = reorder(self._weight, _PACKED_FOR)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` (rows, out_features) for x (rows, in_features)."""
        if self._packed is not None:
            linear: Any = torch.ops.mkldnn._linear_pointwise
            return linear(x, self._packed, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual + self(x)`, in one kernel if possible."""
        if self._packed is not None or self._bias is not None:
            return self(x).add_(residual)
        return torch.addmm(residual, x, self._transposed)


def prefers_onednn(
    choice: Literal["auto", "torch", "onednn"], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether to use oneDNN for large products; `auto`: on AMD. It measures nothing: the bits of a
    deterministic engine would follow the measurement."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if choice != "auto":
        return choice == "onednn"
    is_there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return is_there and _is_amd()


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
