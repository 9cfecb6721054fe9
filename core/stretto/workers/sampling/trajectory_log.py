"""Trajectories in the form that the log stores, and in the form that the kernel sees."""

from collections.abc import Iterable, Sequence

import numpy as np

from stretto.array import Array
from stretto.bus.messages.tickets import Member, Ticket, TrajectoryBundle, WireTrajectory, bundles_of
from stretto.bus.store import Store
from stretto.errors import EngineError, RewardError
from stretto.reward import is_number, plain_number
from stretto.workflow import Score, Trajectory, sample_numbers

StoredBundle = tuple[int, Sequence[WireTrajectory]]
"""Sequence number in the log, and trajectories, of a `TrajectoryBundle`."""


def wire_trajectories(
    ticket: Ticket, trajectories: Sequence[Trajectory], images_of_row: Sequence[str] = ()
) -> list[WireTrajectory]:
    """Return the trajectories of a ticket as messages, in their order."""
    return [
        WireTrajectory(
            id=f"{ticket.name}/{index}",
            tokens=Array.of(each.tokens, np.int32),
            loss_mask=Array.of(each.loss_mask, np.bool_),
            logprobs=Array.of(each.logprobs, np.float32),
            versions=Array.of(each.versions, np.int32),
            reward=plain_number(each.score.reward, "the reward"),
            metrics={k: plain_number(v, f"the metric {k!r}") for k, v in each.score.metrics.items()},
            finish=each.finish,
            engine=each.engine,
            sample=sample,
            images=_wire_images(each.images, list(images_of_row)),
            kept_counts=None if each.kept is None else Array.of(each.kept.counts, np.uint16),
            kept_ids=None if each.kept is None else Array.of(each.kept.ids, np.int32),
        )
        for index, (sample, each) in enumerate(zip(sample_numbers(trajectories), trajectories, strict=True))
    ]


def _wire_images(images: Sequence[str] | None, of_row: list[str]) -> tuple[str | int, ...] | None:
    if images is None or list(images) == of_row:
        return None
    return tuple(of_row.index(name) if name in of_row else name for name in images)


def expect_kept_tokens(trajectories: Sequence[Trajectory]) -> None:
    """Check that each trajectory contains the kept tokens from which its tokens were drawn."""
    for number, trajectory in enumerate(trajectories):
        if trajectory.kept is None:
            raise EngineError(
                f"trajectory {number} has no kept tokens, and the run samples with top_p, top_k or min_p: "
                "make it with `Trajectory.of` or a conversation's `trajectories`, or give it `Answer.kept`"
            )
        if fault := trajectory.kept.fault(trajectory.tokens, trajectory.loss_mask):
            raise EngineError(
                f"the kept tokens of trajectory {number} do not fit it: {fault}; use "
                "Trajectory.of, or a conversation's `trajectories`"
            )


async def append_bundles(
    store: Store, subject: str, ticket: Ticket, trajectories: Sequence[WireTrajectory]
) -> list[StoredBundle]:
    """Write the trajectories of a ticket to the log, in a few messages."""
    stored: list[StoredBundle] = []
    for number, bundle in enumerate(bundles_of(trajectories)):
        message = TrajectoryBundle(ticket.id, ticket.attempt, ticket.row, tuple(bundle))
        id = f"{ticket.name}/{subject.rpartition('.')[2]}/{number}"
        stored.append((await store.append(subject, message, id=id), bundle))
    return stored


def members_of(bundles: Iterable[StoredBundle]) -> list[Member]:
    """Return the figures that the kernel sees of the trajectories of a ticket, in their order."""
    members: list[Member] = []
    last_sample = -1
    for sequence, bundle in bundles:
        for index, trajectory in enumerate(bundle):
            members.append(_member_of(trajectory, sequence, index, part=trajectory.sample == last_sample))
            last_sample = trajectory.sample
    return members


def _member_of(trajectory: WireTrajectory, sequence: int, index: int, *, part: bool) -> Member:
    if not all(map(is_number, (trajectory.reward, *trajectory.metrics.values()))):
        score = Score(trajectory.reward, trajectory.metrics)
        raise RewardError(f"the score is not finite: {score}")
    versions = trajectory.versions.numpy()[trajectory.loss_mask.numpy()]
    if not len(versions):
        raise EngineError("a trajectory without a sampled token")
    return Member(
        id=trajectory.id,
        sequence=sequence,
        index=index,
        length=len(trajectory.tokens),
        sampled=len(versions),
        oldest=int(versions.min()),
        newest=int(versions.max()),
        reward=trajectory.reward,
        metrics=trajectory.metrics,
        finish=trajectory.finish,
        part=part,
        kept=0 if trajectory.kept_ids is None else len(trajectory.kept_ids),
    )
