"""Calls rewards: functions of either form that `stretto.reward` describes."""

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from stretto.errors import RewardError
from stretto.reward import RewardValue, number_of

__all__ = [
    "accepted",
    "await_all",
    "optional_scores",
    "required",
    "score_group",
    "scores_groups",
    "unknown_optional",
]

_PROMPT = re.compile("prompt|question|query|problem|instruction|input|task")
_COMPLETION = re.compile("response|output|reply|generation|generated|predict")
_EXPECTED = re.compile("gold|truth|label|target|expected|reference|correct")
"""Words in names of parameters: without `completion`, a reward gets prompt and completion by position."""


def scores_groups(reward: Callable[..., Any]) -> bool:
    """Return whether a reward scores all answers of a group in one call."""
    return "completions" in inspect.signature(reward).parameters


def score_group(
    reward: Callable[..., Any],
    row: Mapping[str, Any],
    completions: tuple[str, ...],
    each: Mapping[str, Sequence[Any]],
) -> list[tuple[float, dict[str, float]]]:
    """Call a reward in the form that its signature has (see `stretto.reward`), and return its scores.

    `each` has columns with a value for each completion; without completions, only the columns are checked.
    Raises RewardError for a missing column, or without a finite number for every completion.
    """
    scores = optional_scores(reward, row, completions, each)
    if None in scores:
        raise RewardError(f"the reward of completion {scores.index(None)} is None{_place_of(reward)}")
    return [score for score in scores if score is not None]


def optional_scores(
    reward: Callable[..., Any],
    row: Mapping[str, Any],
    completions: tuple[str, ...],
    each: Mapping[str, Sequence[Any]],
) -> list[tuple[float, dict[str, float]] | None]:
    """Do what `score_group` does, with None for completions whose reward is None, as in TRL."""
    parameters = inspect.signature(reward).parameters
    columns = {name: value for name, value in row.items() if name != "prompt"}
    _require_columns(reward, parameters, [*columns, *each])
    if not completions:
        return []
    if "completions" in parameters:
        values = _call_on_group(reward, parameters, row["prompt"], columns, completions, each)
    else:
        results: list[Any] = []
        for index, text in enumerate(completions):
            extra = {name: column[index] for name, column in each.items()}
            results.append(_call_on_one(reward, parameters, row["prompt"], columns | extra, text))
        values = await_all(results)
    if len(values) != len(completions):
        raise RewardError(
            f"the reward{_place_of(reward)} returned {len(values)} values for {len(completions)} completions"
        )
    place = _place_of(reward)
    return [_number(value, f"completion {index}{place}") for index, value in enumerate(values)]


def _require_columns(
    reward: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], columns: Sequence[str]
) -> None:
    """Refuse a reward that needs a column which is missing. Python would report only a missing argument."""
    needed = required(parameters)
    by_name = {"completions", "prompts"} if "completions" in parameters else {"completion", "prompt"}
    if not by_name & parameters.keys() - {"prompt", "prompts"}:  # prompt and completion come by position
        _expect_room_for_answer(reward, needed[:2], columns)
        needed = needed[2:]
    missing = [name for name in needed if name not in by_name and name not in columns]
    if missing:
        raise RewardError(
            f"the reward needs {', '.join(map(repr, missing))}{_place_of(reward)}, but the row has no such "
            f"column; its columns: {', '.join(columns) or 'none'}; rename it, or give it a default"
        )


def _expect_room_for_answer(reward: Callable[..., Any], names: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse parameters by position that could mean something else than prompt and completion."""
    if len(names) == 2 and not _name_prompt_and_completion(*names):
        raise RewardError(
            f"the reward{_place_of(reward)} has no parameter 'completion', so its first two parameters get "
            f"the prompt and the completion, but it calls them {names[0]!r} and {names[1]!r}; name them "
            "'prompt' and 'completion', and columns of the row by their own names"
        )
    if taken := [name for name in names if name in columns]:
        raise RewardError(
            f"the reward{_place_of(reward)} has no parameter 'completion', so its first two parameters get "
            f"the prompt and the completion, but {taken[0]!r} is a column of the row; name them 'prompt' and "
            "'completion'"
        )


def _name_prompt_and_completion(first: str, second: str) -> bool:
    swapped = _COMPLETION.search(first) or _PROMPT.search(second)
    if swapped or _EXPECTED.search(first) or _EXPECTED.search(second):
        return False
    unused, letters = first.startswith("_"), len(first) == len(second) == 1
    return bool(_PROMPT.search(first) or _COMPLETION.search(second) or unused or letters)


def _place_of(reward: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(reward), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _call_on_one(
    reward: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    prompt: Any,
    columns: Mapping[str, Any],
    completion: str,
) -> Any:
    """Call the plain form: by name, or (prompt, completion) by position if no parameter is `completion`."""
    if "completion" in parameters:
        offered = {**columns, "prompt": prompt, "completion": completion}
        return reward(**accepted(parameters, offered))
    return reward(prompt, completion, **accepted(parameters, columns))


def _call_on_group(
    reward: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    prompt: Any,
    columns: Mapping[str, Any],
    completions: tuple[str, ...],
    each: Mapping[str, Sequence[Any]],
) -> list[RewardValue]:
    """Call TRL's form: each argument is a list with one entry for each completion."""
    n = len(completions)
    chat = not isinstance(prompt, str)
    texts = [[{"role": "assistant", "content": text}] for text in completions] if chat else list(completions)
    repeated = {name: [value] * n for name, value in columns.items() if name != "completions"}
    offered = {**repeated, **each, "prompts": [prompt] * n}
    result = reward(completions=texts, **accepted(parameters, offered))
    [values] = await_all([result])
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise RewardError(
            f"the reward{_place_of(reward)} has a parameter 'completions', so it returns a list with one "
            f"number for each completion; found {values!r:.80}"
        )
    return list(cast("Iterable[RewardValue]", values))


def unknown_optional(reward: Callable[..., Any], columns: Collection[str]) -> list[str]:
    """Return the parameters with a default whose names no column has: they may be misspelt."""
    known_names = {"prompt", "prompts", "completion", "completions", *columns}
    return [
        parameter.name
        for parameter in inspect.signature(reward).parameters.values()
        if parameter.default is not parameter.empty and parameter.name not in known_names
    ]


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters of a function that need an argument."""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters.values() if each.kind not in free and each.default is each.empty]


def accepted(parameters: Mapping[str, inspect.Parameter], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `offered` that a function accepts by name."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def await_all(values: list[Any]) -> list[Any]:
    """Return values with the results of awaitables in place of these, which run at the same time."""
    if not any(inspect.isawaitable(value) for value in values):
        return values

    async def value_of(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def all_of() -> list[Any]:
        return list(await asyncio.gather(*(value_of(value) for value in values)))

    return asyncio.run(all_of())


def _number(value: RewardValue, of: str) -> tuple[float, dict[str, float]] | None:
    """Return reward and metrics of completion `of`; None if the reward is None. Raise RewardError for
    unusable numbers: its group then lacks the completion, because the error says nothing about the policy."""
    if value is None:
        return None
    metrics: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise RewardError(f"the reward of {of} is a dict without 'reward': {value!r}")
        if odd := [name for name in cast("Mapping[Any, Any]", value) if not isinstance(name, str)]:
            raise RewardError(
                f"the reward of {of} is a dict with the key {odd[0]!r}; a metric's name is text"
            )
        items = cast("Mapping[str, Any]", value).items()
        metrics = {name: _float(each, f"the metric {name!r}", of) for name, each in items if name != "reward"}
        value = cast("float | None", value["reward"])
        if value is None:
            return None
    return _float(value, "the reward", of), metrics


def _float(value: Any, what: str, of: str) -> float:
    try:
        return number_of(value, f"{what} of {of}")
    except ValueError as error:
        raise RewardError(str(error)) from error
