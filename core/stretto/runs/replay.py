"""Train the recorded steps of a run again in a new folder, with trainers only; nothing is generated.

The store of a replay is filled with the trajectories of the recorded batches. Steps with the same values and
numbers of processes form a segment. One kernel trains a segment's batches, writes their digests into its
journal, and writes a checkpoint with which the next kernel begins. The caller compares the digests.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import structlog
import yaml
from numpy.typing import NDArray

from stretto.assembly.assembly import Assembly
from stretto.assembly.logs import log_to
from stretto.bus.client import Bus
from stretto.bus.messages import tickets
from stretto.bus.messages.training import RowRef
from stretto.bus.server import lock_run
from stretto.errors import leaves
from stretto.kernel.durable.changes import write_values
from stretto.kernel.durable.checkpoint import KernelState, checkpoint_name, newest_intact, writing
from stretto.kernel.durable.recovery import Replay
from stretto.kernel.ending import Interruptions
from stretto.kernel.fleet.forks import fork_server
from stretto.kernel.schedule.tickets import dataset_group
from stretto.kernel.setup import RunSetup
from stretto.machine.private_file import write_private
from stretto.records.events.history import RecordedBatch
from stretto.runs.life import live, served
from stretto.workers.sampling.trajectory_log import append_bundles, members_of

log = structlog.get_logger()

Attempt = tuple[int, int]
"""(ticket, attempt) of a training ticket."""
StepWeights = tuple[int, str, NDArray[np.float32]]
"""Number of a step, id of a trajectory, and the importance weights of its sampled tokens in the step."""


@dataclass(frozen=True)
class RecordedGroup:
    """The data of one trained group."""

    ticket: int
    attempt: int
    row: int
    """Index in the dataset."""
    worker: str
    seconds: float
    generate_s: float
    score_s: float
    trajectories: tuple[tickets.WireTrajectory, ...]
    """In the order of the group's members."""
    images: Mapping[str, bytes]
    """SHA-256 -> file, of the images that the workflow added."""


GroupSource = Callable[[Mapping[Attempt, Sequence[RowRef]]], AsyncIterator[RecordedGroup]]
"""Yields the groups of these attempts, in any order, from where a run has kept them."""


@dataclass(frozen=True)
class ReplaySegment:
    """Consecutive recorded steps that one kernel trains again."""

    assembly: Assembly
    batches: tuple[RecordedBatch, ...]
    """At least one batch, as in the recorded journal."""
    draws: Mapping[int, int]
    """Ticket -> row of the dataset, of the tickets that a curriculum drew."""


def attempt_of(row: RowRef) -> Attempt:
    """Return the attempt that a row of a batch comes from."""
    return row.group, row.attempt


def rows_of(batches: Iterable[RecordedBatch]) -> dict[Attempt, list[RowRef]]:
    """Return the rows of batches, by the attempts that they come from."""
    rows: dict[Attempt, list[RowRef]] = {}
    for batch in batches:
        for row in batch.rows:
            rows.setdefault(attempt_of(row), []).append(row)
    return rows


def train_again(
    folder: Path,
    segments: Sequence[ReplaySegment],
    start: tuple[Path, KernelState] | None,
    source: GroupSource,
) -> tuple[dict[str, Any], list[StepWeights]]:
    """Train the segments' batches in a new folder, from the checkpoint `start` or from the initial models.
    Return the last kernel's summary, and all importance weights, or none if a kernel did not complete."""
    with lock_run(folder / "bus"):
        for number, segment in enumerate(segments[:-1], 1):
            text = yaml.safe_dump(dict(segment.assembly.composed.document), sort_keys=False)
            write_private(folder / f"config-{number}.yaml", text.encode())
        write_values(folder, segments[-1].assembly.composed)
        summary: dict[str, Any] = {}
        setup: RunSetup | None = None
        with Interruptions() as interruptions:
            for number, segment in enumerate(segments, 1):
                checkpoint: tuple[Path | None, KernelState] = (None, KernelState.initial())
                if start is not None:
                    checkpoint = anyio.run(_begin_at, *start, folder / "checkpoints", number)
                with fork_server(segment.assembly) as forks:
                    replay = Replay()
                    setup = RunSetup(
                        segment.assembly, resumed=checkpoint, forks=forks, values=number, replays=replay
                    )
                    _fill_store(setup, segment, source, replay)
                    summary = live(setup, interruptions, accept_dataset=setup.graph.samples)
                if summary["status"] != "completed":
                    return summary, []
                start = newest_intact(folder / "checkpoints")
                assert start is not None, "a completed kernel has written a checkpoint"
        assert setup is not None, "a replay has a segment"
        return summary, anyio.run(_weights, setup)


async def _begin_at(source: Path, state: KernelState, root: Path, values: int) -> tuple[Path, KernelState]:
    """Copy a checkpoint for the beginning of a segment, without the checkpoint's open tickets."""
    clean = msgspec.structs.replace(
        KernelState.initial(),
        version=state.version,
        digest=state.digest,
        layout=state.layout,
        seed=state.seed,
        values=values,
    )
    clean.snapshot.version = state.version
    name = checkpoint_name(state.version)
    async with writing(root, name, clean) as draft:
        ignored = shutil.ignore_patterns("kernel.json", "manifest.json", "evaluation")
        await anyio.to_thread.run_sync(
            lambda: shutil.copytree(source, draft.folder, ignore=ignored, dirs_exist_ok=True)
        )
    return root / name, clean


def _fill_store(setup: RunSetup, segment: ReplaySegment, source: GroupSource, replay: Replay) -> None:
    """Write a segment's groups to the log, and put the segment's batches into `replay`."""
    log_to(setup.logs / "kernel.jsonl", console=not sys.stderr.isatty(), run=setup.run, role="kernel")
    try:
        anyio.run(_fill, setup, segment, source, replay)
    except BaseExceptionGroup as error:
        raise leaves(error)[0] from error


async def _fill(setup: RunSetup, segment: ReplaySegment, source: GroupSource, replay: Replay) -> None:
    names = setup.names
    rows = rows_of(segment.batches)
    groups: dict[int, tickets.GroupDone] = {}
    replay.draws = dict(segment.draws)
    async with served(setup) as bus:
        await bus.store.make_log(names.log_stream, names.of_log)
        if setup.graph.samples:
            async for group in source(rows):
                groups[group.ticket] = await _append_group(bus, setup, group)
                replay.draws[group.ticket] = group.row
        else:
            for group in _dataset_groups(segment.batches):
                groups[group.ticket] = group
                replay.draws[group.ticket] = group.members[0].sequence
    replay.batches = [
        (batch.tickets, [groups[ticket] for ticket in batch.tickets]) for batch in segment.batches
    ]
    log.info("store filled", groups=len(rows), batches=len(segment.batches))


async def _weights(setup: RunSetup) -> list[StepWeights]:
    """Read the importance weights that trainers wrote to the log: a replay keeps no samples."""
    names, weights = setup.names, list[StepWeights]()
    async with served(setup) as bus:
        if last := await bus.store.last_sequence(names.log_stream, names.trained):
            messages = bus.store.follow(names.log_stream, names.trained, tickets.TrainedRows, start=1)
            async for sequence, message in messages:
                for row in message.rows:
                    weights.append((message.version + 1, row.id, row.importance_weights.numpy().ravel()))
                if sequence >= last:
                    break
    return weights


async def _append_group(bus: Bus, setup: RunSetup, group: RecordedGroup) -> tickets.GroupDone:
    names, samples = setup.names, setup.graph.source.samples
    ticket = tickets.Ticket(group.ticket, group.attempt, "train", group.row, min_version=0, samples=samples)
    bundles = await append_bundles(bus.store, names.trajectories, ticket, group.trajectories)
    images = [
        await bus.store.append(names.image(digest), tickets.StoredImage(file), id=f"{ticket.name}/{digest}")
        for digest, file in group.images.items()
    ]
    done = tickets.GroupDone(
        "train",
        group.ticket,
        group.attempt,
        group.worker,
        tuple(members_of(bundles)),
        group.seconds,
        group.generate_s,
        group.score_s,
        images=tuple(images),
    )
    await bus.store.append(names.groups, done, id=f"{ticket.name}/end")
    return done


def _dataset_groups(batches: Iterable[RecordedBatch]) -> Iterator[tickets.GroupDone]:
    for batch in batches:
        for id in batch.tickets:
            refs = [row for row in batch.rows if row.group == id]
            attempt, row = refs[0].attempt, refs[0].sequence
            yield dataset_group(tickets.Ticket(id, attempt, "train", row, batch.version, len(refs)))
