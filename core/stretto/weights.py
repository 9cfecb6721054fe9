"""The contract of weight transports: a publisher beside the trainer, a subscriber beside each engine.

A publisher never waits for a subscriber. Versions are announced by the kernel; a subscriber that is
late asks for the newest one only, and old ones may be gone by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Publisher",
    "Subscriber",
    "WeightUpdate",
    "WeightsConfig",
    "WeightsNote",
    "WeightsTransport",
    "digest_of",
    "tensor_hash",
]


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every weight transport's section."""

    use: str = "file"
    """Name of the weight transport."""


class WeightsNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The announcement of one version, small enough for any message."""

    version: int
    address: str
    """Where it lies, in the transport's own words."""
    digest: str
    """`digest_of` its tensors."""


class WeightUpdate(Protocol):
    """One version, ready to be loaded: on this machine, complete and checked against its digest."""

    @property
    def note(self) -> WeightsNote:
        """What was announced of it."""
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

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightsNote:
        """Make a version available, complete or not at all. Returns without waiting for readers.

        Raises:
            WeightsError: if it cannot be written, saying why.
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
        """Nothing more will be received."""
        ...


class WeightsTransport(Protocol):
    """Both ends of a transport."""

    def publisher(self) -> Publisher:
        """The end beside a trainer."""
        ...

    def subscriber(self) -> Subscriber:
        """The end beside an engine."""
        ...

    def clean(self) -> None:
        """Remove what publishers of this run left behind. Called in the kernel when none is running."""
        ...


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 in hex of a CPU tensor's little-endian bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def digest_of(hashes: Iterable[tuple[str, str]]) -> str:
    """Digest of a set of weights from (tensor name, SHA-256 hex of its little-endian bytes), in any order."""
    whole = hashlib.sha256()
    for name, tensor_hash in sorted(hashes):
        whole.update(f"{name} {tensor_hash}\n".encode())
    return whole.hexdigest()
