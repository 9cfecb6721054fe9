"""(torch) How a batch becomes the input of a Hugging Face model: one packed row, or padded rows.

A packed row holds all tokens end to end. Positions restart with each sequence, and causal attention is
computed for each sequence separately, so no token attends to another sequence. This is the fastest way on
CPU and computes no padding. It is valid where attention is full and causal. Every other model gets rows
padded on the right, with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from stretto.rl.batch import Batch

__all__ = ["ATTENTION", "MakeInputs", "ModelInputs", "packed_rows", "packs_exactly", "padded_rows"]

ATTENTION = "stretto_packed"

# T tokens, S sequences, L longest sequence, N tokens at which the output is wanted, V its size.


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
    """Causal attention within each sequence of a packed row, as an attention function of transformers."""
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
class ModelInputs:
    """A batch as the arguments of a model."""

    arguments: dict[str, Any]
    """The ids and the arguments that each layer needs. Only the head uses `logits_to_keep`."""
    pick: Callable[[Tensor], Tensor]
    """Select from the model's output the rows of the wanted tokens, (N, V), in the batch's order."""


class MakeInputs(Protocol):
    """`packed_rows` or `padded_rows`."""

    def __call__(self, batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
        """Return the rows of a batch.

        Args:
            at: (N,) int64, indices of the tokens at which the model's output is wanted.
            keep: the model's head accepts `logits_to_keep` and then computes these tokens only.
        """
        ...


def packed_rows(batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
    """Put all sequences into one row; see `MakeInputs`."""
    device = batch["tokens"].device
    arguments = {
        "input_ids": batch["tokens"][None],
        "position_ids": batch.positions().to(device)[None],
        "sequence_lengths": batch.lengths,
        "use_cache": False,  # with a cache, transformers does not treat restarting positions as new sequences
    }
    if keep:
        return ModelInputs({**arguments, "logits_to_keep": at}, lambda output: output[0])
    return ModelInputs(arguments, lambda output: output[0, at])


def padded_rows(batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
    """Put each sequence into its own row, padded on the right; see `MakeInputs`. The head computes all
    tokens."""
    del keep
    device = batch["tokens"].device
    longest = max(batch.lengths)
    lengths = torch.tensor(batch.lengths, device=device)
    mask = torch.arange(longest, device=device)[None] < lengths[:, None]  # (S, L)
    ids = torch.zeros_like(mask, dtype=torch.long)
    ids[mask] = batch["tokens"]
    row = batch.sequence_index().to(device)[at]
    column = batch.positions().to(device)[at]
    arguments = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
    return ModelInputs(arguments, lambda output: output[row, column])


@torch.no_grad()
def packs_exactly(
    compute: Callable[[dict[str, Any]], Tensor], vocab_size: int, device: torch.device, *, keep: bool
) -> str:
    """Try whether a model computes packed rows exactly. Return the reason if not, else an empty string.

    The test compares a packed row of three sequences with each sequence alone.

    Args:
        compute: computes the model's output from the arguments of a row.
        keep: as for `MakeInputs`.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 1, 12]
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=generator).to(device)
    batch = Batch(lengths, {"tokens": tokens}, {})

    def output(part: Batch) -> Tensor:
        rows = packed_rows(part, torch.arange(part.num_tokens, device=device), keep=keep)
        return rows.pick(compute(rows.arguments))

    try:
        packed = output(batch)
        separate = torch.cat([output(part) for part in batch.split([1] * len(lengths))])
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    scale = packed.float().abs().max().clamp(min=1)
    off = float((packed.float() - separate.float()).abs().max() / scale)
    # bfloat16 rounds each number to within 0.4 %; a leak across sequences gives a far larger difference.
    limit = 1e-4 if packed.dtype == torch.float32 else 0.03
    return "" if off <= limit else f"sequences of a packed row are not independent (off by {off:.1e})"
