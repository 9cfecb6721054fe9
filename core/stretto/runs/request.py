"""What a program and the kernel process of a run that it starts say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a program asks for."""

    file: str
    """The run file. If there is a `document`, only messages name it."""
    document: dict[str, Any] | None = None
    """The content in place of that of a file."""
    overrides: list[str] = []


class RunNotice(msgspec.Struct, frozen=True, tag="notice"):
    """A note or a warning about the run."""

    level: str
    text: str


class RunAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The run starts now."""

    folder: str


class RunRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The run was refused, or failed before it had a summary: the error's class and what it carries."""

    error: str
    text: str
    path: str = ""
    value: Any = None
    kind: str = ""
    name: str = ""


RunMessage = RunNotice | RunAccepted | RunRefused
message_of: Callable[[bytes], RunMessage] = msgspec.json.Decoder(RunMessage).decode
