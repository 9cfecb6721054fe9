"""Trajectories in the form that the log stores, and in the form that the kernel sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.array import Array
from stretto.bus.messages.tickets import Member, Ticket, WireTrajectory
from stretto.errors import EngineError, RewardError
from stretto.reward import is_number
from stretto.workflow import Trajectory, sample_numbers


def wire_trajectories(
    ticket: Ticket, trajectories: Sequence[Trajectory], images_of_row: Sequence[str] = ()
) -> list[WireTrajectory]:
    """Return the trajectories of a ticket as messages, in their order."""
    pairs = zip(sample_numbers(trajectories), trajectories, strict=True)
    return [
        _wire(ticket, index, trajectory, sample, list(images_of_row))
        for index, (sample, trajectory) in enumerate(pairs)
    ]


def _wire(
    ticket: Ticket, index: int, trajectory: Trajectory, sample: int, of_row: list[str]
) -> WireTrajectory:
    images = trajectory.images
    return WireTrajectory(
        id=f"{ticket.name}/{index}",
        tokens=Array.of(trajectory.tokens, np.int32),
        loss_mask=Array.of(trajectory.loss_mask, np.bool_),
        logprobs=Array.of(trajectory.logprobs, np.float32),
        versions=Array.of(trajectory.versions, np.int32),
        reward=trajectory.score.reward,
        metrics=dict(trajectory.score.metrics),
        finish=trajectory.finish,
        engine=trajectory.engine,
        sample=sample,
        images=None
        if images is None or list(images) == of_row
        else tuple(of_row.index(name) if name in of_row else name for name in images),
        kept_counts=None if trajectory.kept is None else Array.of(trajectory.kept.counts, np.uint16),
        kept_ids=None if trajectory.kept is None else Array.of(trajectory.kept.ids, np.int32),
    )


def expect_kept_tokens(trajectories: Sequence[Trajectory]) -> None:
    """Check that each trajectory says from which tokens the sampled ones were drawn."""
    for number, each in enumerate(trajectories):
        if each.kept is None:
            raise EngineError(
                f"trajectory {number} has no kept tokens, and the run samples with top_p, top_k or min_p: "
                "make it with `Trajectory.of` or a conversation's `trajectories`, or give it `Answer.kept`"
            )
        if fault := each.kept.fault(each.tokens, each.loss_mask):
            raise EngineError(
                f"the kept tokens of trajectory {number} do not fit it: {fault}; use "
                "Trajectory.of, or a conversation's `trajectories`"
            )


def member_of(trajectory: Trajectory, id: str, sequence: int, index: int) -> Member:
    """Return the figures of a trajectory that the kernel sees."""
    if not all(map(is_number, (trajectory.score.reward, *trajectory.score.metrics.values()))):
        raise RewardError(f"the score is not finite: {trajectory.score}")
    versions = trajectory.versions[trajectory.loss_mask]
    if not len(versions):
        raise EngineError("a trajectory without a sampled token")
    return Member(
        id=id,
        sequence=sequence,
        index=index,
        length=len(trajectory.tokens),
        sampled=len(versions),
        oldest=int(versions.min()),
        newest=int(versions.max()),
        reward=trajectory.score.reward,
        metrics=dict(trajectory.score.metrics),
        finish=trajectory.finish,
        part=trajectory.part,
        kept=0 if trajectory.kept is None else len(trajectory.kept.ids),
    )
