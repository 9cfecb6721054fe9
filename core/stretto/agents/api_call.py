"""A call of the policy over HTTP, for all APIs: what the endpoint needs, and functions that read bodies.

`openai_api` and `anthropic_api` make `APICall`s of requests, which write the answers. Both turn chats into
the messages of chat templates, so a chat may continue in the other API.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from stretto.agents.recorder import Input
from stretto.dataset import Message
from stretto.errors import StrettoError
from stretto.workflow import Answer

__all__ = [
    "MODEL",
    "APICall",
    "ApiError",
    "Event",
    "Reply",
    "function_tool",
    "image_of_url",
    "read_body",
    "read_item",
    "stop_texts",
]

T = TypeVar("T")
MODEL = "policy"
"""Name of the only model. The model's name in a request is not checked."""

Event = tuple[str, Mapping[str, Any]]
"""An event of a stream: (type, data). The type is empty if the API does not name it."""


class ApiError(StrettoError):
    """A refused request: `param` is the wrong field, `code` a word for programs, `status` the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True)
class Reply:
    """One answer, as the agent gets it."""

    answer: Answer
    prompt_tokens: int
    message: Message
    """`role`, `content`, and perhaps `tool_calls`: `id`, `type` and `function` (`name`, `arguments`)."""

    @property
    def text(self) -> str:
        """The text of the answer, without its tool calls."""
        return self.message["content"]


class APICall(Protocol):
    """A parsed request, with methods that write its answer."""

    inputs: list[Input]
    """The policy's input for each choice."""
    images: list[bytes]
    """Files of the images in the input, whose messages name the images by SHA-256."""
    tools: list[dict[str, Any]]
    reads_tools: bool
    """Whether the endpoint searches answers for calls of the tools."""
    max_tokens: int | None
    stop: list[str]
    stream: bool
    ends_with_done: bool
    """Whether a stream's last line is `[DONE]`."""

    def response(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the answer in one piece."""
        ...

    def opening(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the events before the first piece. `prompt_tokens`: length of the first choice's prompt."""
        ...

    def piece(self, choice: int, text: str) -> Iterator[Event]:
        """Yield the events for new text of a choice."""
        ...

    def choice_end(self, choice: int, reply: Reply) -> Iterator[Event]:
        """Yield the events for a complete choice; its text was sent in pieces."""
        ...

    def closing(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the events after all choices are complete."""
        ...

    def failed(self, error: ApiError) -> Event:
        """Return the event for an error that ends the stream."""
        ...


def read_body(body: bytes, kind: type[T]) -> T:
    """Parse the body of a request. Raise ApiError if it is not JSON, or not what the call expects."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".") or None
        location = f"{param}: " if param else ""
        raise ApiError(f"{location}{message[:1].lower()}{message[1:]}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error


def read_item(item: dict[str, Any], kind: type[T], location: str) -> T:
    """Convert a part of a body. Raise ApiError if it is not what the call expects."""
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"{location}: {error}", param=location) from error


def function_tool(name: Any, description: Any, parameters: Any, location: str) -> dict[str, Any]:
    """Return a tool in the form of chat templates. Two equal tools of different APIs have equal forms."""
    if not isinstance(name, str):
        raise ApiError(f"{location}: a function needs a name", param=f"{location}.name")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value}}


def image_of_url(url: str, location: str) -> bytes:
    """Return the file of an image in a data URL. Raise ApiError for other URLs: the endpoint fetches none."""
    head, _, data = url.partition(",")
    if not head.startswith("data:"):
        raise ApiError(
            f"{location}: {url[:60]!r} is not fetched; send the image in a data URL: data:image/png;base64,…",
            param=location,
        )
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ApiError(f"{location}: the data URL cannot be read: {error}", param=location) from error


def stop_texts(stop: str | list[str] | None, param: str) -> list[str]:
    """Return the texts that end an answer. Raise ApiError if one is empty."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not all(stops):
        raise ApiError("an empty text would end every answer", param=param)
    return stops
