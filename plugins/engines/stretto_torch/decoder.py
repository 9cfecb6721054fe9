"""The interface between engine and model: fill a slot with a prompt, and decode one token of every row.

`model.py` chooses between `decoder_fast`, written by hand for the Llama and Qwen families, and `decoder_hf`,
which runs any causal language model of transformers.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stretto_torch.images import PromptImages
from stretto_torch.kv import SlotCache
from stretto_torch.shapes import TokenSpan
from stretto_torch.swap import Targets


class Decoder(Protocol):
    """A model with a slot cache. N: prompts, P: columns, R: rows, V: vocabulary.

    A row's logits depend only on the contents of its own slot, up to rounding. The engine sets the position
    of a row's slot in the cache with `SlotCache.place`, before the row is computed.
    """

    name: str
    """The decoder and the model's architecture, for logs."""
    vocabulary: int  # V
    cache: SlotCache  # the slots
    targets: Targets  # the tensors that new weights are copied into
    one_size_class: bool
    """True if all rows of a step, padding included, must be in one size class (`size_classes.py`)."""
    prefers_one_size_class: bool
    """True if they should be in one size class whenever the cache has room for that."""
    cheap_padding: int
    """Number of padding tokens in one prefill up to which padding costs less than a second prefill."""

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        rows: Tensor,
        begins: Tensor | None = None,
        *,
        shifts: Tensor | None = None,
        images: PromptImages | None = None,
    ) -> Tensor:
        """Compute texts, or the part of each text after the tokens in its slot, and store keys and values.

        Args:
            tokens: (N, P) int64, padded on the right with any tokens.
            lengths: (N,) int64, number of tokens to compute, each >= 1.
            rows: (N,) int64, the slot of each text.
            begins: (N,) int64, number of tokens that each slot holds already; None if all are empty.
            shifts: (N,) int64, see `PromptImages.shift`; only with `begins`, and None for models of text.
            images: the images of the only text, computed from its beginning; None if no text has images.

        Returns: (N, V) float32 logits after the last token of each text.
        """
        ...

    def decode(
        self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan], shifts: Tensor | None = None
    ) -> Tensor:
        """Compute one more token of rows 0..R-1, and store its keys and values.

        Args:
            tokens: (R,) int64.
            positions: (R,) int64; row r attends to its positions 0..positions[r].
            spans: the rows in order, from 0 on; rows after the last span are padding.
            shifts: (R,) int64, see `PromptImages.shift`; None for models of text.

        Returns: (R, V) float32 logits after each token, valid until the next call; padding rows have
            arbitrary values.
        """
        ...

    def score(self, tokens: Tensor, images: PromptImages | None = None) -> Tensor:
        """Return logprobs of a text's tokens (L,) int64 after the first: (L - 1,) float32. Uses no slot."""
        ...


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each of the tokens (L,) under logits (L, V): (L,)."""
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
