"""A bad outcome costs its ticket, and neither the run nor its resumption."""

import math
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixture_types import OpenBus
from kernel_events import issued_by, report
from patience import patience
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, TrajectoryBundle
from stretto.kernel.schedule.commands import SchedulerSettings, StartBatch
from stretto.kernel.schedule.outcomes import Outcome, admit
from stretto.kernel.schedule.scheduler import Scheduler
from stretto.kernel.schedule.tickets import TicketQueue

GOOD = Member("5/1/0", 3, 0, length=9, sampled=5, oldest=0, newest=0, reward=1.0, metrics={}, finish="stop")


def group(*members: Member, **changes: Any) -> GroupDone:
    done = GroupDone("train", 5, 1, "rollout-0", members, 0.1)
    return msgspec.structs.replace(done, **changes)


def changed(**changes: Any) -> GroupDone:
    return group(msgspec.structs.replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (group(), "it has no member"),
        (group(GOOD, msgspec.structs.replace(GOOD, id="5/1/1")), "several members name the same trajectory"),
        (group(GOOD, seconds=math.nan), "seconds is nan"),
        (group(GOOD, score_s=-1.0), "score_s is -1.0"),
        (group(GOOD, purpose="eval"), "expected 'eval-5/1/0'"),
        (changed(id="x"), "the id of member 0 is 'x'; expected '5/1/0'"),
        (changed(sequence=7), "lies at 7 of the log; its outcome lies at 7"),
        (changed(sequence=0), "lies at 0 of the log; its outcome lies at 7"),
        (changed(index=-1), "member 0 has index -1"),
        (changed(index=1), "member 0 has index 1 in its bundle of at most 1"),
        (changed(length=-9), "-9 tokens, 5 of them sampled"),
        (changed(sampled=0), "9 tokens, 0 of them sampled"),
        (changed(sampled=10), "9 tokens, 10 of them sampled"),
        (changed(oldest=2, newest=1), "tokens of versions 2 to 1"),
        (changed(oldest=-1), "tokens of versions -1 to 0"),
        (changed(sampled=2**63, length=2**63), f"has {2**63} tokens"),
        (changed(newest=2**63), f"tokens of versions 0 to {2**63}"),
        (changed(metrics={"m" * 201: 1.0}), "a name of 201 characters, above 200"),
        (changed(metrics={str(number): 1.0 for number in range(201)}), "201 metrics; expected at most 200"),
        (changed(reward=math.nan), "the reward of 5/1/0 is nan"),
        (changed(reward=1e39), "the reward of 5/1/0 is 1e+39"),
        (changed(metrics={"accuracy": math.inf}), "'accuracy' of 5/1/0 is inf"),
    ],
)
def test_a_faulty_group_is_a_failure_that_says_why(outcome: GroupDone, reason: str) -> None:
    failure = admit(outcome, 7, samples=True)
    assert isinstance(failure, GroupFailed)
    assert (failure.purpose, failure.ticket, failure.attempt) == (outcome.purpose, 5, 1)
    assert failure.reason.startswith("rollout-0 wrote a faulty group: ")
    assert reason in failure.reason
    assert not failure.filtered


def test_a_sound_group_is_taken_in_as_it_is() -> None:
    assert admit(group(GOOD), 7, samples=True) == group(GOOD)
    unkept = msgspec.structs.replace(GOOD, id="eval-5/1/0", sequence=0)
    assert admit(group(unkept, purpose="eval"), 1, samples=True) == group(unkept, purpose="eval")
    row = msgspec.structs.replace(GOOD, sequence=10**6, length=0, sampled=0)
    assert admit(group(row), 7, samples=False) == group(row)


def test_a_reason_is_printable_and_short() -> None:
    reason = "[/INST] \x1b]0;title\x07 \x9b2J \u202e\n" + 600 * "x"
    failure = admit(GroupFailed("train", 5, 1, "rollout-0", reason), 7, samples=True)
    assert isinstance(failure, GroupFailed)
    assert failure.reason.startswith("[/INST] \\x1b]0;title\\x07 \\x9b2J \\u202e\nxxx")
    assert 500 <= len(failure.reason) <= 520


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 8, 2**40])
MEMBERS = st.builds(
    Member,
    id=st.sampled_from(["0/1/0", "0/1/1", "1/1/0", "eval-0/1/0", "", "/", "x/y/z"]),
    **dict.fromkeys(("sequence", "index", "length", "sampled", "oldest", "newest"), NUMBERS),
    reward=st.floats(),
    metrics=st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    finish=st.just("stop"),
    part=st.booleans(),
)
OUTCOMES = st.builds(
    GroupDone,
    st.sampled_from(["train", "eval"]),
    NUMBERS,
    NUMBERS,
    st.text(max_size=3),
    st.lists(MEMBERS, max_size=3).map(tuple),
    st.floats(),
) | st.builds(GroupFailed, st.sampled_from(["train", "eval"]), NUMBERS, NUMBERS, st.text(), st.text())


@given(st.lists(OUTCOMES, max_size=20), st.booleans())
def test_no_outcome_stops_the_scheduler(outcomes: list[Outcome], evaluates: bool) -> None:
    rows = 2 if evaluates else 0
    scheduler = Scheduler(SchedulerSettings(4, 2, 1, 8, evaluation_rows=rows, max_failures=10**6))
    scheduler.start()
    for sequence, outcome in enumerate(outcomes, 1):
        report(scheduler, admit(outcome, sequence, samples=True))
        for command in scheduler.commands():
            if isinstance(command, StartBatch):
                scheduler.step_finished()
    ledger = msgspec.to_builtins(scheduler.ledger)
    assert ledger.pop("issued") == sum(ledger.values())


async def test_bad_outcomes_in_the_log_fail_tickets_in_every_life(open_bus: OpenBus, names: Subjects) -> None:
    """A real rollout worker's credentials write it; two kernels, one after the other, read it."""
    faulty = "rollout-0 wrote a faulty group: it has no member"
    async with open_bus("kernel") as kernel, open_bus("rollout") as rollout:
        await kernel.store.make_log(names.log_stream, [names.trajectories, names.groups])
        bundle = TrajectoryBundle(1, 1, 0, ())
        sequence = await rollout.store.append(names.trajectories, bundle, id="1/1/0")
        sound = group(msgspec.structs.replace(GOOD, id="1/1/0", sequence=sequence), ticket=1)
        await rollout.store.append(names.groups, group(ticket=0), id="0/1/end")
        await rollout.store.append(names.groups, sound, id="1/1/end")
        for epoch in (1, 2):
            scheduler, seen = Scheduler(SchedulerSettings(2, 2, 0, 8)), list[Outcome]()
            scheduler.start()
            with anyio.move_on_after(patience(20)) as until_both:
                accept = partial(take, scheduler, seen, until_both)
                await TicketQueue(kernel, names, epoch, samples=True).follow(accept)
            assert seen == [GroupFailed("train", 0, 1, "rollout-0", faulty), sound]
            assert scheduler.members.missing == 1
            assert [done.ticket for done in scheduler.tickets.done_groups] == [1]


def take(
    scheduler: Scheduler, seen: list[Outcome], until_both: anyio.CancelScope, sequence: int, outcome: Outcome
) -> None:
    seen.append(outcome)
    report(scheduler, outcome)
    if len(seen) == 2:
        until_both.cancel()


async def test_a_checkpoint_keeps_the_log_from_its_oldest_ticket_under_way_on(
    open_bus: OpenBus, names: Subjects
) -> None:
    """Data of a ticket may come before its outcome. A ticket that is not issued yet has no data."""

    def ignore(sequence: int, outcome: Outcome) -> None: ...

    async with open_bus("kernel") as kernel:
        await kernel.store.make_queue(names.tickets_stream, [names.ticket("train")], redeliver_s=60)
        scheduler = Scheduler(SchedulerSettings(2, 2, 0, 8))
        scheduler.start()
        first, second = issued_by(scheduler.commands())
        queue = TicketQueue(kernel, names, 1, samples=True)
        queue.take_in(9, group(GOOD), ignore)
        assert queue.lowest_sequence(scheduler.snapshot()) == 10
        await queue.issue(first)
        queue.take_in(20, group(GOOD), ignore)
        assert queue.lowest_sequence(scheduler.snapshot()) == 10
        member = msgspec.structs.replace(GOOD, id="0/1/0", sequence=12)
        scheduler.group_done(group(member, ticket=first.id))

        adopted = TicketQueue(kernel, names, 2, samples=True)
        adopted.continue_from(20, 7, tickets=[second.id], evaluating=False)
        assert adopted.lowest_sequence(scheduler.snapshot()) == 7
        adopted.continue_from(20, 7, tickets=[], evaluating=True)
        assert adopted.lowest_sequence(scheduler.snapshot()) == 7
        adopted.evaluation_ended()
        assert adopted.lowest_sequence(scheduler.snapshot()) == 12
