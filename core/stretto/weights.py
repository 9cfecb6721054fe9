"""The contract of weight transports: a publisher beside the trainer, a subscriber beside each engine.

A publisher never waits for a subscriber. The kernel announces versions. A subscriber that is late asks for
the newest version only; older versions may be gone by then, except those that evaluations need.
`stretto.models.version_files` reads and writes versions in a folder.

The inference worker, not the transport, compares the weights that its engine serves with the announced ones,
tensor by tensor, before a sample leaves the worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

import msgspec

from stretto.array import Array

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Canary",
    "FreezingPublisher",
    "KeptVersions",
    "Publisher",
    "Subscriber",
    "WeightUpdate",
    "WeightsConfig",
    "WeightsNote",
    "WeightsTransport",
    "Wire",
]


KeptVersions = Annotated[int, msgspec.Meta(ge=2)]
"""Number of newest versions that a weight transport keeps. A trainer publishes a version before the kernel
announces it, so one version would not be enough: an engine that starts meanwhile reads the previous one."""


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every weight transport's section."""

    use: str = "file"
    """Name of the weight transport."""


class Canary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The trainer's logprobs of fixed texts, with which engines are compared."""

    texts: tuple[Array, ...]
    """(L,) int32 token ids of each text, L >= 2."""
    logprobs: tuple[Array, ...]
    """(C,) float32 for each text, the logprobs of its last C tokens, at temperature 1; C < L. Without an
    image, C is L - 1."""
    image: bytes = b""
    """For models that read images: the file of the one image that every text has before those tokens."""


class WeightsNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The announcement of one version, small enough for any message."""

    version: int
    address: str
    """Where the version is stored, in the transport's own format."""
    digest: str
    """`digest_of` the tensors of the version."""
    canary: Canary | str = ""
    """Added by the trainer: the canary under this version, or a text that says why there is none; empty when
    the run uses no canary."""
    fetched_bytes: int = 0
    """Bytes that an engine with the previous version fetches; 0 if not known."""
    publish_s: float = 0.0
    """Added by the trainer: seconds in which the transport stored and hashed the version."""


class WeightUpdate(Protocol):
    """One version that is ready to load: on this machine, complete, and checked against its digest."""

    @property
    def note(self) -> WeightsNote:
        """The announcement of this version."""
        ...

    def hashes(self) -> Mapping[str, str]:
        """Return tensor name -> hash of the published tensor, see `stretto.models.digest`. `digest_of` these
        hashes is the digest of the note."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder with the tensors as safetensors files, for engines that load from disk."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by Hugging Face name, memory-mapped when that is possible. They are read-only,
        and valid until `close`."""
        ...

    def close(self) -> None:
        """Free the tensors. The caller must not use them afterwards."""
        ...


class Publisher(Protocol):
    """Publishes the versions of one model. Lives in rank 0 of the model's worker group. Its methods run in
    threads, one after the other."""

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Make a version available, completely or not at all. Return without waiting for readers.

        Args:
            needed: published versions that must stay available, besides the newest.

        Raises:
            WeightsError: if the version cannot be written; the message says why.
        """
        ...

    def copy(self, version: int, folder: Path) -> None:
        """Write an available version into a new folder, in the form that
        `stretto.models.version_files.open_version` reads.

        Raises:
            WeightsError: if the version is not available.
            OSError: if the folder cannot be written.
        """
        ...

    def close(self) -> None:
        """Remove all published versions."""
        ...


@runtime_checkable
class FreezingPublisher(Publisher, Protocol):
    """A publisher that receives frozen tensors, which training does not change, once for many versions. Other
    publishers receive frozen tensors with every version."""

    def freeze(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Make these tensors a part of every version that is published from now on, besides the tensors that
        `publish` gets. They replace those of an earlier call.

        Raises:
            WeightsError: if they cannot be written.
        """
        ...


class Subscriber(Protocol):
    """Receives versions beside one inference engine."""

    async def receive(self, note: WeightsNote) -> WeightUpdate:
        """Fetch and check one version.

        Raises:
            WeightsError: if the version is gone, damaged, or not the announced one.
        """
        ...

    def close(self) -> None:
        """Free all resources. The caller receives no version afterwards."""
        ...


class Wire(Protocol):
    """The part of the run's bus that a weight transport may use: subscribers send questions and the publisher
    answers. The transport chooses the format of the bytes. Use it on the event loop only."""

    @property
    def address(self) -> str:
        """The address of this end. A subscriber passes the publisher's address to `ask`. A restarted process
        has a new address."""
        ...

    @property
    def limit(self) -> int:
        """Size in bytes of the largest answer that fits into one message. Larger answers are sent in
        parts."""
        ...

    def answer(self, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Publisher: from now on, answer every question with `handler`. Several calls of `handler` may run at
        once, and a question may come again when its answer was lost. A `StrettoError` that `handler` raises
        goes to the subscriber."""
        ...

    async def ask(self, address: str, question: bytes, *, deadline_s: float) -> bytes:
        """Subscriber: send a question to a publisher, and repeat it until an answer comes.

        Raises:
            NoAnswer: if no answer comes within `deadline_s` seconds.
            Refused: if the handler raised, with its reason; or if another publisher has replaced this one.
        """
        ...


class WeightsTransport(Protocol):
    """Both ends of a transport."""

    def publisher(self, wire: Wire) -> Publisher:
        """Return the end beside a trainer."""
        ...

    def subscriber(self, wire: Wire) -> Subscriber:
        """Return the end beside an engine."""
        ...

    def clean(self) -> None:
        """Remove the files that publishers of this run left behind. The kernel calls it when no publisher
        runs."""
        ...
