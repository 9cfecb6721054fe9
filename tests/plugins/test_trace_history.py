"""What the events of runs with accidents tell."""

from __future__ import annotations

from stretto.records.timeline import (
    Event,
    KernelEnded,
    KernelStarted,
    StepSpan,
    TicketDone,
    TicketIssued,
    TicketRetired,
    TicketTaken,
    WorkerChanged,
)
from stretto_trace.history import RunHistory


def issued(time: float, ticket: int, attempt: int = 1) -> TicketIssued:
    return TicketIssued(time, "train", ticket, attempt, row=ticket, min_version=0)


def taken(time: float, ticket: int, attempt: int = 1, worker: str = "rollout-0") -> TicketTaken:
    return TicketTaken(time, "train", ticket, attempt, worker)


def done(time: float, ticket: int, attempt: int = 1) -> TicketDone:
    return TicketDone(time, "train", ticket, attempt, "rollout-0", 1.0, 0.8, 0.1, 4, 0.5, 100, 0)


def told(*events: Event) -> RunHistory:
    history = RunHistory.of([KernelStarted(100.0, 1, 0), *events])
    assert history is not None
    return history


def outcomes(history: RunHistory) -> dict[str, str]:
    return {attempt.name: attempt.outcome for attempt in history.attempts}


def test_no_events_tell_nothing() -> None:
    assert RunHistory.of([]) is None


def test_a_ticket_of_a_lost_worker_has_two_attempts() -> None:
    history = told(
        WorkerChanged(100.5, "rollout-0", "joined"),
        WorkerChanged(101.0, "rollout-0", "ready"),
        issued(102.0, 7),
        taken(102.5, 7),
        WorkerChanged(103.0, "rollout-0", "lost", "killed by signal 9"),
        issued(103.1, 7, attempt=2),
        taken(104.0, 7, attempt=2, worker="rollout-1"),
        done(105.0, 7, attempt=2),
        done(105.5, 7, attempt=1),  # it had been on its way; the second one counts
        StepSpan(107.0, 106.0, 1, (), (7,)),
        KernelEnded(108.0, "completed"),
    )
    assert outcomes(history) == {"7/1": "withdrawn", "7/2": "trained"}
    first, second = history.attempts
    assert (first.start, first.end, first.worker) == (102.5, 103.1, "rollout-0")
    assert (second.start, second.end) == (104.0, 105.0)
    [life] = history.lives
    assert (life.joined, life.ready, life.end, life.how) == (100.5, 101.0, 103.0, "killed by signal 9")


def test_the_first_attempt_counts_if_it_was_finished_after_all() -> None:
    history = told(
        issued(102.0, 7),
        taken(102.5, 7),
        issued(103.0, 7, attempt=2),
        done(103.5, 7, attempt=1),
        StepSpan(107.0, 106.0, 1, (), (7,)),
        KernelEnded(108.0, "completed"),
    )
    assert outcomes(history) == {"7/1": "trained", "7/2": "withdrawn"}
    assert history.attempts[0].end == history.attempts[1].end == 103.5


def test_retired_tickets_have_their_account_and_reason() -> None:
    history = told(
        *(issued(101.0, ticket) for ticket in range(4)),
        *(taken(102.0, ticket) for ticket in range(3)),
        done(103.0, 0),
        TicketRetired(103.0, "train", 0, 1, "filtered", "by the algorithm"),
        TicketRetired(104.0, "train", 1, 1, "failed", "raised"),
        TicketRetired(105.0, "train", 3, 1, "expired", "late"),
        TicketIssued(105.5, "eval", 1, 1, 0, 0),
        TicketRetired(106.0, "eval", 1, 1, "failed", "no result"),
        KernelEnded(107.0, "failed"),
    )
    expected = {
        "0/1": "filtered",
        "1/1": "failed",
        "3/1": "expired",
        "eval-1/1": "failed",
        "2/1": "unfinished",
    }
    assert outcomes(history) == expected
    by_name = {attempt.name: attempt for attempt in history.attempts}
    assert by_name["0/1"].reason == "by the algorithm"
    assert (by_name["3/1"].worker, by_name["3/1"].end) == ("", 105.0)
    assert by_name["2/1"].end == 107.0
    assert [count for _, count in history.in_flight] == [0, 1, 2, 3, 4, 3, 2, 1]
    assert [count for _, count in history.waiting] == [0, 1, 0]


def test_what_a_killed_kernel_leaves_ends_with_its_last_event() -> None:
    history = told(
        WorkerChanged(100.5, "rollout-0", "joined"),
        issued(101.0, 0),
        issued(101.0, 1),
        taken(101.5, 0),
        taken(101.5, 1),
        done(102.0, 0),
        StepSpan(103.0, 102.5, 1, (), (0,)),
        # killed; the next kernel repeats the step from the journal
        KernelStarted(200.0, 2, 0),
        WorkerChanged(201.0, "rollout-0", "joined"),
        StepSpan(202.0, 201.5, 1, (), (0,)),
        issued(203.0, 1, attempt=2001),
        taken(203.5, 1, attempt=2001),
        done(204.0, 1, attempt=2001),
        StepSpan(205.0, 204.5, 2, (), (1,)),
        KernelEnded(206.0, "completed"),
    )
    assert [(end, status) for _, end, status in history.kernels] == [(103.0, ""), (206.0, "completed")]
    assert [(life.joined, life.end) for life in history.lives] == [(100.5, 103.0), (201.0, 206.0)]
    assert outcomes(history) == {"0/1": "trained", "1/1": "unfinished", "1/2001": "trained"}
    by_name = {attempt.name: attempt for attempt in history.attempts}
    assert by_name["1/1"].end == 103.0
    first = by_name["0/1"].step
    assert first is not None
    assert first.time == 103.0  # not the repetition
    assert len(history.steps) == 3


def test_a_group_whose_end_the_killed_kernel_did_not_write_down_is_trained() -> None:
    history = told(
        issued(101.0, 0),
        taken(101.5, 0),
        KernelStarted(200.0, 2, 0),
        StepSpan(202.0, 201.5, 1, (), (0,)),
        KernelEnded(206.0, "completed"),
    )
    assert outcomes(history) == {"0/1": "trained"}
    assert history.attempts[0].end == 101.5


def test_a_run_that_goes_on_ends_with_its_newest_event() -> None:
    history = told(issued(101.0, 0), taken(102.0, 0))
    assert (history.start, history.end) == (100.0, 102.0)
    assert outcomes(history) == {"0/1": "unfinished"}
