"""Rewards `exact`, `regex`, `format` and `length`, which read nothing but an answer's text and its length."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.errors import ConfigError
from stretto.models.files import known_config
from stretto.models.tokenizer import load_tokenizer
from stretto.models.vision import is_vision_language
from stretto.reward import REASONING_WORDS, ResultRewardConfig, expected_texts, fault_of_expected

__all__ = ["ExactConfig", "FormatConfig", "LengthConfig", "RegexConfig"]

_TAG = re.compile(r"[A-Za-z][\w-]*")


class ExactConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `exact`."""

    column: str = "answer"
    """Column with the expected text or number. White space around both texts is ignored. A number without
    decimals is right with and without them: 5.0 and 5."""


def make_exact(config: ExactConfig, context: Context) -> Callable[..., dict[str, float]]:
    del context

    def exact(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        expected, start = expected_texts(columns, config.column), config.start_of_result(completion, columns)
        right = float(start is not None and completion[start:].strip() in expected)
        return {"reward": right, "accuracy": right}

    return exact


class RegexConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `regex`."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer; some patterns would never end on some answers."""
    pattern: str
    """Regular expression (Python's `re`) with one group, such as `<answer>(.*?)</answer>`. `.` also matches a
    new line. The last match whose group begins behind the reasoning counts; without one, the score is 0. `^`
    stands for the start of the whole answer, else for that of the part behind the reasoning."""
    column: str = "answer"
    """Column with the expected text or number of the group. White space around both texts is ignored."""
    ignore_case: bool = False
    """Ignore the difference between capital and small letters, in the pattern and in the comparison."""

    def __post_init__(self) -> None:
        groups = _compile(self.pattern).groups
        if groups != 1:
            raise ValueError(
                f"pattern: {self.pattern!r} has {groups} groups; expected one, around the answer ((?:…) does "
                "not count)"
            )


def make_regex(config: RegexConfig, context: Context) -> Callable[..., dict[str, float]]:
    del context
    pattern = re.compile(config.pattern, re.DOTALL | (re.IGNORECASE if config.ignore_case else 0))

    def plain(text: str) -> str:
        return text.strip().casefold() if config.ignore_case else text.strip()

    def last_group(text: str, start: int, result: str) -> str | None:
        # A match from the reasoning may hide one behind it, so search from both places.
        matches = [match for place in sorted({0, start}) for match in pattern.finditer(text, place)]
        found = [match for match in matches if max(match.start(), match.start(1)) >= start]
        found = found or [*pattern.finditer(result)]  # `^` stands for the start of the result too
        return found[-1][1] or "" if found else None

    def finds(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        expected = [*map(plain, expected_texts(columns, config.column))]
        opened, start = columns.get("prompt_opened", ""), config.start_of_result(completion, columns)
        found = None
        if start is not None:
            # A group may begin right behind the tag that the prompt opened, whatever blanks follow it there.
            place = len(opened) + start if start else len(opened.rstrip())
            found = last_group(opened + completion, place, completion[start:].strip())
        right = float(found is not None and plain(found) in expected)
        return {"reward": right, "accuracy": right}

    return finds


class FormatConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `format`. It needs `tags` or `pattern`, or both."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer; some patterns would never end on some answers."""
    tags: tuple[str, ...] = ()
    """Names of tags that the answer consists of, in this order: `[think, answer]` expects
    `<think>…</think><answer>…</answer>`, each tag once, with nothing but white space around them. Reasoning
    between special tokens, which the text does not have, and an empty block in the prompt may be left out."""
    pattern: str = ""
    """Regular expression (Python's `re`) that must match the whole answer without the white space around it.
    `.` also matches a new line."""

    def __post_init__(self) -> None:
        if not self.tags and not self.pattern:
            raise ValueError("needs `tags` or `pattern`")
        if odd := [tag for tag in self.tags if not _TAG.fullmatch(tag)]:
            raise ValueError(f"tags: {odd[0]!r} is not the name of a tag; expected letters, digits, _ and -")
        _compile(self.pattern)


def make_format(config: FormatConfig, context: Context) -> Callable[..., float]:
    del context
    pattern = re.compile(config.pattern, re.DOTALL)
    blocks = r"\s*".join(rf"<{tag}>.*</{tag}>" for tag in config.tags)
    tags = re.compile(blocks, re.DOTALL)

    def has_tags(text: str) -> bool:
        each_once = all(text.count(mark) == 1 for tag in config.tags for mark in (f"<{tag}>", f"</{tag}>"))
        return each_once and tags.fullmatch(text) is not None

    def matches(text: str) -> bool:
        found = not config.pattern or pattern.fullmatch(text) is not None
        return found and (not config.tags or has_tags(text))

    def has_form(
        prompt: Any, completion: str, prompt_opened: str = "", reasoning_end: int | None = None
    ) -> float:
        texts = [prompt_opened + completion]
        # Without reasoning the prompt may have closed an empty block; its tags may be special tokens.
        if reasoning_end is not None and not completion[:reasoning_end].rstrip().endswith((">", "]")):
            texts.append(completion[reasoning_end:])
        return float(any(matches(text.strip()) for text in texts))

    return has_form


def check_tags(config: FormatConfig | RegexConfig, run: RunConfig) -> Iterator[Problem]:
    """Warn of tags that no text of an answer has: those of the model's reasoning may be special tokens, and
    some templates write tags of their own around an answer."""
    model, pattern = run.model, re.sub(r"\\(\W)", r"\1", config.pattern)
    named = "".join(f"<{tag}></{tag}>" for tag in getattr(config, "tags", ()))
    if (
        model is None
        or not Path(model, "tokenizer.json").is_file()
        or is_vision_language(known_config(model))
    ):
        return
    try:
        tokenizer = load_tokenizer(model, run.dataset)
    except ConfigError:  # `stretto check` itself reports it
        return
    form = tokenizer.form
    own = [tag for tag in (form.stored.begin.strip(), form.stored.end) if tag]
    wants = any(tag in pattern for tag in own) or re.search(f"<[^/>]*({REASONING_WORDS})", named + pattern)
    if wants and (hidden := [tag for tag in own if tokenizer.special_in(tag)]):
        yield Problem(
            "reward",
            f"the model writes its reasoning between special tokens such as {hidden[-1]!r}, which the text "
            "of an answer does not have: name other tags, and ask for them in the prompt",
            "warning",
        )
    for tag in re.findall(r"</?[\w:-]+>", form.lead + form.tail):
        if tag in named + pattern:
            fault = f"the chat template itself writes {tag!r}, which the text of an answer does not have"
            yield Problem("reward", fault, "warning")


class LengthConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `length`."""

    limit: PositiveInt
    """Length of an answer, in tokens, at which the full penalty applies; usually `sampling.max_tokens`."""
    buffer: PositiveInt
    """Number of tokens below the limit at which the penalty begins."""
    penalty: PositiveFloat = 1.0
    """Amount that the reward loses at the limit."""

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) must be at most limit ({self.limit})")


def make_length(config: LengthConfig, context: Context) -> Callable[..., float]:
    """Return the soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13): 0 up to
    `limit - buffer` tokens, from there linearly down to `-penalty` at `limit`, and `-penalty` beyond. It is
    for use in the reward `sum`."""
    del context

    def penalty(prompt: Any, completion: str, completion_tokens: int) -> float:
        share = (completion_tokens - (config.limit - config.buffer)) / config.buffer
        return -config.penalty * min(1.0, max(0.0, share))

    return penalty


def check_length(config: LengthConfig, run: RunConfig) -> Iterable[Problem]:
    """Warn of a limit that no answer reaches."""
    longest = run.sampling.max_tokens
    if config.limit - config.buffer >= longest:
        yield Problem(
            "reward.limit",
            f"is {config.limit}, and the penalty begins at {config.limit - config.buffer} tokens, which no "
            f"answer exceeds: sampling.max_tokens is {longest}",
            "warning",
        )


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern: {pattern!r} is no regular expression: {error}") from error


def _check_row(config: ExactConfig | RegexConfig, row: Mapping[str, Any]) -> str:
    return fault_of_expected(row, config.column)


@hookimpl
def stretto_reward() -> Iterator[Component[Any]]:
    yield Component(
        "exact",
        make_exact,
        ExactConfig,
        "1 if the answer equals the row's expected text",
        check_row=_check_row,
    )
    yield Component(
        "format",
        make_format,
        FormatConfig,
        "1 if the answer has the expected tags, or matches a pattern",
        check_tags,
    )
    yield Component(
        "length",
        make_length,
        LengthConfig,
        "a penalty for answers near a limit of tokens (DAPO)",
        check_length,
    )
    yield Component(
        "regex",
        make_regex,
        RegexConfig,
        "1 if a pattern finds the row's expected text in the answer",
        check_tags,
        check_row=_check_row,
    )
