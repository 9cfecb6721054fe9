"""Outcomes of tickets, read from the log and checked before the ledger takes them in. A faulty group fails
only its ticket. The check uses only the outcome and the outcome's sequence number in the log, so that a
resumed run decides as the previous kernel did."""

import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import get_args

from stretto.bus.client import Bus
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, attempt_name
from stretto.bus.messages.training import RowRef
from stretto.errors import printable
from stretto.reward import is_number
from stretto.user_code.faults import FaultKind

Outcome = GroupDone | GroupFailed

_LONGEST_REASON = 500
_VARIES = re.compile(r"""'[^']*'|"[^"]*"|\d+""")
"""Parts of a reason that differ from row to row: quoted text and numbers."""
_MOST_SAMPLES = 2**20
_MOST = 2**40
"""Upper limit of valid numbers of tokens and versions. Sums of valid numbers fit into messages."""
_MOST_METRICS = 200
"""The metrics of a sample may have this many names, each of at most `_LONGEST_NAME` characters."""
_LONGEST_NAME = 200


def without_details(reason: str) -> str:
    """Return a reason with its numbers and quoted text replaced by `…`."""
    return _VARIES.sub("…", reason)


async def follow_outcomes(
    bus: Bus, names: Subjects, *, start: int, samples: bool
) -> AsyncIterator[tuple[int, Outcome]]:
    """Yield (sequence number, outcome) of every outcome in the log from `start` on, until cancelled."""
    async for sequence, outcome in bus.store.follow(names.log_stream, names.groups, Outcome, start=start):
        yield sequence, admit(outcome, sequence, samples=samples)


def admit(outcome: Outcome, sequence: int, *, samples: bool) -> Outcome:
    """Return the outcome for the ledger: a failure of the attempt if its group is faulty, else the outcome at
    `sequence` of the log. A failure's reason becomes printable text of at most 500 characters.

    With `samples`, the policy samples the sequences that the run trains. Without, the kernel wrote the groups
    of the training tickets, and the members of these groups name rows of the dataset.
    """
    if isinstance(outcome, GroupFailed):
        reason, filtered = outcome.reason, outcome.filtered
    elif fault := next(_faults(outcome, sequence, stored=samples or outcome.purpose == "eval"), ""):
        reason, filtered = f"{printable(outcome.worker)} wrote a faulty group: {fault}", False
    else:
        return outcome
    reason = printable(reason[:_LONGEST_REASON])
    prompt = outcome.prompt if 0 <= outcome.prompt < _MOST else 0
    fields = (outcome.purpose, outcome.ticket, outcome.attempt, outcome.worker)
    return GroupFailed(*fields, reason, filtered, prompt=prompt)


def refs_of(groups: Iterable[GroupDone]) -> tuple[RowRef, ...]:
    """Return the rows of groups, in order, as the trainers get them."""
    return tuple(
        RowRef(member.id, member.sequence, member.index, group.ticket, member.length)
        for group in groups
        for member in group.members
    )


def _faults(group: GroupDone, sequence: int, *, stored: bool) -> Iterator[str]:
    """Yield the faults of a group. With `stored`, a rollout worker wrote the group's data to the log."""
    if not group.members:
        yield "it has no member"
    for name in ("seconds", "generate_s", "score_s", "tool_s", "environment_s", "own_s"):
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
    yield from _failure_faults(group)
    if len({(member.sequence, member.index) for member in group.members}) < len(group.members):
        yield "several members name the same trajectory"


def _failure_faults(group: GroupDone) -> Iterator[str]:
    for failed in (*group.missing, *group.penalized):
        is_odd = len(failed.reason) > _LONGEST_REASON or printable(failed.reason) != failed.reason
        if is_odd or failed.kind not in get_args(FaultKind) or failed.tries < 1:
            yield f"a failed sample is {printable(str(failed))[:200]}"
        if not 0 <= failed.sampled < _MOST:
            yield f"a failed sample has {failed.sampled} sampled tokens"
    retried = sum(group.retried.values())
    counts = (len(group.missing), len(group.penalized), retried, *group.retried.values())
    if not all(0 <= count <= _MOST_SAMPLES for count in counts) or not 0 <= group.redrawn <= retried:
        yield f"{len(group.missing)} samples are missing, {retried} were tried again, {group.redrawn} anew"
    if not 0 <= group.prompt < _MOST:
        yield f"the prompt has {group.prompt} tokens"


def _sample_faults(group: GroupDone, member: Member, sequence: int) -> Iterator[str]:
    # The log has a sample before its outcome. Samples of an evaluation have the number 0.
    if not (0 if group.purpose == "eval" else 1) <= member.sequence < sequence:
        yield f"{member.id} lies at {member.sequence} of the log; its outcome lies at {sequence}"
    if not 0 < member.sampled <= member.length < _MOST:
        yield f"{member.id} has {member.length} tokens, {member.sampled} of them sampled"
    if not 0 <= member.oldest <= member.newest < _MOST:
        yield f"{member.id} has tokens of versions {member.oldest} to {member.newest}"
    if not 0 <= member.kept < _MOST:
        yield f"{member.id} has tokens drawn from {member.kept} ids"
    if not is_number(member.reward):
        yield f"the reward of {member.id} is {member.reward}"
    if len(member.metrics) > _MOST_METRICS:
        yield f"{member.id} has {len(member.metrics)} metrics; expected at most {_MOST_METRICS}"
    for metric, value in member.metrics.items():
        if len(metric) > _LONGEST_NAME:
            yield f"a metric of {member.id} has a name of {len(metric)} characters, above {_LONGEST_NAME}"
        if not is_number(value):
            yield f"{printable(metric)[:40]!r} of {member.id} is {value}"
