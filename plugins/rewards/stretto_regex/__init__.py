"""Reward `regex`: 1 if the text that a pattern finds in the answer is the row's expected text, else 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, hookimpl
from stretto.component import PositiveFloat
from stretto.reward import ResultRewardConfig, expected_texts, fault_of_expected

__all__ = ["RegexConfig"]


class RegexConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `regex`."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer; some patterns would never end on some answers."""
    pattern: str
    """Regular expression (Python's `re`) with one group, such as `<answer>(.*?)</answer>`. `.` also matches a
    new line. The last match whose group begins behind the reasoning counts; without one, the score is 0."""
    column: str = "answer"
    """Column with the expected text or number of the group. White space around both texts is ignored."""
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

    def last_group(text: str, start: int) -> str | None:
        # A match from the reasoning may hide one behind it, so search from both places.
        matches = [match for place in sorted({0, start}) for match in pattern.finditer(text, place)]
        groups = [match[1] or "" for match in matches if max(match.start(), match.start(1)) >= start]
        return groups[-1] if groups else None

    def finds(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        expected = [*map(plain, expected_texts(columns, config.column))]
        opened, start = columns.get("prompt_opened", ""), config.start_of_result(completion, columns)
        found = None if start is None else last_group(opened + completion, start and len(opened) + start)
        right = float(found is not None and plain(found) in expected)
        return {"reward": right, "accuracy": right}

    return finds


@hookimpl
def stretto_reward() -> Iterator[Component[RegexConfig]]:
    yield Component(
        "regex",
        make,
        RegexConfig,
        "1 if a pattern finds the row's expected text in the answer",
        check_row=lambda config, row: fault_of_expected(row, config.column),
    )
