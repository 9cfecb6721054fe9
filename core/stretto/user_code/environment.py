"""The environment process, child of a verifier worker. Each call answers one `Question` (see `protocol`)."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from stretto.environment import Feedback, feedback_of
from stretto.errors import RewardError
from stretto.models.images import ImageError, files_of
from stretto.user_code.faults import SampleFault
from stretto.user_code.importable import load_importable
from stretto.user_code.plain_data import decode_row
from stretto.user_code.protocol import serve
from stretto.user_code.scoring import accepted, await_all, required

COMMAND = (sys.executable, "-m", "stretto.user_code.environment")


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One call of the environment."""

    arguments: bytes
    """Arguments by name: a msgpack map."""


class Reaction(msgspec.Struct, frozen=True, array_like=True):
    """The environment's feedback, or why there is none."""

    feedback: Feedback = Feedback()
    fault: SampleFault | None = None


def setup_frame(environment: str) -> bytes:
    """Return the first frame for the process: the environment's reference."""
    return msgspec.msgpack.encode(environment)


def react(environment: Callable[..., Any], data: bytes) -> Reaction:
    """Call the environment with the arguments of a question, and return its reaction."""
    question = msgspec.msgpack.decode(data, type=Question)
    arguments = decode_row(question.arguments)
    parameters = inspect.signature(environment).parameters
    if missing := [name for name in required(parameters) if name not in arguments]:
        available = ", ".join(arguments)
        raise RewardError(f"the environment has a parameter {missing[0]!r}; available: {available}")
    [result] = await_all([environment(**accepted(parameters, arguments))])
    reaction = Reaction(feedback_of(with_files(result), arguments["state"]))
    try:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(reaction), type=Reaction).feedback.state
        if repr(state) != repr(reaction.feedback.state):  # not ==, for which a NaN is another one
            raise TypeError(f"the next call would receive {state!r:.200}, as a tuple or set becomes a list")
    except (TypeError, OverflowError) as error:
        raise ValueError(f"`state` and messages must be plain data: {error}") from error
    return reaction


def with_files(returned: Any) -> Any:
    """Return what an environment returned, with its `images` as files."""
    if not isinstance(returned, Mapping) or "images" not in returned:
        return cast("Any", returned)
    fields = cast("Mapping[str, Any]", returned)
    try:
        return {**fields, "images": files_of(fields["images"])}
    except ImageError as error:
        raise RewardError(f"the environment returned `images` that cannot be used: {error}") from error


def load(data: bytes) -> Callable[..., Any]:
    """Return the environment that the first frame names."""
    return load_importable(msgspec.msgpack.decode(data, type=str))


def main() -> None:
    """Serve calls of the environment until the input ends."""
    cannot = "the environment cannot be imported"
    serve(load, react, lambda fault: Reaction(fault=fault), cannot=cannot, name="environment")


if __name__ == "__main__":
    main()
