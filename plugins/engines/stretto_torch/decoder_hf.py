"""A decoder that runs any causal or vision-language model of transformers, through its own forward.

A cache object writes each row's keys and values at the row's own position in its slot; a mask hides the rest
of the slot. N: prompts, P: columns, R: rows, T: positions attended to.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from stretto.errors import EngineError
from stretto_torch.decoder import logprobs_of
from stretto_torch.images import ImageReader, PromptImages
from stretto_torch.kv import LayerShape, SlotCache
from stretto_torch.shapes import TokenSpan, padded_rows
from stretto_torch.swap import Target, Targets, tied_names


class HFDecoder:
    """Implements `Decoder` with an unchanged model of transformers. `rows`: rows of the largest step;
    `length`: tokens of a slot; `tokens`: tokens of all slots together."""

    one_size_class = prefers_one_size_class = True
    cheap_padding = 64

    def __init__(
        self, model: Any, rows: int, length: int, tokens: int, reader: ImageReader | None = None
    ) -> None:
        self._model = model
        self._reader = reader
        config = model.config.get_text_config()
        self.name = f"transformers {config.model_type}"
        self.vocabulary: int = config.vocab_size
        state: dict[str, Tensor] = model.state_dict()
        tied = tied_names(state)
        self.targets = Targets({n: Target(t) for n, t in state.items() if n not in tied}, tied)
        self.cache = SlotCache(layer_shapes(model), rows, tokens, model.device, model.dtype)
        self._masks = _Masks(config, length, model.device, model.dtype)

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
        """See `Decoder`. For whole texts the model makes its own causal masks, as in its plain forward."""
        # Padding has the position of the last token: learned embeddings may have no later position.
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.minimum(columns, (lengths - 1).unsqueeze(1))
        unpadded = (columns < lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
        cache, mask = _PromptCache(self.cache, rows, positions, unpadded), None
        if images is not None and images.positions is not None:
            prompt_columns = min(images.positions.shape[2], positions.shape[1])
            positions = (positions + images.shift).repeat(3, 1, 1)
            positions[..., :prompt_columns] = images.positions[..., :prompt_columns]
        if begins is not None:
            positions = positions + begins.unsqueeze(1)
            cache = _PrefixCache(self.cache, rows, positions, unpadded)
            mask = self._masks.at(positions, cache.length)
            positions = positions if shifts is None else positions + shifts.unsqueeze(1)
        kept_columns, last_column = torch.unique(lengths - 1, return_inverse=True)
        # Padded like the rows of a step: a product with fewer rows gives different bits.
        min_columns = -(-padded_rows(1) // len(tokens))
        kept_columns = F.pad(kept_columns, (0, max(0, min_columns - len(kept_columns))))
        arguments = self._arguments(tokens, images)
        logits = self._run(tokens, positions, cache, mask, kept_columns, **arguments)
        return logits[torch.arange(len(tokens), device=tokens.device), last_column].float()

    def decode(
        self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan], shifts: Tensor | None = None
    ) -> Tensor:
        """See `Decoder`."""
        length = max(span.length for span in spans)
        cache = _StepCache(self.cache, positions, length)
        mask = self._masks.at(positions.unsqueeze(1), length)
        positions = positions if shifts is None else positions + shifts
        return self._run(tokens.unsqueeze(1), positions.unsqueeze(1), cache, mask, 1)[:, 0].float()

    def score(self, tokens: Tensor, images: PromptImages | None = None) -> Tensor:
        """See `Decoder`."""
        ids, arguments = tokens.unsqueeze(0), self._arguments(tokens.unsqueeze(0), images)
        logits = self._model(input_ids=ids, use_cache=False, **arguments).logits[0].float()
        return logprobs_of(logits[:-1], tokens[1:])

    def _arguments(self, tokens: Tensor, images: PromptImages | None) -> dict[str, Tensor]:
        if images is None:
            return {}
        assert self._reader is not None, "images come from a reader"
        return {**images.media, **self._reader.marks(tokens)}

    def _run(
        self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Any, keep: Any, **more: Tensor
    ) -> Tensor:
        return self._model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **more,
        ).logits


class _PromptCache(Cache):
    """A cache that looks empty to the model and stores keys and values in the slots of `rows` (N,), at
    `positions` (N, P). `unpadded`: indices of the columns that are not padding, among the N * P."""

    def __init__(self, slots: SlotCache, rows: Tensor, positions: Tensor, unpadded: Tensor) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._rows = rows
        self._positions = positions
        self._unpadded = unpadded

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = self._rows[self._unpadded // self._positions.shape[1]]
        indices = self._slots.indices(layer_idx, rows, self._positions.flatten()[self._unpadded])
        for targets, states in zip(indices.chunk(2, dim=1), (key_states, value_states), strict=True):
            flat = states.transpose(1, 2).flatten(0, 1)[self._unpadded]  # (tokens, kv_heads, D)
            self._slots.layers[layer_idx][targets, : states.shape[3]] = flat
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _PrefixCache(_PromptCache):
    """A `_PromptCache` for texts that continue the tokens in their slots; the model attends to both."""

    def __init__(self, slots: SlotCache, rows: Tensor, positions: Tensor, unpadded: Tensor) -> None:
        super().__init__(slots, rows, positions, unpadded)
        last = positions.max(dim=1, keepdim=True).values
        self.length = int(last.max()) + 1
        columns = torch.arange(self.length, device=positions.device)
        self._bounded_columns = torch.minimum(columns, last).flatten()  # a block may be shorter

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, layer_idx)
        rows = self._rows.repeat_interleave(self.length)
        indices = self._slots.indices(layer_idx, rows, self._bounded_columns).view(
            len(self._rows), self.length, -1
        )
        keys, values = self._slots.layers[layer_idx][indices.transpose(1, 2)].chunk(2, dim=1)
        return keys[..., : key_states.shape[3]], values[..., : value_states.shape[3]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - self._positions.shape[1]


class _StepCache(Cache):
    """The first `length` positions of rows 0..R-1, with one new token per row at the row's own position."""

    def __init__(self, slots: SlotCache, positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._positions = positions
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = len(self._positions)
        indices = self._slots.indices(layer_idx, slice(rows), self._positions)
        for targets, states in zip(indices.chunk(2, dim=1), (key_states, value_states), strict=True):
            self._slots.layers[layer_idx][targets, : states.shape[3]] = states[:, :, 0]
        keys, values = self._slots.span(layer_idx, 0, rows, self._length)
        heads = key_states.shape[1]
        return (
            keys.unflatten(0, (rows, heads))[..., : key_states.shape[3]],
            values.unflatten(0, (rows, heads))[..., : value_states.shape[3]],
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1


class _Masks:
    """Additive attention masks over slots, in the form the model expects: one, or one per layer type."""

    def __init__(self, config: Any, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._columns = torch.arange(length, device=device)
        self._dtype = dtype
        self._window: int | None = getattr(config, "sliding_window", None)
        self._chunk: int | None = getattr(config, "attention_chunk_size", None)
        layer_types: Sequence[str] | None = getattr(config, "layer_types", None)
        self._by_layer_type = layer_types is not None
        kind = "chunked_attention" if self._chunk is not None else "full_attention"
        kind = kind if self._window is None else "sliding_attention"
        self._kinds = [kind] if layer_types is None else sorted(set(layer_types))

    def at(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Return masks (N, 1, P, T) for tokens at `positions` (N, P), perhaps by layer type."""
        masks = {kind: self._mask(kind, positions.unsqueeze(2), length) for kind in self._kinds}
        return masks if self._by_layer_type else masks[self._kinds[0]]

    def _mask(self, kind: str, positions: Tensor, length: int) -> Tensor:
        columns = self._columns[:length]
        masked = columns > positions  # (N, P, T)
        if kind == "sliding_attention" and self._window is not None:
            masked |= columns <= positions - self._window
        elif kind == "chunked_attention" and self._chunk is not None:
            masked |= columns // self._chunk != positions // self._chunk
        elif kind != "full_attention":
            raise EngineError(f"the torch engine has no mask for layers of type {kind!r}; use vllm or sglang")
        zeros = torch.zeros(masked.shape, device=masked.device, dtype=self._dtype)
        return zeros.masked_fill_(masked, -inf).unsqueeze(1)


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of each layer's keys and values per token, read from a cache that the model fills."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    shapes: list[LayerShape] = []
    for layer in getattr(cache, "layers", [None]):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EngineError(
                f"the torch engine serves only models that keep keys and values of every layer;"
                f" {model.config.model_type!r} does not: use vllm or sglang"
            )
        widest = max(layer.keys.shape[3], layer.values.shape[3])
        shapes.append(LayerShape(layer.keys.shape[1], widest))
    return shapes
