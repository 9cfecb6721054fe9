"""The contract of environments: functions that answer the policy between its turns.

    def environment(completion, **columns) -> None | str | message | messages | dict

It is called after each answer, by name: a function without `**columns` gets what it names, of

    prompt       as the row has it
    completion   the text of the answer
    messages     all that was said, chat messages; where the prompt is text, that text with all that followed
    turn         how many answers there are by now, from 1
    state        a dict, empty at first, that the function may change; the next call gets it again

and of the row's other columns. It may be `async`. What it returns is said to the policy: text (in a chat it
is a user's message), a chat message, or a list of messages. None ends the conversation. A dict can say more:
`feedback`, one of the above; `reward`, a number, and those of all turns add up; other numbers are averaged
and reported. Without `feedback` it ends the conversation.

The function runs in a process that can be killed, and not always in the same one: between two calls nothing
but `state` is kept, which has to be plain data. An exception, or a call that takes too long, fails the
ticket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stretto.component import Importable, PositiveFloat
from stretto.reward import is_number
from stretto.workflow import WorkflowConfig

if TYPE_CHECKING:
    from stretto.models.tokenizer import Message

__all__ = ["EnvironmentConfig", "Feedback", "feedback_of"]


class EnvironmentConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose conversations have an environment."""

    environment: Importable
    """`path.py:name` or `module:name`: a function, called after each answer (see `stretto.environment`)."""
    environment_timeout_s: PositiveFloat = 30.0
    """Seconds for one call; the process that takes longer is killed and the ticket fails."""


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment said of one answer."""

    said: tuple[str | dict[str, Any], ...] = ()
    """Text, or chat messages. Empty where the conversation is over."""
    reward: float | None = None
    metrics: dict[str, float] = {}
    state: dict[str, Any] = {}
    """For the next call."""


def feedback_of(returned: Any, state: dict[str, Any]) -> Feedback:
    """What an environment meant.

    Raises:
        ValueError: if it returned what none may.
    """
    if isinstance(returned, Mapping) and "role" not in returned:
        told = dict(cast("Mapping[str, Any]", returned))
        said, reward = told.pop("feedback", None), told.pop("reward", None)
        numbers = told if reward is None else {**told, "reward": reward}
        for name, number in numbers.items():
            if not isinstance(number, (int, float)) or not is_number(number):
                raise ValueError(
                    f"{name!r} of what the environment returned is {number!r}, not a finite number"
                )
        metrics = {name: float(number) for name, number in told.items()}
        return Feedback(
            said=_said(said), reward=None if reward is None else float(reward), metrics=metrics, state=state
        )
    return Feedback(said=_said(returned), state=state)


def _said(returned: Any) -> tuple[str | dict[str, Any], ...]:
    if returned is None:
        return ()
    if isinstance(returned, str):
        return (returned,)
    turns = [returned] if isinstance(returned, Mapping) else returned
    if isinstance(turns, Sequence) and turns and all(map(_is_message, cast("Sequence[Any]", turns))):
        return tuple(dict(cast("Message", turn)) for turn in cast("Sequence[Any]", turns))
    raise ValueError(
        f"the environment returned {str(returned)[:80]!r}; expected text, a chat message, a list of "
        "messages, None, or a dict with `feedback` and `reward`"
    )


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and {"role", "content"} <= turn.keys()
