"""Chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Message", "OwnTurn"]

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and other keys that a template may use, such as `tool_calls`."""


class OwnTurn(dict[str, Any]):
    """A message whose special tokens are tokens: the policy sampled it, or `dataset.special_tokens` says so.
    In every other message they are text, because whoever writes it could else begin turns of his own."""
