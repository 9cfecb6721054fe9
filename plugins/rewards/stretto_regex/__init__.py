"""Reward `regex`: 1 if the text that a pattern finds in the answer is the row's expected text, else 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl
from stretto.component import PositiveFloat

__all__ = ["RegexConfig"]


class RegexConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `regex`."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer; some patterns would never end on some answers."""
    pattern: str
    """Regular expression (Python's `re`) with one group, such as `<answer>(.*?)</answer>`. `.` also matches a
    new line. The last match in the answer counts; an answer without one scores 0."""
    column: str = "answer"
    """Column with the expected text of the group. White space around both texts is ignored."""
    ignore_case: bool = False
    """Ignore the difference between capital and small letters, in the pattern and in the comparison."""

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is no regular expression: {error}") from error
        if groups != 1:
            raise ValueError(
                f"pattern: {self.pattern!r} has {groups} groups; expected one, around the answer ((?:…) does "
                "not count)"
            )


def make(config: RegexConfig, context: Context) -> Callable[..., dict[str, float]]:
    """Return the scoring function."""
    del context
    pattern = re.compile(config.pattern, re.DOTALL | (re.IGNORECASE if config.ignore_case else 0))

    def plain(text: str) -> str:
        return text.strip().casefold() if config.ignore_case else text.strip()

    def finds(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        matches = pattern.findall(columns.get("prompt_opened", "") + completion)
        right = float(bool(matches) and plain(matches[-1]) == plain(str(columns[config.column])))
        return {"reward": right, "accuracy": right}

    return finds


def check_row(config: RegexConfig, row: Mapping[str, Any]) -> str:
    """Return why a row cannot be scored; empty if it can be."""
    return "" if config.column in row else f"no column {config.column!r}; its columns: {', '.join(row)}"


@hookimpl
def stretto_reward() -> Iterator[Component[RegexConfig]]:
    yield Component(
        "regex",
        make,
        RegexConfig,
        "1 if a pattern finds the row's expected text in the answer",
        check_row=check_row,
    )
