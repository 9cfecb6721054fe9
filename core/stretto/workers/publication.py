"""Publishes the lead model's versions from one rank, beside the calls of the next step.

The compute thread scores the canary and copies the weights, before the next call changes them. Another thread
then checks, writes and hashes the copy. Weights above `_MOST_COPIED` are not copied: the compute thread
publishes them itself, and the next call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto import tracing
from stretto.engine import TrainingEngine
from stretto.errors import WeightsError
from stretto.models.digest import digest_of, tensor_hash
from stretto.models.finite import not_finite
from stretto.models.version_files import open_version
from stretto.weights import Canary, Publisher, WeightsNote
from stretto.workers.canary import Probe
from stretto.workers.context import ComputeThread

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DigestPublisher", "Publication"]

_MOST_COPIED = 2 * 2**30
"""Largest weights that are copied, in bytes: no more than the file that a transport holds in memory by
default. A copy takes about an eighth of the time of hashing and writing."""


class Publication:
    """Publishes the versions of one engine.

    Args:
        probe: the canary's text, or why there is none.
        publisher: None in the ranks that only take part in gathering the weights.
        compute: the thread in which the engine computes.
    """

    def __init__(
        self, engine: TrainingEngine, probe: Probe | str, publisher: Publisher | None, compute: ComputeThread
    ) -> None:
        self._engine = engine
        self._probe = probe
        self._publisher = publisher
        self._compute = compute
        self._writer = ComputeThread("publish")
        """Only this thread calls the publisher, except for weights that are not copied."""

    def begin(self, version: int, needed: Collection[int], traceparent: str) -> Future[WeightsNote | None]:
        """Begin to publish the engine's present weights as a version. All ranks of the group call it; the
        result of ranks without a publisher is None. What the compute thread is asked for afterwards waits for
        its part of the work.

        Args:
            needed: published versions that must stay available.

        Raises (from the result):
            WeightsError: if a weight is not finite, or if the version cannot be written.
        """
        taken = self._compute.submit(self._take, version, needed, traceparent)
        return self._writer.submit(self._publish, taken, version, needed, traceparent)

    async def copy(self, versions: Iterable[int], folder: str) -> None:
        """Write published versions into a checkpoint. Do nothing in ranks without a publisher."""
        if self._publisher is not None:
            for version in versions:
                await self._writer.run(self._publisher.copy, version, _folder_of(version, folder))

    async def again(self, earlier: Iterable[WeightsNote], folder: str) -> tuple[WeightsNote, ...]:
        """Publish the versions that a checkpoint keeps for evaluations, and return their new notes."""
        notes: list[WeightsNote] = []
        if (publisher := self._publisher) is not None:
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
        """Remove all published versions, after the one under way: the process waits for this thread."""
        if self._publisher is not None:
            self._writer.submit(self._publisher.close)

    def _take(
        self, version: int, needed: Collection[int], traceparent: str
    ) -> tuple[Canary | str, list[tuple[str, Tensor]] | WeightsNote | None]:
        """Return the canary and a copy of the weights; or the note of weights that are too large to copy.
        Ranks without a publisher only take part."""
        with tracing.span("canary", traceparent):
            canary = self._probe.score(self._engine) if isinstance(self._probe, Probe) else self._probe
        if self._publisher is None:
            _exhaust(self._engine.weights)
            return canary, None
        with tracing.span("copy weights", traceparent):
            copies: list[tuple[str, Tensor]] = []
            size, weights = 0, self._engine.weights()
            for name, tensor in weights:
                size += tensor.nbytes
                if size > _MOST_COPIED:
                    rest = chain(_drain(copies), [(name, tensor)], weights)
                    return canary, self._publisher.publish(version, _finite(rest, version), needed)
                copies.append((name, tensor.clone()))
        return canary, copies

    def _publish(
        self,
        taken: Future[tuple[Canary | str, list[tuple[str, Tensor]] | WeightsNote | None]],
        version: int,
        needed: Collection[int],
        traceparent: str,
    ) -> WeightsNote | None:
        canary, weights = taken.result()
        if self._publisher is None or weights is None:
            return None
        if isinstance(weights, list):
            with tracing.span("publish", traceparent, version=version):
                weights = self._publisher.publish(version, _finite(weights, version), needed)
        return msgspec.structs.replace(weights, canary=canary)


class DigestPublisher:
    """The publisher of a run without inference engines: it computes the digest and writes no weights."""

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], needed: Collection[int] = ()
    ) -> WeightsNote:
        """Return a note without an address."""
        del needed
        hashes = [(name, tensor_hash(tensor)) for name, tensor in tensors]
        return WeightsNote(version, "", digest_of(hashes))

    def copy(self, version: int, folder: Path) -> None:
        """Refuse: no version is kept.

        Raises:
            WeightsError: always.
        """
        raise WeightsError(f"version {version} has no inference engine, so it was not kept", version=version)

    def close(self) -> None:
        """Do nothing: there are no files to remove."""


def _folder_of(version: int, checkpoint: str) -> Path:
    """Return the folder in a checkpoint that has the weights of an older version, for its evaluation."""
    return Path(checkpoint, "evaluation", f"v{version:08d}")


def _finite(weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a version.

    Raises:
        WeightsError: at the first tensor with a NaN or an infinite value.
    """
    for name, tensor in weights:
        if fault := not_finite(name, tensor):
            reason = f"version {version} is not published: {fault}"
            if version:
                reason += (
                    ". A step was too large; start again from an older checkpoint with a lower training.lr"
                )
            raise WeightsError(reason, version=version)
        yield name, tensor


def _drain(copies: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the copies in order, and keep none of those that were yielded."""
    copies.reverse()
    while copies:
        yield copies.pop()


def _exhaust(weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
    for _ in weights():
        pass
