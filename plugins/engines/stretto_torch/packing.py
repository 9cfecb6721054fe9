"""How a packed batch goes through a Hugging Face model: one row end to end, or padded rows.

Packed: one row of all tokens with restarting positions, and causal attention for each sequence by
itself, so that nothing attends across. It is the fastest on CPU and computes no padding, and it is
valid where attention is full and causal. Every other model gets rows padded on the right, with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from stretto.batch import Batch

__all__ = ["ATTENTION", "Rows", "packed_rows", "packs_exactly", "padded_rows"]

ATTENTION = "stretto_packed"

# T tokens, S sequences, L longest sequence, N positions whose logits are wanted, V vocabulary.


def _attend_per_sequence(
    module: nn.Module,
    query: Tensor,  # (1, heads, T, dim)
    key: Tensor,  # (1, kv_heads, T, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sequence_lengths: list[int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row; a transformers attention function."""
    del module, attention_mask
    if sequence_lengths is None or dropout or options.get("sliding_window") or options.get("softcap"):
        raise ValueError("packed attention is full, causal and without dropout")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = zip(
        query.split(sequence_lengths, 2),
        key.split(sequence_lengths, 2),
        value.split(sequence_lengths, 2),
        strict=True,
    )
    attended = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scaling) for part in parts]
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


# No mask function is registered for the name, so transformers builds no mask.
AttentionInterface.register(ATTENTION, _attend_per_sequence)


@dataclass(frozen=True)
class Rows:
    """A batch as a model's arguments."""

    arguments: dict[str, Any]
    pick: Callable[[Tensor], Tensor]
    """The model's logits -> (N, V): those that predict the wanted tokens, in the batch's order."""


def packed_rows(batch: Batch, wanted: Tensor) -> Rows:
    """One row of all sequences.

    Args:
        wanted: (N,) int64, indices of tokens whose logits are wanted; none is a sequence's first.
    """
    device = batch["tokens"].device
    arguments = {
        "input_ids": batch["tokens"][None],
        "position_ids": batch.positions().to(device)[None],
        "sequence_lengths": batch.lengths,
        "use_cache": False,  # with a cache, positions that restart are not seen as new sequences
        "logits_to_keep": wanted - 1,  # the logits before a token are those that predict it
    }
    return Rows(arguments, lambda logits: logits[0])


def padded_rows(batch: Batch, wanted: Tensor) -> Rows:
    """One row a sequence, padded on the right."""
    device = batch["tokens"].device
    longest = max(batch.lengths)
    lengths = torch.tensor(batch.lengths, device=device)
    mask = torch.arange(longest, device=device)[None] < lengths[:, None]  # (S, L)
    ids = torch.zeros_like(mask, dtype=torch.long)
    ids[mask] = batch["tokens"]
    row = batch.sequence_index().to(device)[wanted]
    column = batch.positions().to(device)[wanted] - 1
    arguments = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
    return Rows(arguments, lambda logits: logits[row, column])


@torch.no_grad()
def packs_exactly(model: Callable[..., Any], vocab_size: int, device: torch.device) -> str:
    """Why a model cannot be given packed rows, found by trying; empty if it can.

    Compares a packed row of three sequences with each of them alone.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 1, 12]
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=generator).to(device)
    batch = Batch(lengths, {"tokens": tokens}, {})
    wanted = (batch.positions() > 0).nonzero().squeeze(1).to(device)
    try:
        rows = packed_rows(batch, wanted)
        together = rows.pick(model(**rows.arguments).logits)
        alone: list[Tensor] = []
        for part in batch.split([1] * len(lengths)):
            if part.num_tokens > 1:
                one = packed_rows(part, torch.arange(1, part.num_tokens, device=device))
                alone.append(one.pick(model(**one.arguments).logits))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    scale = together.float().abs().max().clamp(min=1)
    off = float((together.float() - torch.cat(alone).float()).abs().max() / scale)
    # bfloat16 rounds each to within 0.4 %; a leak across sequences is off by far more.
    limit = 1e-4 if together.dtype == torch.float32 else 0.03
    return "" if off <= limit else f"sequences of a packed row are not independent (off by {off:.1e})"
