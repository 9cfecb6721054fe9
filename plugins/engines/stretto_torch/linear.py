"""The product with a weight matrix, by whichever kernel is fast for its size.

On a CPU, float32 products go to MKL by default. On AMD, oneDNN has twice its speed once a product is
large, and costs some 8 us more a call; it is reached through an operator that torch keeps private.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# rows x elements of the weight from which oneDNN makes up for its dearer call (measured on Zen 5).
_WORTHWHILE = 1_300_000
# How many rows a decode step has at least; see `slots.PADDING`.
_FEWEST_ROWS = 8

OnednnFrom = Callable[[int], float]
"""From how many rows on oneDNN multiplies a weight with this many elements; infinity for never."""


class Linear:
    """`x @ weight.T + bias` for x (rows, in_features), weight (out_features, in_features)."""

    __slots__ = ("_bias", "_onednn_from", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, onednn_from: OnednnFrom) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._onednn_from = onednn_from(weight.numel())

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self._onednn_from:
            return _onednn(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in one kernel where there is one."""
        if self._bias is None and x.shape[0] < self._onednn_from:
            return torch.addmm(residual, x, self._transposed)
        return self(x).add_(residual)


def choose_kernel(
    wanted: Literal["auto", "torch", "onednn"],
    *,
    deterministic: bool,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> OnednnFrom:
    """Decide once, at the start, which products go to oneDNN.

    Under `deterministic` the kernel depends on the weight alone: another kernel for another number of
    rows would give other bits.
    """
    if device.type != "cpu" or dtype != torch.float32 or wanted == "torch":
        return lambda elements: inf
    if wanted == "auto" and (deterministic or not _onednn_is_faster(rows)):
        return lambda elements: inf
    if deterministic:
        return lambda elements: 0 if _FEWEST_ROWS * elements >= _WORTHWHILE else inf
    return lambda elements: _WORTHWHILE / elements


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise
    return linear(x, weight, bias, "none", [], "")


def _onednn_is_faster(rows: int) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    x, weight = torch.randn(rows, 1024), torch.randn(1024, 1024)
    return _seconds(lambda: _onednn(x, weight, None)) < 0.9 * _seconds(lambda: F.linear(x, weight))


def _seconds(call: Callable[[], Tensor]) -> float:
    """The least of several runs: what else the machine does only ever adds."""
    call()
    times: list[float] = []
    for _ in range(5):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return min(times)
