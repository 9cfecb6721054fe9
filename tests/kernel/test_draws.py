"""Which row each ticket gets: the same after a kill, whatever the order in which groups finish."""

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_events import finished, issued_by, report, stored
from stretto.algorithm import Group
from stretto.bus.messages.events import RowsDrawn
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Member, Ticket
from stretto.dataset import Curriculum, TicketEnd
from stretto.errors import ContractError
from stretto.kernel.schedule.commands import Fail, Finish, Issue, SchedulerSettings, StartBatch
from stretto.kernel.schedule.draws import Draws, RecordedDraw
from stretto.kernel.schedule.evaluation import Round
from stretto.kernel.schedule.health import held_out
from stretto.kernel.schedule.scheduler import Scheduler
from stretto_mix.curriculum import MixCurriculum, Pool

ROWS = 12
DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"


class Chain:
    """A curriculum whose choice depends on every end so far, so that a missing or an early one shows."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[str, list[float]]] = {}
        self.rows: dict[str, int] = {}

    def choose(self, ticket: int, version: int) -> int:
        total = sum(int(100 * sum(rewards)) + len(outcome) for outcome, rewards in self.ends.values())
        return (total + 5 * ticket + sum(self.rows.values())) % ROWS

    def drawn(self, ticket: int, row: int, version: int) -> None:
        assert str(ticket) not in self.rows
        self.rows[str(ticket)] = row

    def ended(self, end: TicketEnd) -> None:
        assert str(end.ticket) not in self.ends
        assert self.rows[str(end.ticket)] == end.row
        self.ends[str(end.ticket)] = (end.outcome, list(end.rewards))

    def refusal(self, row: int, rewards: tuple[float, ...]) -> str:
        return "by the test" if row == 3 else ""

    def figures(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"ends": self.ends, "rows": self.rows}

    def restore(self, state: dict[str, Any]) -> None:
        self.ends, self.rows = dict(state["ends"]), dict(state["rows"])


def pools() -> MixCurriculum:
    return MixCurriculum(
        {"a": (range(5), 1.0), "b": (range(5, ROWS), {0: 0.0, 4: 2.0})},
        [Pool("hard", 0.3, 0.2), Pool("easy", float("inf"), 1.0)],
        unseen=1.0,
        gates={},
        shuffle=True,
        seed=3,
    )


def documented() -> Curriculum:
    """The example in docs/data.md."""
    [code] = re.findall(r"```python\n(.*?)```", DATA_PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"random": random, "TicketEnd": TicketEnd, "Any": Any}
    exec(code, names)
    return names["Widest"](ROWS, 3)


class World:
    """A kernel, its journal and its log, around the scheduler. What a ticket leads to depends on its row."""

    def __init__(self, run: SchedulerSettings, make: Any, order: random.Random, kill_every: int) -> None:
        self.settings, self.make, self.order, self.kill_every = run, make, order, kill_every
        self.draws: dict[int, RecordedDraw] = {}
        self.batches: dict[int, StartBatch] = {}
        self.events: list[GroupDone | GroupFailed | Literal["step", "release"]] = []
        self.lives = 0
        self.over = False
        self.scheduler = self.new_scheduler()
        self.queue: list[Ticket] = []
        self.training: StartBatch | None = None

    def new_scheduler(self) -> Scheduler:
        return Scheduler(self.settings, keep, curriculum=self.make())

    def run(self) -> Mapping[int, int]:
        self.scheduler.start()
        self.checkpoint = stored(self.scheduler)
        self.obey()
        for event in range(10_000):
            if self.over:
                return {ticket: draw.row for ticket, draw in self.draws.items()}
            if self.kill_every and event % self.kill_every == self.kill_every - 1:
                self.kill()
            elif self.training is not None and (not self.queue or self.order.random() < 0.3):
                self.step()
            else:
                self.finish(self.queue.pop(self.order.randrange(len(self.queue))))
            self.obey()
        raise AssertionError("the run does not end")

    def obey(self) -> None:
        for command in self.scheduler.commands():
            match command:
                case RowsDrawn(version, draws):
                    for ticket, row in draws:
                        assert ticket not in self.draws, "drawn twice"
                        self.draws[ticket] = RecordedDraw(version, row)
                case Issue(ticket):
                    assert self.draws[ticket.id].row == ticket.row, "issued before its record, or another row"
                    self.queue.append(ticket)
                case StartBatch():
                    assert command.rows == tuple(self.draws[group.ticket].row for group in command.groups)
                    self.training = self.batches[command.version] = command
                case Finish():
                    self.over = True
                case _:
                    pass

    def finish(self, ticket: Ticket) -> None:
        if ticket.row % 5 == 4:
            outcome = GroupFailed("train", ticket.id, ticket.attempt, "w", "raised", ticket.row == 9)
        else:
            outcome = done(ticket, self.scheduler.version)
        self.hear(outcome)

    def hear(self, event: GroupDone | GroupFailed | Literal["step", "release"]) -> None:
        self.events.append(event)
        self.apply(event)

    def apply(self, event: GroupDone | GroupFailed | Literal["step", "release"]) -> None:
        if event == "step":
            self.scheduler.step_finished(hold=True)
        elif event == "release":
            self.scheduler.release()
        else:
            report(self.scheduler, event)

    def step(self) -> None:
        self.training = None
        self.hear("step")
        if self.scheduler.version % 2 == 0:
            self.checkpoint = stored(self.scheduler)
            self.events.clear()
        self.hear("release")

    def kill(self) -> None:
        """A new kernel continues from the checkpoint, the events and the recorded draws."""
        self.lives += 1
        former = self.scheduler
        if self.training is not None:  # the new kernel trains its batch
            former.step_finished(hold=True)
            self.events.append("step")
        self.queue, self.training = [], None
        self.scheduler = self.new_scheduler()
        first = self.checkpoint.ledger.issued
        recorded = {ticket: each for ticket, each in self.draws.items() if ticket >= first}
        self.scheduler.restore(self.checkpoint, recorded)
        for event in self.events:
            self.apply(event)
            for command in self.scheduler.commands():
                if isinstance(command, StartBatch):
                    assert command == self.batches[command.version]
                elif isinstance(command, RowsDrawn):  # the step that the former kernel did not end
                    new = {ticket: RecordedDraw(command.version, row) for ticket, row in command.draws}
                    assert self.draws.keys().isdisjoint(new)
                    self.draws |= new
        assert stored(self.scheduler) == stored(former)
        self.scheduler.owned(1000 * self.lives)
        self.scheduler.start()
        self.checkpoint = stored(self.scheduler)
        self.events.clear()


def keep(group: Group) -> bool:
    return sum(group.rewards) > 0


def done(ticket: Ticket, version: int) -> GroupDone:
    rewards = (0.0, 0.0) if ticket.row % 4 == 2 else (ticket.row / ROWS, 1.0)
    return finished(ticket, rewards, oldest=version)


def run_of(max_staleness: int, batch_size: int) -> SchedulerSettings:
    never: Any = {"max_failures": 10_000, "max_filtered": 10_000}
    return SchedulerSettings(9, batch_size, max_staleness, ROWS, max_attempts=1, **never)


def started(**options: Any) -> Scheduler:
    scheduler = Scheduler(run_of(0, 1), **options)
    scheduler.start()
    return scheduler


@settings(max_examples=60)
@given(
    make=st.sampled_from([Chain, pools, documented]),
    run=st.builds(run_of, st.just(0), st.integers(1, 4)),
    orders=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    kill_every=st.integers(2, 30),
)
def test_synchronous_draws_depend_on_neither_kills_nor_the_order_of_groups(
    make: Any, run: SchedulerSettings, orders: tuple[int, int], kill_every: int
) -> None:
    undisturbed = World(run, make, random.Random(orders[0]), 0).run()
    assert World(run, make, random.Random(orders[1]), kill_every).run() == undisturbed


@settings(max_examples=60)
@given(
    make=st.sampled_from([Chain, pools, documented]),
    run=st.builds(run_of, st.integers(1, 3), st.integers(1, 4)),
    order=st.integers(0, 99),
    kill_every=st.integers(2, 30),
)
def test_a_ticket_keeps_its_row_through_kills(
    make: Any, run: SchedulerSettings, order: int, kill_every: int
) -> None:
    rows = World(run, make, random.Random(order), kill_every).run()
    assert list(rows) == list(range(len(rows)))  # `World` holds each row against its record


def test_without_a_curriculum_rows_come_in_epochs_and_nothing_is_recorded() -> None:
    draws = Draws(5, shuffle=True, seed=7, curriculum=None)
    rows = [draws.next(ticket, 0).row for ticket in range(15)]
    epochs = [np.random.default_rng([7, epoch]).permutation(5).tolist() for epoch in range(3)]
    assert rows == [row for epoch in epochs for row in epoch]
    assert draws.take_unrecorded() == ()
    assert draws.snapshot() is None
    resumed = Draws(5, shuffle=True, seed=7, curriculum=None)
    resumed.restore(None, cursor=7, again=[], recorded={})
    assert [resumed.next(ticket, 0).row for ticket in range(7, 15)] == rows[7:]


def test_a_recorded_row_is_not_drawn_again_a_second_time() -> None:
    draws = Draws(ROWS, shuffle=True, seed=7, curriculum=Chain())
    draws.restore(None, cursor=0, again=[(4, 2), (6, 1)], recorded={0: RecordedDraw(0, 6)})
    first, second = draws.next(0, 3), draws.next(1, 3)
    assert (first.row, first.drops, first.version) == (6, 1, 0)
    assert (second.row, second.drops, second.version) == (4, 2, 3)
    assert draws.take_unrecorded() == ((1, 4),)


def test_a_curriculum_that_chooses_no_row_of_the_dataset_is_refused() -> None:
    chain: Curriculum = Chain()
    draws = Draws(2, shuffle=True, seed=7, curriculum=chain)
    with pytest.raises(ContractError, match=r"Chain chose row 5 for ticket 1; expected 0 to 1"):
        draws.next(1, 0)


def test_an_evaluation_has_the_accuracy_of_each_source() -> None:
    run = SchedulerSettings(steps=0, batch_size=1, max_staleness=0, rows=1, evaluation_rows=3)
    scheduler = Scheduler(run, evaluation_source=["easy", "hard", "hard"].__getitem__)
    scheduler.start()
    for ticket, reward in zip(issued_by(scheduler.commands()), (1.0, 0.0, 0.5), strict=True):
        scheduler.group_done(finished(ticket, [reward]))
    [evaluation] = scheduler.evaluation.results
    assert (evaluation.reward, evaluation.sources) == (0.5, {"easy": 1.0, "hard": 0.25})


@pytest.mark.parametrize(
    ("accuracies", "accuracy", "some", "measure"),
    [
        ((1.0, 0.0, 0.0, 0.0), 0.25, (None, 0), "accuracy"),
        ((1.0, 1.0, None, None), None, (1.0, 2), "reward"),  # a reward that returns early for bad answers
        ((None,) * 4, None, (None, 0), "reward"),
    ],
)
def test_an_accuracy_is_of_all_answers_and_never_a_reward(
    accuracies: tuple[float | None, ...], accuracy: float | None, some: tuple[float | None, int], measure: str
) -> None:
    rewards = (1.0, 0.5, -50.0, 0.5)
    result = Round(3, [("", *each) for each in zip(rewards, accuracies, strict=True)]).result()
    assert (result.accuracy, result.reward) == (accuracy, -12.0)
    assert (result.some_accuracy, result.some_accuracy_answers) == some
    [judged] = held_out([result])
    assert (judged.measure, judged.score) == (measure, -12.0 if accuracy is None else accuracy)
    # One evaluation without makes the whole run one of rewards: no list has both measures.
    assert {each.measure for each in held_out([result, Round(4, [("", 1.0, None)]).result()])} == {"reward"}


def test_rows_that_no_policy_sampled_have_no_reward() -> None:
    class Strict(Chain):
        def refusal(self, row: int, rewards: tuple[float, ...]) -> str:
            raise AssertionError("a group without rewards")

    chain = Strict()
    scheduler = started(curriculum=chain)
    [ticket] = issued_by(scheduler.commands())
    member = Member(f"{ticket.name}/0", 1, 0, 0, 0, 0, 0, 0.0, {}, "stop")
    scheduler.group_done(GroupDone("train", ticket.id, ticket.attempt, "dataset", (member,), 0.0))
    scheduler.step_finished()
    assert chain.ends == {"0": ("trained", [])}


def test_a_run_ends_when_its_curriculum_draws_nothing_but_rows_that_are_not_fit() -> None:
    class Stubborn(Chain):
        def choose(self, ticket: int, version: int) -> int:
            return ticket % 2

    scheduler = started(curriculum=Stubborn())
    for _ in range(2 * ROWS):
        [ticket] = issued_by(scheduler.commands())
        failure = GroupFailed("train", ticket.id, ticket.attempt, "w", "prompt too long", filtered=True)
        scheduler.group_failed(failure)
    [reason] = [each.reason for each in scheduler.commands() if isinstance(each, Fail)]
    assert reason == "the last 24 rows that were drawn were left out; the last: prompt too long"
