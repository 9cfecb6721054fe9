"""Foreign text in HTML pages that commands write."""

from __future__ import annotations

from html import escape

from stretto.errors import printable

__all__ = ["safe"]

_MOST_CHARACTERS = 4000
"""Of one text."""


def safe(text: str) -> str:
    """Return foreign text for HTML: escaped, with control characters as escapes, and shortened if it is very
    long."""
    cut = f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text
    return escape(printable(cut))
