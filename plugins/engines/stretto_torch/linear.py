"""The product with a weight matrix, by the kernel that is fast for its size.

On a CPU, torch computes float32 products with MKL. On AMD, oneDNN is faster for large weights: twice as fast
on Zen 5, a third faster on Zen 3 at 8 rows, not faster at 64. oneDNN is called through private operators of
torch, costs about 8 us more per call, generates code for each new number of rows, and needs a second copy of
the weight in another order (a packed copy), which must be made again after each change.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto_torch import is_amd

# Number of elements of a weight from which oneDNN is faster at 8 rows, with its slower call (on Zen 5).
# The choice must not depend on the number of rows: another kernel for other rows would give other bits.
_WORTHWHILE = 160_000
# Number of rows for which a weight is packed. Products with other numbers of rows use the same copy.
_PACKED_FOR = 32


class Linear:
    """A weight (out_features, in_features), perhaps with a bias. Call `pack` after the weight has changed."""

    __slots__ = ("_bias", "_onednn", "_packed", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._onednn = onednn and weight.numel() >= _WORTHWHILE
        self._packed: Tensor | None = None

    def unpack(self) -> None:
        """Drop the packed copy of the weight."""
        self._packed = None

    def pack(self) -> None:
        """Make the packed copy of the weight, if oneDNN computes its products."""
        if self._onednn:
            self.unpack()  # one copy at a time
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
    """Return True to use oneDNN for large products; `auto` does on AMD. No speed is measured: the bits of a
    deterministic engine would depend on the measurement."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if choice != "auto":
        return choice == "onednn"
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return available and is_amd()
