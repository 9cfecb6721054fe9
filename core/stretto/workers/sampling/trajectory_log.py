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
    return [
        WireTrajectory(
            id=f"{ticket.name}/{index}",
            tokens=Array.of(each.tokens, np.int32),
            loss_mask=Array.of(each.loss_mask, np.bool_),
            logprobs=Array.of(each.logprobs, np.float32),
            versions=Array.of(each.versions, np.int32),
            reward=each.score.reward,
            metrics=dict(each.score.metrics),
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
