"""Reward `format`: 1 if an answer has the expected form, else 0. The content does not matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl
from stretto.component import PositiveFloat

__all__ = ["FormatConfig"]

_TAG = re.compile(r"[A-Za-z][\w-]*")


class FormatConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `format`. It needs `tags` or `pattern`, or both."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer; some patterns would never end on some answers."""
    tags: tuple[str, ...] = ()
    """Names of tags that the answer consists of, in this order: `[think, answer]` expects
    `<think>…</think><answer>…</answer>`, each tag once, with nothing but white space around them."""
    pattern: str = ""
    """Regular expression (Python's `re`) that must match the whole answer without the white space around it.
    `.` also matches a new line."""

    def __post_init__(self) -> None:
        if not self.tags and not self.pattern:
            raise ValueError("needs `tags` or `pattern`")
        if odd := [tag for tag in self.tags if not _TAG.fullmatch(tag)]:
            raise ValueError(f"tags: {odd[0]!r} is not the name of a tag; expected letters, digits, _ and -")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is no regular expression: {error}") from error


def make(config: FormatConfig, context: Context) -> Callable[..., float]:
    del context
    pattern = re.compile(config.pattern, re.DOTALL)
    blocks = r"\s*".join(rf"<{tag}>.*</{tag}>" for tag in config.tags)
    tags = re.compile(blocks, re.DOTALL)

    def has_tags(text: str) -> bool:
        each_once = all(text.count(mark) == 1 for tag in config.tags for mark in (f"<{tag}>", f"</{tag}>"))
        return each_once and tags.fullmatch(text) is not None

    def has_form(prompt: Any, completion: str, prompt_opened: str = "") -> float:
        text = (prompt_opened + completion).strip()
        matches = not config.pattern or pattern.fullmatch(text) is not None
        return float(matches and (not config.tags or has_tags(text)))

    return has_form


@hookimpl
def stretto_reward() -> Iterator[Component[FormatConfig]]:
    yield Component(
        "format", make, FormatConfig, "1 if the answer has the expected tags, or matches a pattern"
    )
