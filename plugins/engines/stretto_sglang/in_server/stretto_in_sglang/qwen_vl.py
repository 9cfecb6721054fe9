"""Qwen2-VL and Qwen2.5-VL for SGLang that also load newer tensor names, and accept any prompt.

SGLang's loaders know only the names of the first checkpoints: they refuse the text model's new names and
silently skip the vision tower's new names. SGLang cannot compute the positions of a prompt that ends with
the token before an image, such as an answer that continues after a swap.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.models import qwen2_5_vl, qwen2_vl

_OLDER_PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}


class Qwen2VLForConditionalGeneration(qwen2_vl.Qwen2VLForConditionalGeneration):
    """SGLang's Qwen2-VL."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load tensors with old or new names."""
        super().load_weights(_renamed(weights))


class Qwen2_5_VLForConditionalGeneration(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):  # noqa: N801
    """SGLang's Qwen2.5-VL."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load tensors with old or new names."""
        super().load_weights(_renamed(weights))


def _renamed(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        newer = next((newer for newer in _OLDER_PREFIXES if name.startswith(newer)), "")
        yield (_OLDER_PREFIXES[newer] + name.removeprefix(newer) if newer else name), tensor


_rope_index_of = MRotaryEmbedding.get_rope_index


def _rope_index(
    *arguments: Any, input_ids: torch.Tensor, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the tokens, computed with one more text token at the end."""
    longer = torch.nn.functional.pad(input_ids, (0, 1), value=-1)
    positions, delta = _rope_index_of(*arguments, input_ids=longer, **keywords)
    return positions[..., :-1], delta


MRotaryEmbedding.get_rope_index = staticmethod(_rope_index)

EntryClass = [Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration]
