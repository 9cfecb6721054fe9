"""The contract of rewards: plain functions that score answers, in a child process that can be killed.

Two forms, told apart by their first parameter's name:

    def score(prompt, completion, **columns) -> float | dict          one answer
    def score(completions, **columns) -> list[float | None]           all answers of a group

Both may be `async`. `columns` are the row's other columns; a function without `**columns` gets those
it names. The second form is TRL's: it also receives `prompts`, and `completions` are lists of
messages where the row's prompt is chat messages. In the first form `prompt` is as the row has it and
`completion` is always text. A dict must hold `reward`; its other numbers are averaged and reported.
None, NaN or an exception is a failure, and fails the ticket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import msgspec

from stretto.component import PositiveFloat, PositiveInt

__all__ = ["Reward", "RewardConfig", "RewardValue", "is_number"]

RewardValue = float | Mapping[str, float] | None


def is_number(value: float) -> bool:
    """Whether a reward or metric can be used: float32, in which trainers have it, holds it. NaN is none."""
    return abs(value) <= 3.4e38


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every reward's section."""

    use: str
    """Name of the reward."""
    timeout_s: PositiveFloat = 30.0
    """Seconds to score one group, and `answer_cpu_s` more for each answer where that is set; the process that
    takes longer is killed and the ticket fails."""
    answer_cpu_s: PositiveFloat | None = None
    """Seconds of processor time to score one answer; one that needs more scores 0 and the others of its group
    keep their scores. Needs a reward that scores one answer a call and starts no threads: a fork of its
    process scores each group. None for no limit."""
    answer_memory_mb: PositiveInt | None = None
    """MB of memory to score one answer, beyond what the scoring process has already; the same holds. Linux
    only."""


class Reward(Protocol):
    """Either form; made once in each scoring process."""

    def __call__(self, *args: Any, **columns: Any) -> RewardValue | list[RewardValue] | Awaitable[Any]:
        """Score one answer, or all answers of a group."""
        ...
