"""The contract of rewards: plain functions that score answers, in a child process that stretto can kill.

There are two forms; the name of the first parameter decides which one it is:

    def score(prompt, completion, **columns) -> float | dict          one answer
    def score(completions, **columns) -> list[float | None]           all answers of a group

Both may be `async`. `columns` are the other columns of the row; a function without `**columns` receives
only the columns that it names. The second form is that of TRL: it also receives `prompts`, and
`completions` are lists of messages when the row's prompt is a list of chat messages. In the first form,
`prompt` is the prompt of the row unchanged and `completion` is always text. A workflow that scores whole
answers of the policy adds the column `completion_tokens`, the length of an answer in tokens. The first two
parameters of the first form may have other names for prompt and completion, such as `question, response`,
and then come by position; names that could be those of columns are refused. A dict must
contain `reward`; stretto averages and reports its other numbers. None, NaN or an exception is a failure: the
answer is scored again, and then left out of its group, or penalized if it is itself at fault (see
`WorkflowConfig.failure_reward`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from stretto.component import PositiveFloat, PositiveInt

__all__ = ["Reward", "RewardConfig", "RewardValue", "is_number", "text_of"]

RewardValue = float | Mapping[str, float] | None


def is_number(value: float) -> bool:
    """Return whether a reward or metric fits into float32, the dtype of trainers. False for NaN."""
    return abs(value) <= 3.4e38


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of one of the `completions` of a reward's second form, which is text or a list of
    messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every reward's section."""

    use: str
    """Name of the reward."""
    timeout_s: PositiveFloat = 30.0
    """Time limit for scoring one group, in seconds. When `answer_cpu_s` is set, the limit grows by it for
    each answer. A process that takes longer is killed, and the answers are scored one by one."""
    answer_cpu_s: PositiveFloat | None = None
    """Limit of processor time for scoring one answer, in seconds. An answer that needs more scores 0; the
    other answers of its group keep their scores. The reward must score one answer per call and start no
    threads, because a fork of its process scores each group. None for no limit."""
    answer_memory_mb: PositiveInt | None = None
    """Limit of memory for scoring one answer, in MiB, in addition to the memory that the scoring process
    already uses. The rules of `answer_cpu_s` apply. None for no limit. Linux only."""

    @property
    def limits(self) -> tuple[float | None, int | None]:
        """`answer_cpu_s` and `answer_memory_mb` as they apply."""
        return self.answer_cpu_s, self.answer_memory_mb


class Reward(Protocol):
    """A reward of either form. Each scoring process makes it once."""

    def __call__(self, *args: Any, **columns: Any) -> RewardValue | list[RewardValue] | Awaitable[Any]:
        """Score one answer, or all answers of a group."""
        ...
