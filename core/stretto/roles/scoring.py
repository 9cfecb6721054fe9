"""The scoring process: one reward, called for one group at a time. Child of a verifier worker.

It is told the run and is ready when the reward is made (see `pipes`); then a `Task` in, an `Answer` out.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from stretto.component import Context
from stretto.config import compose_mapping
from stretto.reward import RewardValue, is_number
from stretto.roles.pipes import serve, try_to_start

__all__ = ["COMMAND", "Answer", "Task", "accepted", "score_group", "told", "try_to_make"]

COMMAND = (sys.executable, "-m", "stretto.roles.scoring")


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Answers to one prompt."""

    row: bytes
    completions: tuple[str, ...]
    columns: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """(reward, metrics) of each completion, or why there are none."""

    scores: tuple[tuple[float, dict[str, float]], ...] = ()
    error: str = ""


def score_group(
    reward: Callable[..., Any],
    row: Mapping[str, Any],
    completions: tuple[str, ...],
    each: Mapping[str, Sequence[Any]],
) -> list[tuple[float, dict[str, float]]]:
    """Call a reward in whichever form it has (see `stretto.reward`).

    Args:
        each: columns with a value for each completion.

    Raises:
        ValueError: if it gives no number for one of the completions.
    """
    parameters = inspect.signature(reward).parameters
    columns = {name: value for name, value in row.items() if name != "prompt"}
    whole_group = "completions" in parameters
    if whole_group:
        values = _call_on_group(reward, parameters, row["prompt"], columns, completions, each)
    else:
        of_each = [{name: values[i] for name, values in each.items()} for i in range(len(completions))]
        values = _settled(
            [
                _call_on_one(reward, parameters, row["prompt"], columns | more, text)
                for text, more in zip(completions, of_each, strict=True)
            ]
        )
    if len(values) != len(completions):
        raise ValueError(f"the reward gave {len(values)} values for {len(completions)} completions")
    return [_number(value, index) for index, value in enumerate(values)]


def _call_on_one(
    reward: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    prompt: Any,
    columns: Mapping[str, Any],
    completion: str,
) -> Any:
    """The plain form: by name, or (prompt, completion) by place where the parameters are named otherwise."""
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
    """TRL's form: lists in, one entry a completion; chat completions as messages."""
    n = len(completions)
    chat = not isinstance(prompt, str)
    texts = [[{"role": "assistant", "content": text}] for text in completions] if chat else list(completions)
    given = {name: [value] * n for name, value in columns.items() if name != "completions"}
    offered = {**given, **each, "prompts": [prompt] * n}
    result = reward(completions=texts, **accepted(parameters, offered))
    [values] = _settled([result])
    return list(cast("list[RewardValue]", values))


def accepted(parameters: Mapping[str, inspect.Parameter], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What of `offered` a function takes by name."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _settled(values: list[Any]) -> list[Any]:
    """Values with the awaitable ones awaited, all at once."""
    if not any(inspect.isawaitable(value) for value in values):
        return values

    async def value_of(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def all_of() -> list[Any]:
        return list(await asyncio.gather(*(value_of(value) for value in values)))

    return asyncio.run(all_of())


def _number(value: RewardValue, index: int) -> tuple[float, dict[str, float]]:
    metrics: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise ValueError(f"the reward of completion {index} is a dict without 'reward': {value!r}")
        metrics = {name: float(number) for name, number in value.items() if name != "reward"}
        value = value["reward"]
    if value is None or not is_number(number := float(value)):
        raise ValueError(f"the reward of completion {index} is {value!r}, not a finite number")
    for name, metric in metrics.items():
        if not is_number(metric):
            raise ValueError(f"{name!r} of completion {index} is {metric!r}, not a finite number")
    return number, metrics


def told(document: Mapping[str, Any], context: Context) -> bytes:
    """What a scoring process is told at its start: the composed run, and what its component is told."""
    return msgspec.msgpack.encode((document, context))


def try_to_make(document: Mapping[str, Any], context: Context, timeout_s: float) -> str:
    """Why the reward of a run cannot be made, found by a process of its own; empty if it can.

    Raises:
        TimeoutError: if that is not known in time.
    """
    return try_to_start(COMMAND, told(document, context), timeout_s).error


def _make_reward(data: bytes) -> Callable[..., Any]:
    document, context = msgspec.msgpack.decode(data, type=tuple[dict[str, Any], Context])
    made = compose_mapping(document).make("reward", context)
    return made if callable(made) else made.score


def _answer(reward: Callable[..., Any], data: bytes) -> Answer:
    task = msgspec.msgpack.decode(data, type=Task)
    row = msgspec.msgpack.decode(task.row, type=dict[str, Any])
    each = msgspec.msgpack.decode(task.columns, type=dict[str, list[Any]])
    return Answer(tuple(score_group(reward, row, task.completions, each)))


def main() -> None:
    """Body of the process."""
    cannot = "the reward cannot be made"
    serve(_make_reward, _answer, lambda why: Answer(error=why), cannot=cannot, name="reward")


if __name__ == "__main__":
    main()
