"""A decoder that runs any causal language model of transformers, through its own forward.

The model is handed a cache object that writes each row's keys and values at that row's own position of
its slot, and an attention mask that hides the rest of the slot. N: prompts, R: rows, T: positions
attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from stretto.errors import EngineError
from stretto_torch.kv import LayerShape, SlotCache
from stretto_torch.shapes import Span
from stretto_torch.swap import Target, Targets, tied_names


class HFDecoder:
    """Keeps `stretto_torch.decoder.Decoder` with a model of transformers.

    Args:
        model: the model; used as it is.
        rows: rows of the cache.
        length: tokens of a slot.

    Raises:
        EngineError: if the model keeps something else of its past than keys and values.
    """

    classes = ()
    cheap_padding = 64

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self._model = model
        config = model.config.get_text_config()
        self.name = f"transformers {config.model_type}"
        self.vocabulary: int = config.vocab_size
        state: dict[str, Tensor] = model.state_dict()
        tied = tied_names(state)
        self.targets = Targets({n: Target(t) for n, t in state.items() if n not in tied}, tied)
        self.cache = SlotCache(_layer_shapes(model), rows, length, model.device, model.dtype)
        self._masks = _Masks(config, length, model.device, model.dtype)

    def prefill(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        """See `Decoder`. The model makes its own causal masks here, as in its plain forward."""
        # Padding stays at the last position: learned embeddings may have none beyond.
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.minimum(columns, (lengths - 1).unsqueeze(1))
        wanted, column = torch.unique(lengths - 1, return_inverse=True)
        logits = self._run(tokens, positions, _PromptCache(self.cache, rows), None, wanted)
        return logits[torch.arange(len(tokens), device=tokens.device), column].float()

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """See `Decoder`."""
        length = max(span.length for span in spans)
        cache = _StepCache(self.cache, positions, length)
        mask = self._masks.at(positions, length)
        return self._run(tokens.unsqueeze(1), positions.unsqueeze(1), cache, mask, 1)[:, 0].float()

    def _run(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Any, keep: Any) -> Tensor:
        return self._model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
        ).logits


class _PromptCache(Cache):
    """An empty cache to the model, whose contents go to given rows."""

    def __init__(self, slots: SlotCache, rows: Tensor) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._slots.write(layer_idx, self._rows, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _StepCache(Cache):
    """The slots of rows 0..R-1 as far as `length`, with one new token a row at its own position."""

    def __init__(self, slots: SlotCache, positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._slots.layers[layer_idx]
        return self._with(keys, key_states), self._with(values, value_states)

    def _with(self, kept: Tensor, new: Tensor) -> Tensor:
        """Write `new` (R, kv_heads, 1, D), one position a row; all that the rows hold of it."""
        kept[self._rows, :, self._positions, : new.shape[3]] = new[:, :, 0]
        return kept[: len(self._rows), :, : self._length, : new.shape[3]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1


class _Masks:
    """Additive attention masks of a decode step, in the form the model wants: one, or one a layer type."""

    def __init__(self, config: Any, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._columns = torch.arange(length, device=device)
        self._dtype = dtype
        self._window: int | None = getattr(config, "sliding_window", None)
        self._chunk: int | None = getattr(config, "attention_chunk_size", None)
        layer_types: Sequence[str] | None = getattr(config, "layer_types", None)
        self._by_layer_type = layer_types is not None
        if layer_types is not None:
            self._kinds = sorted(set(layer_types))
        elif self._window is not None:
            self._kinds = ["sliding_attention"]
        elif self._chunk is not None:
            self._kinds = ["chunked_attention"]
        else:
            self._kinds = ["full_attention"]

    def at(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """(R, 1, 1, T) of a step whose new tokens stand at `positions` (R,), by layer type if need be."""
        masks = {kind: self._mask(kind, positions.unsqueeze(1), length) for kind in self._kinds}
        return masks if self._by_layer_type else masks[self._kinds[0]]

    def _mask(self, kind: str, positions: Tensor, length: int) -> Tensor:
        columns = self._columns[:length]
        unseen = columns > positions  # (R, T)
        if kind == "sliding_attention" and self._window is not None:
            unseen |= columns <= positions - self._window
        elif kind == "chunked_attention" and self._chunk is not None:
            unseen |= columns // self._chunk != positions // self._chunk
        elif kind != "full_attention":
            raise EngineError(f"the torch engine has no mask for layers of type {kind!r}")
        zeros = torch.zeros(unseen.shape, device=unseen.device, dtype=self._dtype)
        return zeros.masked_fill_(unseen, -inf)[:, None, None]


def _layer_shapes(model: Any) -> list[LayerShape]:
    """What each layer keeps, seen from a cache that the model fills itself."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    shapes: list[LayerShape] = []
    for layer in getattr(cache, "layers", [None]):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EngineError(
                f"the torch engine serves models that keep keys and values of every layer,"
                f" which {model.config.model_type!r} does not"
            )
        widest = max(layer.keys.shape[3], layer.values.shape[3])
        shapes.append(LayerShape(layer.keys.shape[1], widest))
    return shapes
