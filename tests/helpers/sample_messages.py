"""Messages of small groups, as rollout workers, trainers and the kernel send them to the log."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.array import Array
from stretto.bus.messages import tickets
from stretto.records.samples.kept_sample import digest_of, kept_samples


def name_of(ticket: int, attempt: int, purpose: tickets.Purpose) -> str:
    return f"{'' if purpose == 'train' else 'eval-'}{ticket}/{attempt}"


def trajectories(
    ticket: int,
    attempt: int = 1,
    purpose: tickets.Purpose = "train",
    *,
    version: int = 0,
    reward: float = 1.0,
    images: tuple[int | str, ...] | None = None,
    lengths: tuple[int, int] = (2, 2),
) -> tickets.TrajectoryBundle:
    """Two trajectories with two tokens of a prompt and `lengths` sampled ones."""
    return tickets.TrajectoryBundle(
        ticket,
        attempt,
        5,
        tuple(
            tickets.WireTrajectory(
                id=f"{name_of(ticket, attempt, purpose)}/{index}",
                tokens=Array.of([1, 2, *range(3, 3 + length)], np.int32),
                loss_mask=Array.of([False, False] + [True] * length, np.bool_),
                logprobs=Array.of([0, 0, *((-0.5, -0.25) * length)[:length]], np.float32),
                versions=Array.of([-1, -1] + [version] * length, np.int32),
                reward=reward,
                metrics={"accuracy": reward},
                finish="stop",
                engine="inference-0",
                sample=index,
                images=images,
            )
            for index, length in enumerate(lengths)
        ),
    )


def record(
    ticket: int, attempt: int = 1, purpose: tickets.Purpose = "train", row: int = 5
) -> tickets.TicketRecord:
    chat, data = '[{"role":"user","content":"1+1="}]', '{"prompt":"1+1=","answer":"2"}'
    texts = tuple(tickets.KeptText(None, f"answer {index} of {ticket}", chat) for index in (0, 1))
    return tickets.TicketRecord(
        *(purpose, ticket, attempt, row, "rollout-0", data, "1+1=", texts, 1.5, 1.0, 0.25),
        source="even" if ticket % 2 == 0 else "odd",
        variant="short" if ticket % 3 == 0 else "",
    )


def done(
    bundle: tickets.TrajectoryBundle, kept: tickets.TicketRecord, sequence: int = 1
) -> tickets.GroupDone:
    """The outcome of a group whose bundle lies at `sequence` of the log."""
    members = tuple(
        tickets.Member(each.id, sequence, index, 4, 2, 0, 0, each.reward, dict(each.metrics), "stop")
        for index, each in enumerate(bundle.trajectories)
    )
    digest = digest_of(kept_samples(kept, bundle.trajectories))
    ids = kept.purpose, kept.ticket, kept.attempt, kept.worker
    return tickets.GroupDone(*ids, members, 1.5, record=sequence + 1, digest=digest)


def failed(ticket: int, reason: str, attempt: int = 1) -> tickets.GroupFailed:
    return tickets.GroupFailed("train", ticket, attempt, "rollout-0", reason, record=1)


def trained(
    ids: Sequence[str], version: int, advantages: Sequence[float] = (0.5,), weights: Sequence[float] = (1, 1)
) -> tickets.TrainedRows:
    arrays: Any = (Array.of(advantages, np.float32), Array.of(weights, np.float32))
    return tickets.TrainedRows(0, version, tuple(tickets.TrainedRow(id, *arrays) for id in ids))


def retired(ticket: int, account: str, reason: str) -> tickets.RetiredTickets:
    return tickets.RetiredTickets(((ticket, account, reason),))
