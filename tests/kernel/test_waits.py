"""What training waits for, by the causes that the scheduler and the engines give."""

from __future__ import annotations

import pytest

from stretto.bus.messages.events import Cause
from stretto.kernel.waits import Waits

GROUPS = Cause("groups")
EVALUATION = Cause("evaluation", 15)


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def waits_of(*engines: str, sampled: bool = True) -> tuple[Clock, Waits]:
    """Waits of a run whose engines serve training, at the end of a step, and their clock."""
    clock = Clock()
    waits = Waits(sampled=sampled, clock=clock)
    for engine in engines:
        waits.serves(engine, 1, 0.0)
    waits.begin()
    return clock, waits


def test_what_the_scheduler_lacks_is_waited_for() -> None:
    clock, waits = waits_of("inference-0")
    waits.lacks(GROUPS)
    clock.now = 2.0
    waits.lacks(Cause("late_ticket", 7))
    clock.now = 5.0
    assert waits.cause == Cause("late_ticket", 7)
    assert waits.take() == ((GROUPS, 2.0), (Cause("late_ticket", 7), 3.0))


def test_an_evaluation_that_takes_the_only_engine_is_waited_for() -> None:
    clock, waits = waits_of("inference-0")
    waits.lacks(Cause("late_ticket", 540))
    clock.now = 1.0
    waits.away("inference-0", EVALUATION)
    assert waits.cause == EVALUATION
    clock.now = 25.0
    waits.serves("inference-0", 17, 0.5)  # the swap back is the evaluation's
    clock.now = 27.0
    late = Cause("late_ticket", 540)
    assert waits.take() == ((late, 1.0), (EVALUATION, 24.0), (late, 2.0))


def test_an_engine_that_stays_with_training_leaves_the_cause_to_the_scheduler() -> None:
    clock, waits = waits_of("inference-0", "inference-1")
    waits.lacks(GROUPS)
    waits.away("inference-0", EVALUATION)
    clock.now = 4.0
    waits.away("inference-1", EVALUATION)
    clock.now = 6.0
    assert waits.take() == ((GROUPS, 4.0), (EVALUATION, 2.0))


def test_the_pause_of_all_engines_for_a_swap_is_waited_for() -> None:
    clock, waits = waits_of("inference-0", "inference-1")
    waits.lacks(GROUPS)
    clock.now = 5.0
    waits.serves("inference-0", 2, 3.0)  # paused from 2 to 5
    clock.now = 6.0
    waits.serves("inference-1", 2, 2.0)  # paused from 4 to 6
    clock.now = 8.0
    assert waits.take() == ((GROUPS, 4.0), (Cause("swap", 2), 1.0), (GROUPS, 3.0))


def test_engines_that_are_lost_are_waited_for() -> None:
    clock, waits = waits_of("inference-0")
    waits.lacks(GROUPS)
    waits.gone("inference-0")
    clock.now = 3.0
    waits.serves("inference-0", 1, 0.1)
    clock.now = 4.0
    assert waits.take() == ((Cause("engines"), 3.0), (GROUPS, 1.0))


@pytest.mark.parametrize("cause", [Cause("checkpoint"), Cause("evaluation", 3)])
def test_a_batch_that_is_ready_needs_no_engine(cause: Cause) -> None:
    clock, waits = waits_of("inference-0")
    waits.away("inference-0", EVALUATION)
    waits.lacks(cause)
    clock.now = 3.0
    assert waits.take() == ((cause, 3.0),)


def test_a_run_that_samples_nothing_does_not_wait_for_its_engines() -> None:
    clock, waits = waits_of(sampled=False)
    waits.lacks(GROUPS)
    waits.away("inference-0", EVALUATION)
    clock.now = 3.0
    assert waits.take() == ((GROUPS, 3.0),)


def test_what_happens_while_a_step_trains_is_no_wait() -> None:
    clock, waits = waits_of("inference-0")
    clock.now = 0.5
    assert waits.take() == ((Cause("overhead"), 0.5),)
    waits.away("inference-0", EVALUATION)
    clock.now = 10.0
    waits.begin()
    waits.lacks(GROUPS)
    clock.now = 12.0
    assert waits.take() == ((EVALUATION, 2.0),)
