"""The environment process: one environment, called for one answer at a time. Child of a verifier worker.

It is told which, and is ready when that is imported (see `pipes`); then a `Question` in, a `Reaction` out.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.children.protocol import serve
from stretto.children.reward import accepted
from stretto.environment import Feedback, feedback_of
from stretto.user_code.importable import load_importable

__all__ = ["COMMAND", "Question", "Reaction", "told"]

COMMAND = (sys.executable, "-m", "stretto.children.environment")


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What an environment is called with, by name: a msgpack map."""

    offered: bytes


class Reaction(msgspec.Struct, frozen=True, array_like=True):
    """What it said, or why nothing."""

    feedback: Feedback = Feedback()
    error: str = ""


def told(environment: str) -> bytes:
    """What the process is told at its start."""
    return msgspec.msgpack.encode(environment)


def _react(environment: Callable[..., Any], question: Question) -> Reaction:
    offered: dict[str, Any] = msgspec.msgpack.decode(question.offered, type=dict[str, Any])
    returned = environment(**accepted(inspect.signature(environment).parameters, offered))
    if inspect.isawaitable(returned):
        returned = asyncio.run(_result(returned))
    reaction = Reaction(feedback_of(returned, offered["state"]))
    try:
        msgspec.msgpack.encode(reaction)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"`state` and messages must be plain data: {error}") from error
    return reaction


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _made(data: bytes) -> Callable[..., Any]:
    return load_importable(msgspec.msgpack.decode(data, type=str))


def _answer(environment: Callable[..., Any], data: bytes) -> Reaction:
    return _react(environment, msgspec.msgpack.decode(data, type=Question))


def main() -> None:
    """Body of the process."""
    cannot = "the environment cannot be imported"
    serve(_made, _answer, lambda why: Reaction(error=why), cannot=cannot, name="environment")


if __name__ == "__main__":
    main()
