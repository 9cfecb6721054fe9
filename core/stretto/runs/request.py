"""The messages between a program and the kernel process of a run that the program starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a program starts."""

    file: str
    """The run file. With a `document`, the file is only a name for messages."""
    document: dict[str, Any] | None = None
    """The content of the run file; None to read `file`."""
    overrides: list[str] = []


class RunNotice(msgspec.Struct, frozen=True, tag="notice"):
    """A note or a warning about the run."""

    level: str
    text: str


class RunAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The run starts now."""

    folder: str


class RunRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The run was refused, or failed before it had a summary: class, text and facts of the error."""

    error: str
    text: str
    path: str = ""
    value: Any = None
    kind: str = ""
    name: str = ""


RunMessage = RunNotice | RunAccepted | RunRefused
message_of: Callable[[bytes], RunMessage] = msgspec.json.Decoder(RunMessage).decode
