"""The hand-written decoder with decode steps that are captured as CUDA graphs.

A step of a small model waits for the CPU, which starts hundreds of kernels one by one. A graph starts all of
them with one call, but they read and write the same memory every time. A captured step therefore reads tokens
and positions from two buffers, and writes logits into another. Everything else that it uses is changed only
in place: a swap copies into the weights, and `SlotCache.place` into the table of blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto_torch.decoder_fast import FastDecoder
from stretto_torch.kv import Block
from stretto_torch.shapes import TokenSpan


class GraphDecoder(FastDecoder):
    """Captures a step at its first use. There is one graph for each number of rows and each length, which is
    rounded up to a power of two. Steps whose rows are in several size classes run uncaptured. On a CPU all
    steps are the same, without graphs."""

    prefers_one_size_class = True

    def __init__(self, model: Any, rows: int, length: int, tokens: int, *, onednn: bool) -> None:
        super().__init__(model, rows, length, tokens, onednn=onednn)
        device = self.cache.device
        self._inputs = torch.zeros(2, rows, dtype=torch.int64, device=device)  # tokens, positions
        self._outputs = torch.zeros(rows, self.vocabulary, device=device)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs and free their memory. Call this when weights or cache get other addresses."""
        self._steps: dict[tuple[int, int, Block], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.cache.device.type == "cuda" else None

    def decode(
        self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan], shifts: Tensor | None = None
    ) -> Tensor:
        """See `Decoder`."""
        rows, blocks = len(tokens), self.cache.blocks
        if len(spans) > 1 or len(blocks) < rows:
            return super().decode(tokens, positions, spans, shifts)
        self._inputs[0, :rows] = tokens
        self._inputs[1, :rows] = positions
        length = min(1 << (spans[0].length - 1).bit_length(), blocks[0].capacity)
        step = rows, length, blocks[0]  # the other blocks follow the first
        if step not in self._steps:
            compute = partial(self.compute, rows, length)
            self._steps[step] = compute if self._pool is None else _capture(compute, self._pool)
        self._steps[step]()
        return self._outputs[:rows]

    def compute(self, rows: int, length: int) -> None:
        """Compute rows 0..rows-1 over `length` positions, from the input buffers to the output buffer."""
        tokens, positions = self._inputs[:, :rows]
        self._outputs[:rows] = super().decode(tokens, positions, [TokenSpan(0, rows, length)])


def _capture(compute: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Return a function that runs the kernels of `compute` again. Graphs with one pool share memory: none of
    them may need what it computed in an earlier run."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        compute()  # libraries prepare themselves in a first run, and that cannot be captured
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU during the capture: one of them checks new weights.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        compute()
    return graph.replay
