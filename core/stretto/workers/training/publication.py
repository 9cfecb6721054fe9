"""Publishes the lead model's versions from one rank while the next step runs. The compute thread scores the
canary and copies the weights before the next call changes them; another thread checks, writes and hashes the
copy. Tensors that training does not change are published once, after a load of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto.engine import PartlyFrozenEngine, TrainingEngine
from stretto.errors import WeightsError
from stretto.machine import clock
from stretto.models.digest import digest_of, tensor_hash
from stretto.models.finite import not_finite
from stretto.models.version_files import open_version
from stretto.weights import Canary, FreezingPublisher, Publisher, WeightsNote
from stretto.workers.context import ComputeThread
from stretto.workers.training.canary import Probe

if TYPE_CHECKING:
    from torch import Tensor

_MOST_COPIED = 2 * 2**30
"""Maximum bytes of weights that are copied: the size up to which transports by default keep files in memory.
A copy takes an eighth of the time of hashing and writing. With larger weights, the next call waits for it."""
_Taken = tuple[Canary | str, "list[tuple[str, Tensor]] | WeightsNote | None"]
"""The canary and a copy of the weights; or the note of weights that are too large to copy."""


class Publication:
    """Publishes the versions of one engine. `publisher` is None in the ranks that only take part in gathering
    the weights. Only the thread `writer` calls the publisher, except for weights that are not copied."""

    def __init__(
        self,
        engine: TrainingEngine,
        probe: Probe | str,
        publisher: Publisher | None,
        compute: ComputeThread,
        writer: ComputeThread,
    ) -> None:
        self._engine = engine
        self._probe = probe
        self._publisher = publisher
        self._compute = compute
        self._writer = writer
        self._frozen: list[tuple[str, Tensor]] = []
        """The frozen tensors, for a publisher that needs them with every version."""

    def begin(
        self, version: int, needed: Collection[int], *, loaded: bool = False
    ) -> Future[WeightsNote | None]:
        """Begin to publish the current weights. All ranks call it; the result is None without a publisher.
        The compute thread copies the weights before its later work. `needed` versions stay available.
        `loaded`: the engine has loaded its state since the last version, or this is the first version."""
        snapshot = self._compute.submit(self._take, version, needed, loaded=loaded)
        return self._writer.submit(self._publish, snapshot, version, needed)

    async def copy(self, versions: Iterable[int], folder: str) -> None:
        """Write published versions into a checkpoint."""
        if self._publisher is not None:
            for version in versions:
                await self._writer.run(self._publisher.copy, version, _folder_of(version, folder))

    async def publish_again(self, earlier: Iterable[WeightsNote], folder: str) -> tuple[WeightsNote, ...]:
        """Publish the versions that a checkpoint keeps for evaluations, and return their new notes."""
        notes: list[WeightsNote] = []
        if (publisher := self._publisher) is not None:
            if isinstance(publisher, FreezingPublisher):
                await self._writer.run(publisher.freeze, ())  # the files of a checkpoint have all tensors
            for note in earlier:
                update = await self._writer.run(open_version, note, _folder_of(note.version, folder))
                new_note = await self._writer.run(
                    publisher.publish,
                    note.version,
                    update.tensors().items(),
                    [each.version for each in notes],
                )
                notes.append(msgspec.structs.replace(new_note, canary=note.canary))
        return tuple(notes)

    def close(self) -> None:
        """Remove all versions, after the one under way is published. The process ends only after this."""
        if self._publisher is not None:
            self._writer.submit(self._publisher.close)

    def _take(self, version: int, needed: Collection[int], *, loaded: bool) -> _Taken:
        canary = self._probe.score(self._engine) if isinstance(self._probe, Probe) else self._probe
        weights = self._engine.weights()
        if isinstance(self._engine, PartlyFrozenEngine):
            weights = self._engine.trained_weights()
            if loaded:
                self._freeze(self._engine.frozen_weights(), version)
        if self._publisher is None:
            deque(weights, maxlen=0)  # all ranks take part in gathering the weights
            return canary, None
        copies: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            size += tensor.nbytes
            if size > _MOST_COPIED:
                rest = chain(self._frozen, _drain(copies), [(name, tensor)], weights)
                return canary, _timed(self._publisher, version, _finite(rest, version), needed)
            copies.append((name, tensor.clone()))
        return canary, copies

    def _freeze(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Publish the frozen tensors for all later versions. No step changes them, so they need no copy."""
        if self._publisher is None:
            deque(weights, maxlen=0)
        elif isinstance(self._publisher, FreezingPublisher):
            self._publisher.freeze(_finite(weights, version))
        else:
            self._frozen = [*weights]

    def _publish(self, taken: Future[_Taken], version: int, needed: Collection[int]) -> WeightsNote | None:
        canary, weights = taken.result()
        if self._publisher is None or weights is None:
            return None
        if isinstance(weights, list):
            all_weights = chain(self._frozen, weights)
            weights = _timed(self._publisher, version, _finite(all_weights, version), needed)
        return msgspec.structs.replace(weights, canary=canary)


class DigestPublisher:
    """The publisher of a run without inference engines: it computes the digest and writes no weights."""

    def __init__(self) -> None:
        self._frozen: list[tuple[str, str]] = []

    def freeze(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hash the tensors that all later versions share."""
        self._frozen = [(name, tensor_hash(tensor)) for name, tensor in tensors]

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Return a note without an address."""
        del needed
        hashes = [(name, tensor_hash(tensor)) for name, tensor in tensors]
        return WeightsNote(version, "", digest_of([*self._frozen, *hashes]))

    def copy(self, version: int, folder: Path) -> None:
        """Refuse: no version is kept."""
        raise WeightsError(f"version {version} has no inference engine, so it was not kept", version=version)

    def close(self) -> None:
        """Do nothing: there are no files to remove."""


def _timed(
    publisher: Publisher, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int]
) -> WeightsNote:
    began = clock.now()
    note = publisher.publish(version, tensors, needed)
    return msgspec.structs.replace(note, publish_s=round(clock.now() - began, 4))


def _folder_of(version: int, checkpoint: str) -> Path:
    return Path(checkpoint, "evaluation", f"v{version:08d}")


def _finite(weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if fault := not_finite(name, tensor):
            advice = ". A step was too large; start again from an older checkpoint with a lower training.lr"
            raise WeightsError(
                f"version {version} is not published: {fault}{advice if version else ''}", version=version
            )
        yield name, tensor


def _drain(copies: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the copies in order. Remove each from the list, so that its memory can be freed."""
    copies.reverse()
    while copies:
        yield copies.pop()
