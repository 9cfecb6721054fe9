"""A decoder written by hand for models built like Llama, Mistral, Qwen2 and Qwen3.

A decode step of a small model spends most of its time on starting kernels. This decoder starts few: one for
query, key and value, one for gate and up, none to add residuals (the preceding product adds them), and one
complex multiplication for the rotary embedding. Loading reorders rows of the query and key weights for this
multiplication: the pair (i, i + D/2) of Hugging Face becomes (2i, 2i + 1).

N: tokens computed at once, D: head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.training.trial import Unsuitable
from stretto_torch import FAMILIES
from stretto_torch.attention import Attend, Heads, Prompts, SlotAttention, over_prefixes, over_prompts
from stretto_torch.decoder import logprobs_of
from stretto_torch.images import PromptImages
from stretto_torch.kv import LayerShape, SlotCache
from stretto_torch.linear import Linear
from stretto_torch.norm import Norm
from stretto_torch.shapes import TokenSpan, padded_prompt, padded_rows
from stretto_torch.swap import Target, Targets, tied_names

# Rotary variants whose frequencies follow from the config alone. Others change with the length.
_ROPES = ("default", "linear", "llama3", "yarn")
# Number of tokens whose logits are in memory at once when a text is scored; bounds their memory.
_SCORED = 512


class FastDecoder:
    """Implements `Decoder` with a fused copy of the weights; raises `Unsuitable` for other architectures.
    `rows`: rows of the largest step; `length`: tokens of a slot; `tokens`: tokens of all slots together."""

    one_size_class = False
    prefers_one_size_class = False
    cheap_padding = 512  # only attention computes padding

    def __init__(self, model: Any, rows: int, length: int, tokens: int, *, onednn: bool) -> None:
        config = model.config
        check_suitable(model)
        self.name = f"hand-written {config.model_type}"
        self.vocabulary: int = config.vocab_size
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, _head_dim(config))

        weights = _DecoderWeights(model.state_dict(), self._heads.dim, config.rms_norm_eps, onednn=onednn)
        self._embedding = weights.require("model.embed_tokens.weight")
        self._layers = [_layer(weights, f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self._norm = weights.norm("model.norm")
        self._head = weights.linear("lm_head", tied_to=self._embedding)
        self.targets = weights.load()

        device, dtype = self._embedding.device, self._embedding.dtype
        layer = LayerShape(self._heads.kv, self._heads.dim)
        self.cache = SlotCache([layer] * len(self._layers), rows, tokens, device, dtype)
        self._attention = SlotAttention(self.cache, self._heads, length)
        self._positions = torch.arange(length, device=device)
        self._rotations = _rotations(model.model.rotary_emb, self._positions)

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
        """See `Decoder`. This decoder runs no model that reads images."""
        del shifts, images
        count, columns = tokens.shape
        positions = self._positions[:columns].expand(count, columns)
        # Only attention computes padding. But if each text alone would be padded to these columns, all layers
        # compute the padding: a deterministic engine needs products with a multiple of 16 rows.
        computes_padding = begins is None and padded_prompt(int(lengths.min())) == columns
        computed_lengths = torch.full_like(lengths, columns) if computes_padding else lengths
        unpadded = (positions < computed_lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
        if begins is None:
            prompts = Prompts(rows, positions, unpadded)
            attend = over_prompts(self.cache, self._heads, prompts)
        else:
            prompts = Prompts(rows, positions + begins.unsqueeze(1), unpadded)
            attend = over_prefixes(self.cache, self._heads, prompts, begins + lengths)
        hidden = self._forward(tokens.flatten()[unpadded], prompts.positions.flatten()[unpadded], attend)
        last_tokens = computed_lengths.cumsum(0) - computed_lengths + lengths - 1
        # Padded like the rows of a step: a product with fewer rows gives different bits.
        return self._logits(hidden[F.pad(last_tokens, (0, padded_rows(count) - count))])[:count]

    def decode(
        self, tokens: Tensor, positions: Tensor, spans: Sequence[TokenSpan], shifts: Tensor | None = None
    ) -> Tensor:
        """See `Decoder`. This decoder runs no model that reads images."""
        del shifts
        return self._logits(self._forward(tokens, positions, self._attention.at(positions, spans)))

    def score(self, tokens: Tensor, images: PromptImages | None = None) -> Tensor:
        """See `Decoder`. This decoder runs no model that reads images."""
        del images
        positions = self._positions[: len(tokens)]
        prompt = Prompts(positions[:1], positions.unsqueeze(0), positions)
        hidden = self._forward(tokens, positions, over_prompts(None, self._heads, prompt))
        parts = zip(hidden[:-1].split(_SCORED), tokens[1:].split(_SCORED), strict=True)
        return torch.cat([logprobs_of(self._logits(part), targets) for part, targets in parts])

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states (N, hidden) of tokens (N,) at positions (N,), before the last norm."""
        hidden = F.embedding(tokens, self._embedding)
        rotations = self._rotations[positions].unsqueeze(1)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(hidden))
            self._rotate(layer, qkv, rotations)
            hidden = layer.out.add_to(hidden, attend(index, qkv))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down.add_to(hidden, F.silu(gate).mul_(up))
        return hidden

    def _rotate(self, layer: _Layer, qkv: Tensor, rotations: Tensor) -> None:
        """Normalise (if the model does) and rotate queries and keys in place. `rotations`: (N, 1, D / 2)."""
        queries, num_heads, dim = self._heads.query, self._heads.query + self._heads.kv, self._heads.dim
        heads = qkv[:, : num_heads * dim].view(len(qkv), num_heads, dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, :queries] = layer.query_norm(heads[:, :queries])
            heads[:, queries:] = layer.key_norm(heads[:, queries:])
        pairs = torch.view_as_complex(heads.float().view(len(qkv), num_heads, dim // 2, 2)).mul_(rotations)
        if heads.dtype != torch.float32:  # then `pairs` is no view of `qkv`
            heads.copy_(torch.view_as_real(pairs).flatten(2))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._norm(hidden)).float()


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


def _layer(weights: _DecoderWeights, prefix: str) -> _Layer:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return _Layer(
        attention_norm=weights.norm(f"{prefix}.input_layernorm"),
        qkv=weights.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        query_norm=weights.find_norm(f"{attention}.q_norm"),
        key_norm=weights.find_norm(f"{attention}.k_norm"),
        out=weights.linear(f"{attention}.o_proj"),
        mlp_norm=weights.norm(f"{prefix}.post_attention_layernorm"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=weights.linear(f"{mlp}.down_proj"),
    )


class _DecoderWeights:
    def __init__(self, state: Mapping[str, Tensor], head_dim: int, eps: float, *, onednn: bool) -> None:
        self._state = state
        self._eps = eps
        self._tied = tied_names(state)
        self._targets: dict[str, Target] = {}
        self._products: list[Linear] = []
        self._head_dim = head_dim
        self._onednn = onednn

    def find(self, *names: str, factor: float = 1.0) -> Tensor | None:
        """Allocate one tensor for these weights, stacked by rows, times `factor`; None if one is missing."""
        if any(name not in self._state for name in names):
            return None
        tensors = [self._state[name] for name in names]
        heights = [len(tensor) for tensor in tensors]
        stacked = tensors[0].new_empty(sum(heights), *tensors[0].shape[1:])
        for name, part in zip(names, stacked.split(heights), strict=True):
            self._targets[name] = Target(part, self._order(name, len(part)), factor)
        return stacked

    def require(self, *names: str) -> Tensor:
        """Like `find`, for tensors that the decoder needs; raise `Unsuitable` if one is missing."""
        stacked = self.find(*names)
        if stacked is None:
            raise Unsuitable(f"it lacks one of the tensors {', '.join(names)}")
        return stacked

    def linear(self, *names: str, tied_to: Tensor | None = None) -> Linear:
        weights = [f"{name}.weight" for name in names]
        weight = tied_to if tied_to is not None and self._tied.issuperset(weights) else self.require(*weights)
        bias = self.find(*(f"{name}.bias" for name in names))
        self._products.append(Linear(weight, bias, onednn=self._onednn))
        return self._products[-1]

    def find_norm(self, name: str) -> Norm | None:
        state = self._state.get(f"{name}.weight")
        if state is None:
            return None
        weight = self.find(f"{name}.weight", factor=Norm.factor(len(state), state))
        assert weight is not None, "the model has its weight"
        return Norm(weight, self._eps)

    def norm(self, name: str) -> Norm:
        norm = self.find_norm(name)
        if norm is None:
            raise Unsuitable(f"it lacks the tensor {name}.weight")
        return norm

    def load(self) -> Targets:
        unknown = sorted(self._state.keys() - self._targets.keys() - self._tied)
        if unknown:
            raise Unsuitable(f"it has tensors this decoder does not know, such as {unknown[0]!r}")
        targets = Targets(self._targets, self._tied, self._products)
        targets.load(self._state)
        return targets

    def _order(self, name: str, height: int) -> Tensor | None:
        """Return the order of rotated rows, where i and i + D/2 become 2i and 2i + 1; None for other rows."""
        if name.split(".")[-2] not in ("q_proj", "k_proj", "q_norm", "k_norm"):
            return None
        return torch.arange(height).view(-1, 2, self._head_dim // 2).transpose(1, 2).flatten()


def check_suitable(model: Any) -> None:
    """Raise `Unsuitable` if the config shows that this decoder cannot run the model."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise Unsuitable(f"its architecture is not one of {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise Unsuitable(f"its activation is {config.hidden_act!r}, not 'silu'")
    has_window = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if has_window or (config.model_type == "mistral" and config.sliding_window is not None):
        raise Unsuitable("its attention has a sliding window")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _ROPES:
        raise Unsuitable(f"its rope type is {rope_type!r}, not one of {', '.join(_ROPES)}")
    if model.model.rotary_emb.inv_freq.numel() * 2 != _head_dim(config):
        raise Unsuitable("it rotates only a part of each head")


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotations(rope: Any, positions: Tensor) -> Tensor:
    """Return the complex factor of each pair at each position: (length, D / 2)."""
    angles = positions.float().unsqueeze(1) * rope.inv_freq.float()
    return torch.polar(torch.full_like(angles, rope.attention_scaling), angles)
