"""The scoring process: one reward, called for one group at a time. Child of a verifier worker.

It speaks over its standard pipes, each frame 4 bytes of length and then msgpack: first it is told the
run and answers when the reward is made; then a `Task` in, an `Answer` out, until its input ends. What a
reward prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

import msgspec

from stretto.component import Context
from stretto.config import compose_mapping
from stretto.errors import place_of
from stretto.reward import RewardValue, is_number

__all__ = ["HEAD", "Answer", "Task", "score_group", "try_to_make"]

HEAD = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Answers to one prompt."""

    row: bytes
    completions: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """(reward, metrics) of each completion, or why there are none."""

    scores: tuple[tuple[float, dict[str, float]], ...] = ()
    error: str = ""


def score_group(
    reward: Callable[..., Any], row: Mapping[str, Any], completions: tuple[str, ...]
) -> list[tuple[float, dict[str, float]]]:
    """Call a reward in whichever form it has (see `stretto.reward`).

    Raises:
        ValueError: if it gives no number for one of the completions.
    """
    parameters = inspect.signature(reward).parameters
    columns = {name: value for name, value in row.items() if name != "prompt"}
    whole_group = "completions" in parameters
    if whole_group:
        values = _call_on_group(reward, parameters, row["prompt"], columns, completions)
    else:
        values = _settled(
            [_call_on_one(reward, parameters, row["prompt"], columns, text) for text in completions]
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
        return reward(**_accepted(parameters, offered))
    return reward(prompt, completion, **_accepted(parameters, columns))


def _call_on_group(
    reward: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    prompt: Any,
    columns: Mapping[str, Any],
    completions: tuple[str, ...],
) -> list[RewardValue]:
    """TRL's form: lists in, one entry a completion; chat completions as messages."""
    n = len(completions)
    chat = not isinstance(prompt, str)
    texts = [[{"role": "assistant", "content": text}] for text in completions] if chat else list(completions)
    given = {name: [value] * n for name, value in columns.items() if name != "completions"}
    offered = {**given, "prompts": [prompt] * n}
    result = reward(completions=texts, **_accepted(parameters, offered))
    [values] = _settled([result])
    return list(cast("list[RewardValue]", values))


def _accepted(parameters: Mapping[str, inspect.Parameter], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What of `offered` the reward takes by name."""
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


def _make_reward(data: bytes) -> Callable[..., Any]:
    document, context = msgspec.msgpack.decode(data, type=tuple[dict[str, Any], Context])
    made = compose_mapping(document).make("reward", context)
    return made if callable(made) else made.score


def _serve(read: BinaryIO, write: BinaryIO) -> None:
    def receive() -> bytes | None:
        head = read.read(HEAD.size)
        return read.read(HEAD.unpack(head)[0]) if len(head) == HEAD.size else None

    def answer(message: Answer) -> None:
        data = msgspec.msgpack.encode(message)
        write.write(HEAD.pack(len(data)) + data)
        write.flush()

    first = receive()
    if first is None:
        return
    try:
        reward = _make_reward(first)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
        traceback.print_exc()
        answer(Answer(error=f"the reward cannot be made: {place_of(error)}"))
        return
    answer(Answer())
    told: set[str] = set()
    while (data := receive()) is not None:
        task = msgspec.msgpack.decode(data, type=Task)
        try:
            row = msgspec.msgpack.decode(task.row, type=dict[str, Any])
            answer(Answer(tuple(score_group(reward, row, task.completions))))
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
            reason = place_of(error)
            if reason not in told:  # once in the verifier's output, with all frames
                told.add(reason)
                traceback.print_exc()
            answer(Answer(error=f"reward raised {reason}"))


def try_to_make(document: Mapping[str, Any], context: Context, timeout_s: float) -> str:
    """Why the reward of a run cannot be made, found by a process of its own; empty if it can.

    Raises:
        TimeoutError: if that is not known in time.
    """
    data = msgspec.msgpack.encode((document, context))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=HEAD.pack(len(data)) + data,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    if len(done.stdout) < HEAD.size:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process that makes the reward ended with status {done.returncode}: {last}"
    return msgspec.msgpack.decode(done.stdout[HEAD.size :], type=Answer).error


def _die_with_parent() -> None:
    """A reward that hangs must not outlive a verifier that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit()


def main() -> None:
    """Body of the process."""
    _die_with_parent()
    # The pipes are for the frames alone: whatever the reward prints goes where errors go.
    read, write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
    _serve(read, write)


if __name__ == "__main__":
    main()
