"""The contract of rewards: plain functions that score answers, in a child process that stretto can kill.

There are two forms; the name of the first parameter decides which one it is:

    def score(prompt, completion, **columns) -> float | dict          one answer
    def score(completions, **columns) -> list[float | None]           all answers of a group

Both may be `async`. `columns` are the other columns of the row; a function without `**columns` receives
only the columns that it names. The second form is that of TRL: it also receives `prompts`, and
`completions` are lists of messages when the row's prompt is a list of chat messages. In the first form,
`prompt` is the prompt of the row unchanged and `completion` is always text. A workflow that scores whole
answers of the policy adds the column `completion_tokens`, the length of an answer in tokens. `prompt_opened`
is the start of the answer that its prompt contains, such as `<think>`. `reasoning_end` is the index in the
completion behind the policy's reasoning: 0 without reasoning, None if it never ended.

The first two parameters of the first form may have other names for prompt and completion, such as `question,
response`, and then come by position; names that could be those of columns are refused. A dict must contain
`reward`; stretto averages and reports its other numbers. A number may be one of NumPy or torch. None, NaN or
an exception is a failure: the answer is scored again, and then left out of its group, or penalized if it is
itself at fault (see `WorkflowConfig.failure_reward`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, Protocol

import msgspec

from stretto.component import PositiveFloat, PositiveInt

__all__ = [
    "REASONING_IN_TEXT",
    "REASONING_TAG",
    "REASONING_WORDS",
    "ResultRewardConfig",
    "Reward",
    "RewardConfig",
    "RewardValue",
    "expected_texts",
    "fault_of_expected",
    "is_number",
    "leading_end",
    "number_of",
    "plain_number",
    "reasoning_end",
    "text_of",
]

RewardValue = float | Mapping[str, float] | None

REASONING_WORDS = "think|thought|reason|analy|reflect|scratch"
"""Pattern of the words in tags of reasoning."""
_REASONING = rf"[\w:-]*(?:{REASONING_WORDS})[\w:-]*"
REASONING_TAG = re.compile(rf"<{_REASONING}>|\[{_REASONING}\]", re.IGNORECASE)
REASONING_IN_TEXT = re.compile(rf"<{_REASONING}>|\[(?:think|scratch)\w*\]|◁think▷", re.IGNORECASE)
"""Finds a tag that begins reasoning, and no heading such as `[Analysis]`."""


def is_number(value: float) -> bool:
    """Return whether a reward or metric fits into float32, the dtype of trainers. False for NaN."""
    return abs(value) <= 3.4e38


def plain_number(value: Any, name: str) -> float:
    """Return a number of Python, NumPy or torch (also a bool, Decimal or Fraction) as an int, float or bool.
    Raise ValueError, with the value's name, for text and for what is no number."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, str | bytes):
            raise TypeError("text is no number, even if it looks like one")
        return plain if isinstance(plain, int | float) else float(plain)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # RuntimeError: several elements
        kind = type(value).__name__
        raise ValueError(f"{name} is {str(value)[:80]!r}, a {kind}; expected a number") from error


def number_of(value: Any, name: str) -> float:
    """Return a reward or metric that a user's code gave, as a float that `is_number`. Raise ValueError, with
    the value's name, for anything else."""
    number = plain_number(value, name)
    if not is_number(number):
        why = "beyond the range of float32, the dtype of trainers" if number == number else "not a number"
        raise ValueError(f"{name} is {value!r:.80}, {why}")
    return float(number)


def fault_of_expected(row: Mapping[str, Any], column: str) -> str:
    """Return why a column of a row holds no expected text or number; empty if it holds one."""
    if column not in row:
        return f"no column {column!r}; its columns: {', '.join(row)}"
    value = row[column]
    if value is None or isinstance(value, list | tuple | dict | bytes | datetime) or value != value:
        of = f" of row {row['id']!r}" if "id" in row else ""
        return f"the column {column!r}{of} is {value!r:.60}; expected a text or a number"
    return ""


def expected_texts(row: Mapping[str, Any], column: str) -> list[str]:
    """Return the texts that mean the expected text or number in a column of a row: "5" and "5.0" for 5 or for
    5.0, "true" and "True" for True. Raise ValueError if the column holds none."""
    if fault := fault_of_expected(row, column):
        raise ValueError(fault)
    value = row[column]
    is_whole = isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value)
    is_whole |= isinstance(value, int) and not isinstance(value, bool)
    texts = [f"{int(value)}", f"{int(value)}.0"] if is_whole else []
    if isinstance(value, bool):
        texts = [str(value).lower()]  # as JSON writes it
    elif isinstance(value, float) and math.isfinite(value):
        texts.append(format(Decimal(repr(value)), "f"))  # 0.00001, of which Python makes 1e-05
    return [*dict.fromkeys([*texts, str(value).strip()])]


def reasoning_end(completion: str, opened: str = "") -> int | None:
    """Return the index in a completion behind its reasoning: 0 without reasoning, None if it never ended.

    Reasoning ends at the last `</think>`, or at the last end of a tag for reasoning with which the completion
    begins, or which is in `opened`, the start of the answer that its prompt contains.
    """
    text, end, first = opened + completion, len(opened), REASONING_IN_TEXT.match(completion.lstrip())
    for opening in {"<think>", *REASONING_TAG.findall(opened), *([first[0]] if first else ())}:
        closing = f"{opening[0]}/{opening[1:]}"
        place = text.rfind(closing)
        if text.rfind(opening) > place:
            return None
        end = max(end, place + len(closing) if place >= 0 else 0)
    return end - len(opened)


def leading_end(completion: str, opened: str = "") -> int | None:
    """Return what `reasoning_end` does, for the first end of the reasoning with which a completion begins.
    Calls stand behind it, and their arguments may have any tags."""
    first = REASONING_IN_TEXT.match(completion.lstrip())
    if not first and reasoning_end("", opened) is not None:
        return 0
    opening = first[0] if first else REASONING_TAG.findall(opened)[-1]
    _, closing, rest = completion.partition(f"{opening[0]}/{opening[1:]}")
    return len(completion) - len(rest) if closing else None


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


class ResultRewardConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a reward that reads the result of an answer."""

    reasoning: Literal["ignored", "counts"] = "ignored"
    """`ignored`: the result is behind the policy's reasoning, which ends at `</think>` or at the end of the
    part that the prompt opened. An answer whose reasoning never ended scores 0. `counts`: a result in the
    reasoning counts too."""

    def start_of_result(self, completion: str, columns: Mapping[str, Any]) -> int | None:
        """Return the index at which the part of a completion begins that counts; None if no part counts."""
        if self.reasoning == "counts":
            return 0
        if "reasoning_end" in columns:
            return columns["reasoning_end"]
        return reasoning_end(completion, columns.get("prompt_opened", ""))


class Reward(Protocol):
    """A reward of either form. Each scoring process makes it once."""

    def __call__(self, *args: Any, **columns: Any) -> RewardValue | list[RewardValue] | Awaitable[Any]:
        """Score one answer, or all answers of a group."""
        ...
