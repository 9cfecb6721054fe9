"""The contract of weight transports: a publisher beside the trainer, a subscriber beside each engine.

A publisher never waits for a subscriber. Versions are announced by the kernel; a subscriber that is
late asks for the newest one only, and old ones may be gone by then, except those that evaluations need.
Versions that lie in a folder are the business of `stretto.models.version_files`.

What an engine serves is compared with what was announced, tensor by tensor, before anything that it samples
leaves its worker; that is the worker's business, not the transport's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stretto.array import Array

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Canary",
    "Publisher",
    "Subscriber",
    "WeightUpdate",
    "WeightsConfig",
    "WeightsNote",
    "WeightsTransport",
    "Wire",
]


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every weight transport's section."""

    use: str = "file"
    """Name of the weight transport."""


class Canary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the trainer's model says of a fixed text, for engines to be compared with. S sequences of L."""

    tokens: Array
    """(S, L) int32, L >= 2."""
    logprobs: Array
    """(S, L - 1) float32, of every token but the first of a sequence, at temperature 1."""


class WeightsNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The announcement of one version, small enough for any message."""

    version: int
    address: str
    """Where it lies, in the transport's own words."""
    digest: str
    """`digest_of` its tensors."""
    canary: Canary | str = ""
    """Added by the trainer: what the version says of the run's canary, or why it has none; empty where none
    is wanted."""


class WeightUpdate(Protocol):
    """One version, ready to be loaded: on this machine, complete and checked against its digest."""

    @property
    def note(self) -> WeightsNote:
        """What was announced of it."""
        ...

    def hashes(self) -> Mapping[str, str]:
        """Tensor name -> SHA-256 in hex of its little-endian bytes, as published: `digest_of` them is the
        digest of the note."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder with the tensors as safetensors files, for engines that load from disk."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by Hugging Face name, mapped rather than read where that is possible. Not to be
        written to, and valid until `close`."""
        ...

    def close(self) -> None:
        """Nobody uses the tensors any more."""
        ...


class Publisher(Protocol):
    """Publishes versions of one model. Lives in rank 0 of its worker group."""

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Make a version available, complete or not at all. Returns without waiting for readers.

        Args:
            needed: published versions that must stay available, beside the newest.

        Raises:
            WeightsError: if it cannot be written, saying why.
        """
        ...

    def copy(self, version: int, folder: Path) -> None:
        """Write a version that is available into a folder that is not there yet, for
        `stretto.models.version_files.open_version`.

        Raises:
            WeightsError: if the version is not available.
            OSError: if the folder cannot be written.
        """
        ...

    def close(self) -> None:
        """Remove everything published."""
        ...


class Subscriber(Protocol):
    """Receives versions beside one inference engine."""

    async def receive(self, note: WeightsNote) -> WeightUpdate:
        """Fetch and check one version.

        Raises:
            WeightsError: if it is gone, damaged, or not the announced one.
        """
        ...

    def close(self) -> None:
        """Nothing more will be received; give back what is held."""
        ...


class Wire(Protocol):
    """The run's bus, as far as a weight transport may use it: subscribers ask, the publisher answers, in
    bytes of the transport's own. Used on the event loop only."""

    @property
    def address(self) -> str:
        """Of this end: what `ask` wants to be given of a publisher. A process started again has another."""
        ...

    @property
    def limit(self) -> int:
        """Bytes of the longest answer that travels in one message; a longer one travels in parts."""
        ...

    def answer(self, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Publisher's end: have `handler` answer every question, several at once, from now on. It may be
        asked the same again, where an answer was lost. A `StrettoError` that it raises goes to the asker."""
        ...

    async def ask(self, address: str, question: bytes, *, deadline_s: float) -> bytes:
        """Subscriber's end: put a question to a publisher, again and again until there is an answer.

        Raises:
            NoAnswer: after `deadline_s`.
            Refused: with the reason of the handler; or if the publisher there is another one by now.
        """
        ...


class WeightsTransport(Protocol):
    """Both ends of a transport."""

    def publisher(self, wire: Wire) -> Publisher:
        """The end beside a trainer."""
        ...

    def subscriber(self, wire: Wire) -> Subscriber:
        """The end beside an engine."""
        ...

    def clean(self) -> None:
        """Remove what publishers of this run left behind. Called in the kernel when none is running."""
        ...
