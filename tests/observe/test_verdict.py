"""The verdict: what it says of made series of steps, and how often it is wrong."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from step_lines import RUN, Line, Steps, correlated
from stretto.bus.messages.events import Evaluation
from stretto.kernel.schedule.health import held_out
from stretto.observe.advice import Adviser
from stretto.observe.verdict import RunState, trend, verdict
from stretto.records.status import State, Verdict

RUNNING, COMPLETED = RunState("running", 60), RunState("completed", 60)


def judged(
    lines: Sequence[Line], state: RunState = RUNNING, evaluations: Sequence[tuple[int, float, int]] = ()
) -> Verdict:
    adviser = Adviser(RUN)
    for each in evaluations:
        adviser.evaluated(Evaluation(*each, 0))
    for line in lines:
        adviser.step(line)
    return verdict(adviser, state)


def clauses(**figures: Any) -> list[str]:
    return judged(Steps()(60, 0.5, **figures)).text.split("; ")


# ------------------------------------------------------------------------------------- its words


def test_before_the_first_step_it_waits() -> None:
    assert judged([]) == Verdict("waiting", "waiting for the first step")
    first = judged([], evaluations=[(0, 0.25, 400)])
    assert first.text == "waiting for the first step; held out 0.250 ± 0.042 at version 0"
    assert judged([], RunState("failed", 0)).text == "failed at step 0"
    evaluated = judged([], RunState("completed", 0, trains=False), [(0, 0.25, 400)])
    assert evaluated.text == "finished; held out 0.250 ± 0.042 at version 0"


def test_of_a_few_steps_it_claims_nothing() -> None:
    said = judged(Steps()(7, (0.1, 0.9)))
    assert said.state == "unknown"
    assert said.text.startswith("unknown: reward 0.070 → 0.957 in 7 steps, too few to tell; ")


def test_a_held_out_reward_has_the_error_of_its_own_spread() -> None:
    """Rewards of -50 to 100 are no shares: as such, each of them would be a certain rise."""
    scores = zip((0, 60), (-27.5, -20.0), (45.0, 45.0), strict=True)
    noisy = [Evaluation(n, None, 100, 0, reward=score, reward_std=std) for n, score, std in scores]
    adviser = Adviser(RUN)
    for each in noisy:
        adviser.evaluated(each)
    said = verdict(adviser, RunState("running", 60)).text
    assert "held out -20.000 ± 8.820, the best so far" in said
    assert adviser.history.rewards.fall(held_out(noisy[::-1])) is None
    better = Evaluation(90, None, 100, 0, reward=-60.0, reward_std=45.0)
    fall = adviser.history.rewards.fall(held_out([noisy[1], better]))
    assert fall is not None
    assert fall.message.startswith("held-out reward fell from -20 (version 60) to -60")


def test_a_run_that_learns() -> None:
    said = judged(Steps()(60, (0.3, 0.5)), evaluations=[(0, 0.31, 400), (40, 0.5, 400), (60, 0.485, 400)])
    assert said.state == "learning"
    head, held_out, *_ = said.text.split("; ")
    assert head == "learning: reward 0.299 → 0.510 in 60 steps"
    assert held_out == "held out 0.485 ± 0.049, best at version 40"


def test_a_run_whose_reward_has_stopped_to_rise_is_flat_and_has_learned() -> None:
    lines = [*(steps := Steps())(60, (0.2, 0.8)), *steps(60, 0.8)]
    said = judged(lines)
    assert said.state == "flat"
    assert said.text.startswith("flat: reward 0.803 → 0.794 in 60 steps, +0.573 since the start; ")
    ended = judged(lines, COMPLETED)
    assert ended.state == "learning"
    assert ended.text.startswith("finished, learned: reward 0.221 → 0.794 in 120 steps; ")


def test_a_fall_that_is_no_collapse_is_named_too() -> None:
    said = judged(Steps()(60, (0.6, 0.45)))
    assert (said.state, said.text[:22]) == ("falling", "falling: reward 0.595 ")


def test_a_collapse_and_a_broken_policy() -> None:
    steps = Steps()
    collapsing = judged([*steps(20, (0.5, 0.62)), *steps(20, (0.62, 0.1))])
    assert collapsing.state == "collapsing"
    assert collapsing.text.startswith("collapsing: mean reward fell from 0.6")
    assert "`training.lr`" not in collapsing.text
    steps, broken = Steps(), {"entropy": 0.01, "grad_norm": 0.0, "truncated": 1.0, "reward_std": 0.0}
    lines = [*steps(4, 0.5), *steps(40, 0.0, **broken, zero_variance_groups=1.0)]
    assert judged(lines).state == "broken"
    assert judged(lines, COMPLETED).text.startswith("finished, broken: mean reward fell from 0.")
    constant = judged(Steps()(20, 0.0))
    assert constant.state == "broken"
    assert constant.text.startswith("broken: every answer so far has the reward 0, so nothing is learnt")
    steps = Steps()
    assert judged([*steps(5, 0.0), *steps(10, (0.1, 0.9))]).state == "learning"


def test_a_run_without_rewards_learns_when_its_loss_falls() -> None:
    lines = [{"step": step, "step_s": 1.0, "loss": 2.0 - step / 60} for step in range(1, 61)]
    said = judged(lines)
    assert (said.state, said.text) == ("learning", "learning: loss 1.908 → 1.075 in 60 steps")


@pytest.mark.parametrize(
    ("losses", "rows_change", "expected"),
    [
        ([1.5, 1.25, 1.0], False,
         "learning: loss 1.908 → 1.075 in 60 steps; held-out loss 1, the lowest so far"),
        ([1.5, 1.0, 1.25, 1.5, 1.75], False, "falling: held-out loss +0.75 since step 20: it overfits"),
        ([1.5, 1.0, 1.01, 1.02, 1.01], False, "learning: loss 1.908 → 1.075 in 60 steps; held-out loss 1.01"),
        ([1.0, 0.0, 0.0, 0.0, 0.0], False,
         "learning: loss 1.908 → 1.075 in 60 steps; held-out loss 0, lowest"),
        ([1.5, 1.0, 1.25, 1.5], False,
         "learning: loss 1.908 → 1.075 in 60 steps; held-out loss 1.5, lowest after"),
        ([1.5, 1.25], True, "learning: held-out loss -0.25 since step 10"),
        ([1.5, 1.75], True, "flat: held-out loss +0.25 since step 10"),
    ],
)  # fmt: skip
def test_a_run_without_rewards_is_judged_by_its_held_out_loss(
    losses: list[float], rows_change: bool, expected: str
) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "step_s": 1.0, "loss": 2.0 - step / 60} for step in range(1, 61)
    ]
    for number, loss in enumerate(losses, 1):
        lines[10 * number - 1]["held_out/loss"] = loss
    assert judged(lines, RunState("running", 60, rows_change=rows_change)).text.startswith(expected)


@pytest.mark.parametrize("change", ["curriculum", "filtered"])
def test_where_rows_change_only_held_out_rows_tell(change: str) -> None:
    lines = Steps()(60, 0.5)
    if change == "filtered":
        lines = [
            line
            | {"not_trained": {"filtered: by the algorithm": 9}, "ledger": {"trained": 32 * line["step"]}}
            for line in lines
        ]
    state = RunState("running", 60, rows_change=change == "curriculum")
    assert judged(lines, state).text.startswith(
        "unknown: the rows of two steps cannot be compared, and there are no two held-out evaluations"
    )
    rising = judged(lines, state, [(0, 0.3, 400), (60, 0.5, 400)])
    assert (rising.state, rising.text[:41]) == ("learning", "learning: held out +0.200 since version 0")
    assert judged(lines, state, [(0, 0.3, 400), (60, 0.33, 400)]).state == "flat"


def test_held_out_rows_tell_what_a_reward_at_its_limit_does_not() -> None:
    said = judged(Steps()(60, 0.5), evaluations=[(0, 0.3, 400), (60, 0.5, 400)])
    assert said.state == "learning"
    assert said.text.startswith("learning: held out +0.200 since version 0, reward ")


def test_waits_come_largest_first_with_what_bounds_the_run() -> None:
    waits = {"wait/evaluation_s": 0.37, "wait/checkpoint_s": 0.15, "wait/swap_s": 0.05}
    largest = ["evaluations took 37% of the time", "checkpoints took 15% of the time"]
    assert clauses(train_s=0.2, **waits)[-2:] == largest
    waits, end = {"train_s": 0.25, "wait/groups_s": 0.75}, ": training waits 75% of the time for groups"
    assert clauses(**waits)[-1] == f"bound by generation{end}"
    assert clauses(**waits, ticket_score_s=3.0)[-1] == f"bound by verifiers (rewards and tools){end}"
    own = "bound by the workflow's own work, 3 of the 3.5 s of a ticket"
    assert clauses(**waits, ticket_own_s=3.0, ticket_s=3.5)[-1] == f"{own}{end}"
    assert clauses()[-1].startswith("bound by training, which works 7")


def test_evaluations_that_wait_for_the_verifiers_too_do_not_hide_them() -> None:
    waits = {"train_s": 0.25, "wait/evaluation_s": 0.45, "wait/groups_s": 0.3}
    assert clauses(**waits, verifiers_used=0.5)[-1] == "evaluations took 45% of the time"
    assert clauses(**waits, verifiers_used=0.95)[-2:] == [
        "bound by verifiers (rewards and tools): they work 95% of the time, and training waits 30% of the "
        "time for groups",
        "evaluations took 45% of the time",
    ]


def test_a_long_time_after_the_last_step_is_named() -> None:
    said = judged(Steps()(60, 0.5), RunState("completed", 60, wall_s=110.0, after_s=23.0)).text
    assert said.endswith("; it went on for 23 s after its last step")
    for state in (
        RunState("completed", 60, wall_s=600.0, after_s=23.0),
        RunState("completed", 60, wall_s=20.0, after_s=9.0),
        RunState("running", 60, wall_s=110.0, after_s=23.0),
    ):
        assert "after its last step" not in judged(Steps()(60, 0.5), state).text


def test_the_larger_of_two_causes_comes_first() -> None:
    both = {"wait/swap_s": 0.3, "swap_pause_s": 0.3, "wait/groups_s": 0.6, "train_s": 0.15, "step_s": 1.05}
    *_, slots, swaps = clauses(**both, slots_used=1.0, samples_waiting=40.0)
    assert slots.startswith("generation is bound by its slots: 100% are in use")
    assert swaps.startswith("swaps of weights stop the engines 29% of the time")

    # The wait for a swap to a lent engine's next weights counts as one for the evaluation.
    lent = {"wait/evaluation_s": 0.5, "wait/swap_s": 0.1, "swap_pause_s": 0.6, "train_s": 0.3}
    *_, swaps, evaluations = clauses(**lent)
    assert swaps.startswith("swaps of weights stop the engines 60% of the time")
    assert evaluations == "evaluations took 50% of the time"

    failing = [
        line
        | {"not_trained": {"failed: begun 3 times; at last it hangs": 1}}
        | {"ledger": {"failed": line["step"], "trained": 9 * line["step"]}}
        for line in Steps()(60, 0.5, **{"train_s": 0.25, "wait/groups_s": 0.75}, ticket_score_s=3.0)
    ]
    *_, time, failures = judged(failing).text.split("; ")
    assert time == "bound by verifiers (rewards and tools): training waits 75% of the time for groups"
    assert failures.endswith("tickets failed in 10 steps: 10 x begun 3 times, at last it hangs")
    *_, failures, _ = judged([line | {"train_s": 0.9} for line in failing]).text.split("; ")
    assert "tickets failed" in failures


def test_late_tickets_are_no_sign_of_slow_generation_while_engines_are_idle() -> None:
    late = {"train_s": 0.3, "wait/late_ticket_s": 0.6}
    assert clauses(**late, generate_busy_s=0.3)[-1] == "late tickets took 60% of the time"
    *_, waits_clause, bound_clause = clauses(**late, generate_busy_s=0.95)
    assert waits_clause == "late tickets took 60% of the time"
    waits = "training waits 60% of the time for groups, late tickets among them"
    assert bound_clause == f"bound by generation: {waits}"


def test_lost_workers_are_counted_and_one_that_is_lost_again_and_again_is_named() -> None:
    lines, state = Steps()(60, 0.5, train_s=0.25), RunState("running", 60, restarts=3)
    assert "; lost workers started again 3 times; " in judged(lines, state).text
    for step in (10, 30, 50):
        lines[step]["lost"] = [{"worker": "inference-1", "how": "killed by signal 9"}]
    said = judged(lines, state).text
    assert "; inference-1 was lost 3 times in 60 steps, at last killed by signal 9; " in said
    assert "lost workers" not in said


def test_advice_is_named_in_place_of_what_it_explains() -> None:
    full = "; ".join(clauses(train_s=0.3, slots_used=1.0, samples_waiting=40.0))
    assert "generation is bound by its slots: 100% are in use" in full
    assert "bound by generation:" not in full
    assert "40% of the answers end at the limit of tokens" in clauses(truncated=0.4)
    assert "44% of the groups without signal" in clauses(zero_variance_groups=0.44)


# ------------------------------------------------------------------------------------- is it right


def of(values: Sequence[float | None], state: State, figure: str = "loss") -> Verdict:
    of_step = {"step_s": 1.0, "reward_std": 0.1}
    lines = [{"step": step, figure: value, **of_step} for step, value in enumerate(values, 1)]
    return judged([line for line in lines if line[figure] is not None], RunState(state, len(values)))


LOSSES = [0.868, 0.649, 0.524, 0.43, 0.244, 0.177, 0.145, 0.078, 0.03, *np.linspace(0.02, 0.003, 9)]
REWARDS = [0.1, 0.35, 0.6, 0.8, 0.9, 0.95]
RISE = [0.1 * step for step in range(1, 10)]


@pytest.mark.parametrize(
    ("figure", "values", "expected"),
    [
        ("loss", LOSSES, "learned: loss 0.868 → 0.003 in 18 steps"),
        ("loss", [*LOSSES[:4], math.nan, None, *LOSSES[6:]], "learned: loss 0.868 → 0.003 in 18 steps"),
        ("loss", LOSSES[:8], "not known whether it learned: loss 0.868 → 0.078 in 8 steps, too few to tell"),
        ("loss", [math.nan] * 18, "not known whether it learned: no finite loss, too few to tell"),
        ("loss", [*LOSSES[:9], 0.1, 0.3, 0.6, 0.8, 0.9, 1.0], "no change: loss 0.868 → 1 in 15 steps"),
        ("loss", LOSSES[::-1], "fell: loss 0.003 → 0.868 in 18 steps"),
        ("loss", [0.1 + 0.2, 0.3] * 9, "no change: loss 0.3 in 18 steps"),
        ("loss", np.repeat([3, 1, 0.3], 5), "learned: loss 3 → 0.3 in 15 steps"),
        ("loss", [1.0, 0.5, 0.25, 0.15] + [0.1, 0.12] * 20, "learned: loss 0.256 → 0.11 in 44 steps"),
        ("reward", [*REWARDS, *[1.0] * 6], "learned: reward 0.100 → 1.000 in 12 steps"),
        ("reward", [*REWARDS, *[1.0] * 12], "learned: reward 0.100 → 1.000 in 18 steps"),
        ("reward", [0.0] * 5 + [0.5] * 5 + [1.0] * 5, "learned: reward 0.000 → 1.000 in 15 steps"),
        ("reward", [*REWARDS, *[1.0] * 10, 0.85], "learned: reward 0.100 → 0.850 in 17 steps"),
        ("reward", [*RISE, *RISE[::-1]], "no change: reward 0.100 in 18 steps"),
        ("reward", [*np.linspace(0.1, 0.9, 15), 0.1, 0.1, 0.1], "no change: reward 0.100 in 18 steps"),
    ],
)
def test_a_curve_is_judged_by_its_ends(figure: str, values: list[float | None], expected: str) -> None:
    assert of(values, "completed", figure).text.partition("; ")[0] == f"finished, {expected}"


@pytest.mark.parametrize("constant", [1.5, 3.5, 10.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_loss_that_falls_exponentially_does_not_become_flat(constant: float, noise: float) -> None:
    losses = np.exp(-np.arange(60) / constant) * (1 + noise * np.random.default_rng(3).normal(size=60))
    states = [of([*losses[:count]], "running").state for count in range(12, 61)]
    assert set(states) == {"learning"}


def series(random: np.random.Generator, count: int, rise: float, correlation: float) -> list[float]:
    """Rewards that rise evenly, with normal noise whose steps are correlated. The quickstart's noise has a
    deviation of 0.034 and a correlation of -0.17, measured over 60 steps at a learning rate of 1e-12."""
    return [*(0.5 + np.linspace(0, rise, count) + correlated(random, 0.04, correlation, count))]


@pytest.mark.slow
@pytest.mark.parametrize(("rise", "verdict"), [(0.0, "flat"), (0.1, "learning")])
def test_of_200_runs_at_most_5_percent_get_another_verdict(rise: float, verdict: str) -> None:
    random, steps = np.random.default_rng(7), Steps()(60, 0.5)
    states = Counter(
        judged([line | {"reward": value} for line, value in zip(steps, rewards, strict=True)]).state
        for rewards in (series(random, 60, rise, -0.17) for _ in range(200))
    )
    assert states[verdict] >= 190, states


def test_the_trend_of_short_and_of_correlated_series() -> None:
    random = np.random.default_rng(3)
    short = ((10, 0.0, 60), (12, 0.3, 100), (18, 0.3, 100), (18, 0.5, 200), (29, 0.5, 200))
    for count, correlation, most in (*short, (60, 0.3, 80), (60, 0.6, 120)):
        found = sum(trend([*enumerate(series(random, count, 0.0, correlation))]) != 0 for _ in range(2000))
        assert found <= most, (count, correlation, found)
    assert trend([*enumerate([0.5] * 20)]) == 0
    assert trend([*enumerate(np.linspace(1, 0, 20))]) == -1


@pytest.mark.parametrize("count", [12, 18, 29])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_of_short_curves_that_saturate_most_rise(count: int, correlation: float) -> None:
    random, rise = np.random.default_rng(5), 1 - np.exp(-np.linspace(0, 5, count))
    curves = (rise + correlated(random, 0.05, correlation, count) for _ in range(500))
    assert sum(trend([*enumerate(curve)]) == 1 for curve in curves) >= 450
