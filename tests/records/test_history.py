"""What the events of runs with accidents tell."""

import pytest

from kernel_events import done, issued, retired, step_measured
from stretto.bus.messages.events import FleetChanged, KernelBegan, RunEnded
from stretto.bus.messages.tickets import TicketStarted
from stretto.records.events.history import RunHistory
from stretto.records.events.reader import TimedEvent


def taken(ticket: int, attempt: int = 1, worker: str = "rollout-0") -> TicketStarted:
    return TicketStarted(worker, "train", ticket, attempt)


def told(*events: TimedEvent) -> RunHistory:
    return RunHistory.of([(100.0, KernelBegan(1, 0, 0.0)), *events])


def outcomes(history: RunHistory) -> dict[str, str]:
    return {attempt.name: attempt.outcome for attempt in history.attempts}


def test_no_events_tell_nothing() -> None:
    assert RunHistory.of([]).began is None


def test_a_ticket_of_a_lost_worker_has_two_attempts() -> None:
    history = told(
        (100.5, FleetChanged("rollout-0", "joined")),
        (101.0, FleetChanged("rollout-0", "ready")),
        (102.0, issued(7)),
        (102.5, taken(7)),
        (103.0, FleetChanged("rollout-0", "lost", "killed by signal 9")),
        (103.1, issued(7, attempt=2)),
        (104.0, taken(7, attempt=2, worker="rollout-1")),
        (105.0, done(7, attempt=2)),
        (105.5, done(7, attempt=1)),  # it had been on its way; the second one counts
        (107.0, step_measured(1, 106.0, (7,))),
        (108.0, RunEnded("completed", "")),
    )
    assert outcomes(history) == {"7/1": "withdrawn", "7/2": "trained"}
    first, second = history.attempts
    assert (first.start, first.ended, first.worker) == (102.5, 103.1, "rollout-0")
    assert (second.start, second.ended) == (104.0, 105.0)
    [life] = history.lives
    assert (life.joined, life.ready, life.ended, life.how) == (100.5, 101.0, 103.0, "killed by signal 9")


def test_the_first_attempt_counts_if_it_was_finished_after_all() -> None:
    history = told(
        (102.0, issued(7)),
        (102.5, taken(7)),
        (103.0, issued(7, attempt=2)),
        (103.5, done(7, attempt=1)),
        (107.0, step_measured(1, 106.0, (7,))),
        (108.0, RunEnded("completed", "")),
    )
    assert outcomes(history) == {"7/1": "trained", "7/2": "withdrawn"}
    assert history.attempts[0].ended == history.attempts[1].ended == 103.5


def test_retired_tickets_have_their_account_and_reason() -> None:
    history = told(
        *((101.0, issued(ticket)) for ticket in range(4)),
        *((102.0, taken(ticket)) for ticket in range(3)),
        (103.0, done(0)),
        (103.0, retired(0, "filtered", "by the algorithm")),
        (104.0, retired(1, "failed", "raised")),
        (105.0, retired(3, "expired", "late")),
        (105.5, issued(1, purpose="eval")),
        (106.0, retired(1, "failed", "no result", purpose="eval")),
        (107.0, RunEnded("failed", "")),
    )
    ended = {"0/1": "filtered", "1/1": "failed", "3/1": "expired", "eval-1/1": "failed"}
    assert outcomes(history) == ended | {"2/1": "unfinished"}
    by_name = {attempt.name: attempt for attempt in history.attempts}
    assert by_name["0/1"].reason == "by the algorithm"
    assert (by_name["3/1"].worker, by_name["3/1"].ended) == ("", 105.0)
    assert by_name["2/1"].ended == 107.0
    assert [count for _, count in history.in_flight] == [0, 1, 2, 3, 4, 3, 2, 1]
    assert [count for _, count in history.waiting] == [0, 1, 0]


def test_what_a_killed_kernel_leaves_ends_with_its_last_event() -> None:
    history = told(
        (100.5, FleetChanged("rollout-0", "joined")),
        (101.0, issued(0)),
        (101.0, issued(1)),
        (101.5, taken(0)),
        (101.5, taken(1)),
        (102.0, done(0)),
        (103.0, step_measured(1, 102.5, (0,))),
        # killed; the next kernel repeats the step from the journal
        (200.0, KernelBegan(2, 0, 0.0)),
        (201.0, FleetChanged("rollout-0", "joined")),
        (202.0, step_measured(1, 201.5, (0,))),
        (203.0, issued(1, attempt=2001)),
        (203.5, taken(1, attempt=2001)),
        (204.0, done(1, attempt=2001)),
        (205.0, step_measured(2, 204.5, (1,))),
        (206.0, RunEnded("completed", "")),
    )
    assert [(each.ended, each.status) for each in history.kernels] == [(103.0, ""), (206.0, "completed")]
    assert [(life.joined, life.ended) for life in history.lives] == [(100.5, 103.0), (201.0, 206.0)]
    assert outcomes(history) == {"0/1": "trained", "1/1": "unfinished", "1/2001": "trained"}
    by_name = {attempt.name: attempt for attempt in history.attempts}
    assert by_name["1/1"].ended == 103.0
    first = by_name["0/1"].step
    assert first is not None
    assert first.ended == 103.0  # not the repetition
    assert len(history.steps) == 3


@pytest.mark.parametrize("is_done_there", [False, True])
def test_a_group_whose_end_the_killed_kernel_did_not_write_down_is_trained(is_done_there: bool) -> None:
    """Its attempt may live on under the next kernel."""
    former = (101.0, issued(0)), (101.5, taken(0)), (200.0, KernelBegan(2, 0, 0.0))
    step = (202.0, step_measured(1, 201.5, (0,)))
    later = ((201.0, done(0)), step) if is_done_there else (step, (206.0, RunEnded("completed", "")))
    history = told(*former, *later)
    assert outcomes(history) == {"0/1": "trained"}
    [attempt] = history.attempts
    assert (attempt.start, attempt.ended) == (101.5, 201.0 if is_done_there else 101.5)


def test_a_run_that_goes_on_ends_with_its_newest_event() -> None:
    history = told((101.0, issued(0)), (102.0, taken(0)))
    assert (history.began, history.ended) == (100.0, 102.0)
    assert outcomes(history) == {"0/1": "open"}


def test_a_part_of_a_run_has_what_began_before_it() -> None:
    history = RunHistory.of(
        [(101.5, taken(0)), (102.0, done(1, seconds=3.0)), (103.0, FleetChanged("rollout-0", "lost", "it"))]
    )
    assert {each.name: (each.start, each.outcome) for each in history.attempts} == {
        "0/1": (101.5, "open"),
        "1/1": (99.0, "unfinished"),
    }
    [life] = history.lives
    assert (life.worker, life.ended, life.how) == ("rollout-0", 103.0, "it")
