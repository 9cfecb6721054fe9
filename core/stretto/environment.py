"""The contract of environments: functions that answer the policy between its turns.

    def environment(completion, **columns) -> None | str | message | messages | dict

stretto calls it after each answer, with arguments by name. A function without `**columns` receives only the
arguments that it names, out of

    prompt       the prompt of the row, unchanged
    completion   the text of the answer
    messages     the whole conversation as chat messages; as one text, including the prompt, if that is text
    turn         number of answers so far, from 1
    state        a dict, empty at first, that the function may change; the next call receives it again

and the other columns of the row. It may be `async`. Its return value goes to the policy: text (in a chat, as
a message of the user), a chat message, or a list of messages. None ends the conversation. A dict can carry
more: `feedback`, one of the values above; `images`, the images in the feedback, if the policy reads images;
`reward`, a number (stretto adds the rewards of all turns); and other numbers, which stretto averages and
reports. A dict without `feedback` ends the conversation.

An image is a Pillow image, a path, or the bytes of a file. The first one takes the first place in the
feedback, and so on. In a chat, a place is `<image>` in a text, or a part `{"type": "image"}` of a message's
content; in a text, it is the model's own placeholder. In `messages`, each image is a part with its SHA-256.

The function runs in a process that stretto can kill, and not always in the same process. Only `state` is kept
between two calls; it must be plain data. An exception, or a call that takes too long, fails the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from stretto.component import Importable, PositiveFloat
from stretto.reward import number_of
from stretto.tools import ToolsConfig
from stretto.workflow import WorkflowConfig

if TYPE_CHECKING:
    from stretto.agents.conversation import Conversation
    from stretto.dataset import Message

__all__ = [
    "ENVIRONMENTS",
    "EnvironmentConfig",
    "EnvironmentToolsConfig",
    "Feedback",
    "columns_of_turn",
    "feedback_of",
]


class EnvironmentConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose conversations have an environment."""

    gives_reward: ClassVar[bool] = True

    environment: Importable
    """Function of the environment, `path.py:name` or `module:name`. stretto calls it after each answer (see
    `stretto.environment`)."""
    environment_timeout_s: PositiveFloat = 30.0
    """Time limit of one call, in seconds. A process that takes longer is killed, and the sample fails."""


class EnvironmentToolsConfig(ToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose session has an environment and tools. No class can extend both
    `EnvironmentConfig` and `ToolsConfig`: msgspec allows one base with fields."""

    gives_reward: ClassVar[bool] = True

    environment: Importable
    """As in `EnvironmentConfig`."""
    environment_timeout_s: PositiveFloat = 30.0
    """As in `EnvironmentConfig`."""


ENVIRONMENTS = (EnvironmentConfig, EnvironmentToolsConfig)
"""The bases of sections that have an environment."""
_ENDS = ("done", "terminated", "truncated")


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """The feedback of an environment on one answer."""

    messages: tuple[str | dict[str, Any], ...] = ()
    """Text, or chat messages, for the policy. Empty when the conversation is over."""
    images: tuple[bytes, ...] = ()
    """Files of the images in the messages, in the order of their places."""
    reward: float | None = None
    metrics: dict[str, float] = {}
    state: dict[str, Any] = {}
    """State for the next call."""


def columns_of_turn(conversation: Conversation, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an environment after an answer, without the columns of the row."""
    return {
        "completion": conversation.answers[-1].text,
        "messages": conversation.history,
        "turn": len(conversation.answers),
        "state": state,
    }


def feedback_of(returned: Any, state: dict[str, Any]) -> Feedback:
    """Convert the return value of an environment to feedback.

    Args:
        returned: the value. Its images have been converted to files.

    Raises:
        ValueError: if the value is not valid for an environment.
    """
    if isinstance(returned, Mapping) and "role" not in returned:
        fields = dict(cast("Mapping[str, Any]", returned))
        feedback, reward = fields.pop("feedback", None), fields.pop("reward", None)
        images, place = tuple(fields.pop("images", ())), "in the environment's feedback"
        if feedback is not None and (ends := [name for name in _ENDS if fields.get(name) is True]):
            raise ValueError(f"{ends[0]!r} is true beside `feedback`; leave `feedback` out to end")
        return Feedback(
            messages=_turns(feedback),
            images=images,
            reward=None if reward is None else number_of(reward, f"'reward' {place}"),
            metrics={name: number_of(number, f"{name!r} {place}") for name, number in fields.items()},
            state=state,
        )
    return Feedback(messages=_turns(returned), state=state)


def _turns(result: Any) -> tuple[str | dict[str, Any], ...]:
    if result is None:
        return ()
    if isinstance(result, str):
        return (result,)
    turns = [result] if isinstance(result, Mapping) else result
    for turn in turns if isinstance(turns, Sequence) else ():
        if isinstance(turn, Mapping) and (own := {"reward", "images", "feedback"} & turn.keys()):
            raise ValueError(
                f"the environment returned a message with {sorted(own)[0]!r}; return a dict with the message "
                "as `feedback`, and `reward` and `images` beside it"
            )
    if isinstance(turns, Sequence) and turns and all(map(_is_message, cast("Sequence[Any]", turns))):
        return tuple(dict(cast("Message", turn)) for turn in cast("Sequence[Any]", turns))
    raise ValueError(
        f"the environment returned {str(result)[:80]!r}; expected text, a chat message, a list of "
        "messages, None, or a dict with `feedback` and `reward`"
    )


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and {"role", "content"} <= turn.keys()
