"""What training waits for, by the causes that the scheduler and the engines give."""

from typing import Any

import pytest

from stretto.bus.messages.events import Cause
from stretto.kernel.waits import Waits

GROUPS, LATE, EVALUATION = Cause("groups"), Cause("late_ticket", 7), Cause("evaluation", 15)
A, B = "inference-0", "inference-1"


STORIES: dict[str, tuple[list[str], list[tuple[Any, ...]], tuple[tuple[Cause, float], ...]]] = {
    "what the scheduler lacks is waited for":
        ([A], [(0.0, "lacks", GROUPS), (2.0, "lacks", LATE), (5.0,)], ((GROUPS, 2.0), (LATE, 3.0))),
    "an evaluation that takes the only engine is waited for":  # the swap back is the evaluation's
        ([A],
         [(0.0, "lacks", LATE), (1.0, "away", A, EVALUATION), (25.0, "serves", A, 17, 0.5), (27.0,)],
         ((LATE, 1.0), (EVALUATION, 24.0), (LATE, 2.0))),
    "an engine that stays with training leaves the cause to the scheduler":
        ([A, B],
         [(0.0, "lacks", GROUPS), (0.0, "away", A, EVALUATION), (4.0, "away", B, EVALUATION), (6.0,)],
         ((GROUPS, 4.0), (EVALUATION, 2.0))),
    "the pause of all engines for a swap is waited for":  # paused from 2 to 5, and from 4 to 6
        ([A, B],
         [(0.0, "lacks", GROUPS), (5.0, "serves", A, 2, 3.0), (6.0, "serves", B, 2, 2.0), (8.0,)],
         ((GROUPS, 4.0), (Cause("swap", 2), 1.0), (GROUPS, 3.0))),
    "engines that are lost are waited for":
        ([A], [(0.0, "lacks", GROUPS), (0.0, "gone", A), (3.0, "serves", A, 1, 0.1), (4.0,)],
         ((Cause("engines"), 3.0), (GROUPS, 1.0))),
    **{f"a batch that is ready needs no engine: {cause.kind}":
        ([A], [(0.0, "away", A, EVALUATION), (0.0, "lacks", cause), (3.0,)], ((cause, 3.0),))
       for cause in (Cause("checkpoint"), Cause("evaluation", 3))},
    "a run that samples nothing does not wait for its engines":
        ([], [(0.0, "lacks", GROUPS), (0.0, "away", A, EVALUATION), (3.0,)], ((GROUPS, 3.0),)),
    "what happens while a step trains is no wait":
        ([A],
         [(0.5, "end"), (0.5, "away", A, EVALUATION), (10.0, "begin"), (10.0, "lacks", GROUPS), (12.0,)],
         ((EVALUATION, 2.0),)),
}  # fmt: skip
"""Name -> the engines, what happens at which time, and what training waited for."""


@pytest.mark.parametrize("name", STORIES)
def test_training_waits_for(name: str) -> None:
    (engines, story, waits), now = STORIES[name], 0.0
    watched = Waits(sampled=bool(engines), clock=lambda: now)
    for engine in engines:
        watched.serves(engine, 1, 0.0)
    watched.begin()
    for time, *call in story:
        now = time
        if call:
            taken = getattr(watched, call[0])(*call[1:])
            assert taken in (None, ((Cause("overhead"), 0.5),))
    assert watched.cause == waits[-1][0]
    assert watched.end() == waits
