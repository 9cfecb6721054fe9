"""(torch) How a packed batch goes through a Hugging Face model: one row end to end, or padded rows.

Packed: one row of all tokens with restarting positions, and causal attention for each sequence by
itself, so that nothing attends across. It is the fastest on CPU and computes no padding, and it is
valid where attention is full and causal. Every other model gets rows padded on the right, with a mask.
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
class ModelInputs:
    """A batch as a model's arguments."""

    arguments: dict[str, Any]
    """Beside the ids, whatever each layer has to know. `logits_to_keep` is for the head alone."""
    pick: Callable[[Tensor], Tensor]
    """The model's output -> (N, V): that at the wanted tokens, in the batch's order."""


class MakeInputs(Protocol):
    """`packed_rows` or `padded_rows`."""

    def __call__(self, batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
        """The rows of a batch.

        Args:
            at: (N,) int64, indices of the tokens at which the model's output is wanted.
            keep: the model's head can be told by `logits_to_keep` to compute those alone.
        """
        ...


def packed_rows(batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
    """One row of all sequences; see `MakeInputs`."""
    device = batch["tokens"].device
    arguments = {
        "input_ids": batch["tokens"][None],
        "position_ids": batch.positions().to(device)[None],
        "sequence_lengths": batch.lengths,
        "use_cache": False,  # with a cache, positions that restart are not seen as new sequences
    }
    if keep:
        return ModelInputs({**arguments, "logits_to_keep": at}, lambda output: output[0])
    return ModelInputs(arguments, lambda output: output[0, at])


def padded_rows(batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
    """One row a sequence, padded on the right; see `MakeInputs`. The head computes all of them."""
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
    """Why a model cannot be given packed rows, found by trying; empty if it can.

    Compares a packed row of three sequences with each of them alone.

    Args:
        compute: a row's arguments -> the model's output.
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
        together = output(batch)
        alone = torch.cat([output(part) for part in batch.split([1] * len(lengths))])
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    scale = together.float().abs().max().clamp(min=1)
    off = float((together.float() - alone.float()).abs().max() / scale)
    # bfloat16 rounds each to within 0.4 %; a leak across sequences is off by far more.
    limit = 1e-4 if together.dtype == torch.float32 else 0.03
    return "" if off <= limit else f"sequences of a packed row are not independent (off by {off:.1e})"
