"""What the engine asks of a model: fill a slot with a prompt, and decode one token of every row.

There are two: `decoder_fast` is written by hand for the Llama and Qwen families, `decoder_hf` runs any
causal language model of transformers. `model.py` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stretto_torch.kv import SlotCache
from stretto_torch.shapes import TokenSpan
from stretto_torch.swap import Targets


class Decoder(Protocol):
    """A model with a slot cache. N: prompts, P: columns, R: rows, V: vocabulary.

    A row's logits depend on nothing but what its own slot holds, up to rounding. Where a row's slot lies is
    for its cache to be told, by `SlotCache.place`, before it is computed.
    """

    @property
    def name(self) -> str:
        """For logs: which decoder, of which architecture."""
        ...

    @property
    def vocabulary(self) -> int:
        """V."""
        ...

    @property
    def cache(self) -> SlotCache:
        """The slots."""
        ...

    @property
    def targets(self) -> Targets:
        """Where new weights go."""
        ...

    @property
    def one_shelf(self) -> bool:
        """Whether a step must find all rows on one shelf (`shelves.py`), those of its padding too."""
        ...

    @property
    def cheap_padding(self) -> int:
        """Tokens of padding in a prefill that cost less than starting another one."""
        ...

    def prefill(self, tokens: Tensor, lengths: Tensor, rows: Tensor, begins: Tensor | None = None) -> Tensor:
        """Compute texts, or what follows on what their slots hold, and store their keys and values.

        Args:
            tokens: (N, P) int64, padded on the right with any tokens.
            lengths: (N,) int64, tokens to compute, each >= 1.
            rows: (N,) int64, the slot of each text.
            begins: (N,) int64, tokens that each slot holds already; None if none does.

        Returns:
            (N, V) float32 logits after the last token of each text.
        """
        ...

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan]) -> Tensor:
        """Compute one more token of rows 0..R-1, storing its keys and values.

        Args:
            tokens: (R,) int64.
            positions: (R,) int64; row r attends to its positions 0..positions[r].
            spans: cover the rows in order, from 0 on; rows beyond the last are padding.

        Returns:
            (R, V) float32 logits after each token; anything in rows of padding.
        """
        ...

    def score(self, tokens: Tensor) -> Tensor:
        """Logprobs of a text's tokens (L,) int64 after the first: (L - 1,) float32. Touches no slot."""
        ...


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """(L,) log-probability of each of the tokens (L,) under logits (L, V)."""
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
