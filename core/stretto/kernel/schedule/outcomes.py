"""Outcomes of tickets, as rollout workers write them to the log, checked before the ledger takes them in.

A group that no later step could use fails its ticket, and nothing else. The check uses the outcome and its
place in the log alone, so a resumed run decides as the previous kernel did.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import get_args

from stretto.bus.client import Bus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import FaultKind, GroupDone, GroupFailed, Member, attempt_name
from stretto.bus.messages.training import RowRef
from stretto.errors import printable
from stretto.reward import is_number

Outcome = GroupDone | GroupFailed

_LONGEST_REASON = 500
_MOST_SAMPLES = 2**20
_MOST = 2**40
"""No number of tokens or versions is as high. Sums of such numbers fit into messages."""
_MOST_METRICS = 200
"""The metrics of a sample may have this many names, each of at most `_LONGEST_NAME` characters."""
_LONGEST_NAME = 200


async def follow_outcomes(
    bus: Bus, names: Subjects, *, start: int, samples: bool
) -> AsyncIterator[tuple[int, Outcome]]:
    """Yield (sequence number, outcome) of every outcome in the log from `start` on, in order. It never ends.

    Args:
        samples: see `admit`.
    """
    async for sequence, outcome in bus.store.follow(names.log_stream, names.groups, Outcome, start=start):
        yield sequence, admit(outcome, sequence, samples=samples)


def admit(outcome: Outcome, sequence: int, *, samples: bool) -> Outcome:
    """Return an outcome that the ledger can take in: the failure of the attempt if its group is faulty, else
    the outcome. The reason of a failure is printable text of at most 500 characters.

    Args:
        sequence: sequence number of the outcome in the log.
        samples: whether the policy samples the sequences that the run trains. Otherwise the kernel wrote the
            groups of the training tickets, whose members name rows of the dataset.
    """
    if isinstance(outcome, GroupFailed):
        reason, filtered = outcome.reason, outcome.filtered
    elif fault := next(_faults(outcome, sequence, stored=samples or outcome.purpose == "eval"), ""):
        reason, filtered = f"{printable(outcome.worker)} wrote a faulty group: {fault}", False
    else:
        return outcome
    reason = printable(reason[:_LONGEST_REASON])
    return GroupFailed(outcome.purpose, outcome.ticket, outcome.attempt, outcome.worker, reason, filtered)


def refs_of(groups: Iterable[GroupDone]) -> tuple[RowRef, ...]:
    """Return the rows of groups, in order, as the trainers get them."""
    return tuple(
        RowRef(member.id, member.sequence, member.index, group.ticket, member.length)
        for group in groups
        for member in group.members
    )


def _faults(group: GroupDone, sequence: int, *, stored: bool) -> Iterator[str]:
    """Yield why a group cannot be trained or counted as an evaluation's result.

    Args:
        stored: whether a rollout worker wrote the group's data to the log.
    """
    if not group.members:
        yield "it has no member"
    for name in ("seconds", "generate_s", "score_s"):
        if not 0 <= getattr(group, name) < math.inf:
            yield f"{name} is {getattr(group, name)}; expected a number of seconds"
    name = attempt_name(group.purpose, group.ticket, group.attempt)
    for place, member in enumerate(group.members):
        id = f"{name}/{place}"
        if member.id != id:
            yield f"the id of member {place} is {printable(member.id)[:40]!r}; expected {id!r}"
        if not 0 <= member.index < len(group.members):
            yield f"member {place} has index {member.index} in its bundle of at most {len(group.members)}"
        if stored:
            yield from _sample_faults(group, member, sequence)
    for missing in group.missing:
        is_odd = len(missing.reason) > _LONGEST_REASON or printable(missing.reason) != missing.reason
        if is_odd or missing.kind not in get_args(FaultKind) or missing.tries < 1:
            yield f"a missing sample is {printable(str(missing))[:200]}"
    if len(group.missing) > _MOST_SAMPLES or not 0 <= group.retried <= _MOST_SAMPLES:
        yield f"{len(group.missing)} samples are missing, and {group.retried} were tried again"
    if len({(member.sequence, member.index) for member in group.members}) < len(group.members):
        yield "several members name the same trajectory"


def _sample_faults(group: GroupDone, member: Member, sequence: int) -> Iterator[str]:
    """Yield what is wrong with a member whose tokens the policy sampled."""
    # The data comes before the outcome. Those of an evaluation have the number 0.
    if not (0 if group.purpose == "eval" else 1) <= member.sequence < sequence:
        yield f"{member.id} lies at {member.sequence} of the log; its outcome lies at {sequence}"
    if not 0 < member.sampled <= member.length < _MOST:
        yield f"{member.id} has {member.length} tokens, {member.sampled} of them sampled"
    if not 0 <= member.oldest <= member.newest < _MOST:
        yield f"{member.id} has tokens of versions {member.oldest} to {member.newest}"
    if not is_number(member.reward):
        yield f"the reward of {member.id} is {member.reward}"
    if len(member.metrics) > _MOST_METRICS:
        yield f"{member.id} has {len(member.metrics)} metrics; expected at most {_MOST_METRICS}"
    for metric, value in member.metrics.items():
        if len(metric) > _LONGEST_NAME:
            yield f"a metric of {member.id} has a name of {len(metric)} characters, above {_LONGEST_NAME}"
        if not is_number(value):
            yield f"{printable(metric)[:40]!r} of {member.id} is {value}"
