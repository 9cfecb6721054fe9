"""Read what a run has kept of its training: batches in order and digests from the journal, and the data of
groups from the kept samples. Nothing is written to the run's folder."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages.tickets import WireTrajectory
from stretto.bus.messages.training import RowRef
from stretto.cli.audit.audit_records import read_journal
from stretto.cli.audit.kept_rows import has_its_digest, kept_groups, kept_rows
from stretto.component import NonNegativeInt
from stretto.engine import Digest
from stretto.errors import ConfigError, RunError
from stretto.records.events.history import RecordedBatch, RunHistory
from stretto.records.samples.images import SampleImages
from stretto.records.samples.kept_sample import arrays_in
from stretto.runs.replay import Attempt, RecordedGroup, StepWeights

_LEAST_WEIGHT = float(np.finfo(np.float32).tiny)
"""Replaces an importance weight that was rounded to 0, because 0 has no logarithm."""


def read_recording(folder: Path) -> RunHistory:
    """Return the history of a run that no kernel owns, with all batches from version 0 on."""
    journal = read_journal(folder)
    if journal.unreadable:
        raise RunError(f"{folder}: message {journal.unreadable[0]} of the journal is unreadable")
    versions = sorted(journal.history.batches)
    if not versions:
        raise ConfigError(f"the run in {folder} has trained no step: there is nothing to replay")
    if versions != list(range(versions[-1] + 1)):
        raise RunError(
            f"{folder}: the journal does not have all batches from version 0 to {versions[-1]}; a part of "
            "the run's store is lost (see summary.json)"
        )
    return journal.history


class KeptGroups:
    """The groups of a run, from its kept samples."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images = SampleImages(folder)

    def missing(self, batches: Sequence[RecordedBatch]) -> list[int]:
        """Return the versions of the batches whose data the run has not kept in full."""
        kept = {row["id"] for row in kept_rows(self._folder, "train", ("id",))}
        return [batch.version for batch in batches if any(row.id not in kept for row in batch.rows)]

    async def groups(self, rows: Mapping[Attempt, Sequence[RowRef]]) -> AsyncIterator[RecordedGroup]:
        """See `stretto.runs.replay.GroupSource`."""
        remaining = dict(rows)
        kept = groups_in_samples(self._folder, rows)
        while (group := await anyio.to_thread.run_sync(next, kept, None)) is not None:
            if remaining.pop((group.ticket, group.attempt), None) is not None:
                yield replace(group, images=self._added_images(group))
        if remaining:
            ticket, attempt = min(remaining)
            raise RunError(
                f"{self._folder}: the samples of ticket {ticket}, attempt {attempt} are not there any more, "
                "or they differ from their digest"
            )

    def _added_images(self, group: RecordedGroup) -> dict[str, bytes]:
        images: dict[str, bytes] = {}
        for name in sorted({name for trajectory in group.trajectories for name in trajectory.added_images}):
            file = self._images.read(name)
            if file is None:
                raise RunError(
                    f"{self._folder}: image {name} of ticket {group.ticket}, attempt {group.attempt} is not "
                    "in the kept samples"
                )
            images[name] = file
        return images


def groups_in_samples(folder: Path, rows: Mapping[Attempt, Sequence[RowRef]]) -> Iterator[RecordedGroup]:
    """Yield the groups that are complete in the kept samples and match their digest."""
    for group in kept_groups(folder, "train"):
        attempt = group[0]["ticket"], group[0]["attempt"]
        if len(group) == len(rows.get(attempt, ())) and has_its_digest(group):
            yield _group_of(attempt, group)


def _group_of(attempt: Attempt, rows: Sequence[Mapping[str, Any]]) -> RecordedGroup:
    first = rows[0]
    return RecordedGroup(
        *attempt,
        **{name: first[name] for name in ("row", "worker", "seconds", "generate_s", "score_s")},
        trajectories=tuple(map(_trajectory_of, rows)),
        images={},
    )


def _trajectory_of(row: Mapping[str, Any]) -> WireTrajectory:
    values: dict[str, Any] = {name: row[name] for name in ("id", "reward", "finish", "engine", "sample")}
    values |= {name: Array.of(array) for name, array in arrays_in(row).items()}
    metrics = msgspec.json.decode(row["metrics"], type=dict[str, float])
    return WireTrajectory(**values, metrics=metrics, images=_images_of(row["images"]))


def _images_of(text: str | None) -> tuple[str | int, ...] | None:
    return None if text is None else msgspec.json.decode(text, type=tuple[Digest | NonNegativeInt, ...])


@dataclass
class WeightSums:
    """Sums over the importance weights (current / behaviour) of the tokens that one step trained."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    kl: float = 0.0
    """Sum of the k3 estimates of KL(behaviour || current), in nats."""
    outside: int = 0
    """Number of weights outside 0.8 to 1.2."""
    sequences: list[float] = field(default_factory=list[float])
    """For each sequence the logarithm of the product of its weights."""

    def add(self, weights: NDArray[np.float32]) -> None:
        values = np.maximum(weights.astype(np.float64), _LEAST_WEIGHT)
        logs = np.log(values)
        self.tokens += len(values)
        self.total += float(values.sum())
        self.squares += float((values**2).sum())
        self.kl += float((values - 1 - logs).sum())
        self.outside += int(((values < 0.8) | (values > 1.2)).sum())
        self.sequences.append(float(logs.sum()))


def kept_weights(folder: Path) -> Iterator[StepWeights]:
    """Yield the importance weights that a run has kept."""
    for row in kept_rows(folder, "train", ("id", "step", "importance_weights")):
        if row["importance_weights"] is not None:
            yield row["step"], row["id"], row["importance_weights"]


def sums_of(weights: Iterable[StepWeights], batches: Iterable[RecordedBatch]) -> dict[int, WeightSums]:
    """Return the sums over the importance weights of batches, by step. A trajectory counts once."""
    steps: dict[int, WeightSums] = {}
    remaining = {(batch.version + 1, row.id) for batch in batches for row in batch.rows}
    for step, id, values in weights:
        if (step, id) in remaining and len(values):
            remaining.remove((step, id))
            steps.setdefault(step, WeightSums()).add(values)
    return steps
