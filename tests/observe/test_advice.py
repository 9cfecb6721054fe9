"""Advice: every rule says its fault and nothing else; runs show it, keep it, and end by it where asked."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fixture_types import Start
from step_lines import RUN, Line, Steps, advised
from stretto.bus.messages.events import Evaluation
from stretto.kernel.step_meter import causes
from stretto.observe.advice import RULES, Advice, Adviser
from stretto.observe.bottleneck import bottleneck
from stretto.observe.verdict import RunState, verdict
from worlds import in_simulation


def only(given: list[Advice], rule: str) -> Advice:
    assert [advice.rule for advice in given] == [rule], given
    return given[0]


# ------------------------------------------------------------------------------------ every rule


def test_a_collapse_of_the_reward_is_said_soon_with_the_keys_that_hold_a_policy() -> None:
    steps = Steps()
    advice = only(
        advised([*steps(20, (0.5, 0.62)), *steps(20, (0.62, 0.1)), *steps(20, 0.04)]), "reward_collapse"
    )
    assert 20 < advice.since < advice.said <= 40
    assert advice.until is None
    for suggestion in (
        "set `training.lr` to 0.0001 (now 0.0003)",
        "set `queue.max_staleness` to 1 (now 2)",
        "set `training.clip_norm` to 0.3 (now 1)",
        "set `algorithm.correction.use` to behaviour (now decoupled)",
    ):
        assert suggestion in advice.message


def test_a_collapse_is_one_of_any_scale_and_sign_of_the_reward() -> None:
    steps = Steps()
    lines = [*steps(30, 0.6), *steps(30, 0.05)]
    for line in lines:
        line["reward"], line["reward_std"] = 40 * line["reward"] - 100, 40 * line["reward_std"]
    only(advised(lines), "reward_collapse")


@pytest.mark.parametrize("start", [0.15, 0.25, 0.6])
def test_a_policy_that_the_first_steps_destroy_is_said_with_the_learning_rate_alone(start: float) -> None:
    steps = Steps()
    broken = {"entropy": 0.01, "grad_norm": 0.0, "truncated": 1.0, "reward_std": 0.0, "train_s": 0.2}
    lines = [*steps(2, start), *steps(2, start / 2), *steps(40, 0.0, **broken, zero_variance_groups=1.0)]
    advice = only(advised(lines), "reward_collapse")
    assert advice.said < 20
    assert (
        "the policy is broken: its answers are nearly certain (entropy 0.01 nats per token), 100% of the "
        "answers end at the limit of tokens, the gradient is 0, so no step changes it any more; "
        "set `training.lr` to 3e-05 (now 0.0003), or set `queue.max_staleness` to 1"
    ) in advice.message


def test_a_fall_ends_the_advice_that_explains_it_falsely() -> None:
    adviser, steps = Adviser(RUN), Steps()
    for line in [*steps(30, 0.5, truncated=0.4), *steps(15, 0.0, truncated=1.0)]:
        adviser.step(line)
    assert [(advice.rule, advice.until is None) for advice in adviser.given] == [
        ("truncation", False),
        ("reward_collapse", True),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_noise_between_batches_is_no_collapse(seed: int) -> None:
    random, steps = np.random.default_rng(seed), Steps(seed)
    rewards = np.clip(0.4 + 0.1 * random.normal(size=60), 0, 1)  # few groups of very different rows
    assert advised(line for reward in rewards for line in steps(1, float(reward))) == []


def test_held_out_accuracy_that_falls_is_a_collapse() -> None:
    adviser = Adviser(RUN)
    adviser.evaluated(Evaluation(0, 0.25, 400, 0))
    for line in Steps()(20, 0.3):
        adviser.step(line)
    adviser.evaluated(Evaluation(20, 0.05, 400, 0))
    for line in Steps()(3, 0.3):
        adviser.step(line | {"step": line["step"] + 20})
    advice = only(adviser.given, "reward_collapse")
    assert advice.message.startswith("held-out accuracy fell from 0.25 (version 0) to 0.05 (version 20)")


def test_steps_that_target_kl_shortens_are_said_unless_the_run_learns() -> None:
    steps = Steps()
    shortened = {"lr_scale": 0.2, "lr": 6e-5, "behaviour_kl": 0.03}
    advice = only(advised(steps(60, 0.3, **shortened)), "shortened_steps")
    assert "keeps the learning rate at 0.2 of the scheduled one" in advice.message
    assert "set `training.lr` to 6e-05 (now 0.0003)" in advice.message
    assert advised(Steps()(60, (0.3, 0.7), **shortened)) == []


def test_no_plateau_is_said_where_the_policy_has_learnt_what_the_reward_shows() -> None:
    adviser, steps = Adviser(RUN), Steps()
    adviser.evaluated(Evaluation(0, 0.04, 512, 0))
    for line in [*steps(60, (0.2, 0.77)), *steps(150, 0.77)]:
        if line["step"] == 60:
            adviser.evaluated(Evaluation(60, 0.93, 512, 0))
        adviser.step(line)
    assert adviser.given == []


def test_a_plateau_is_said_while_answers_are_mixed() -> None:
    steps = Steps()
    advice = only(advised([*steps(60, (0.2, 0.5)), *steps(150, 0.5)]), "plateau")
    assert advice.said > 160
    assert "raise `training.lr` from 0.0003 to 0.0006" in advice.message
    assert "raise `algorithm.group_size` from 8 to 16" in advice.message


def test_no_plateau_is_said_where_the_rate_has_decayed_or_an_evaluation_rises() -> None:
    steps = Steps()
    assert advised([*steps(60, 0.5), *steps(150, 0.5, lr=1e-4)]) == []
    adviser, steps = Adviser(RUN), Steps()
    for line in steps(200, 0.5):
        adviser.step(line)
        if line["step"] % 20 == 0:
            adviser.evaluated(Evaluation(line["step"], line["step"] / 400, 512, 0))
    assert adviser.given == []


def test_spikes_of_the_gradient_are_said_with_a_bound_at_their_usual_size() -> None:
    steps = Steps()
    lines = [*steps(50), *(line for _ in range(6) for line in (*steps(1, grad_norm=172.0), *steps(3)))]
    advice = only(advised(lines), "gradient_spikes")
    assert "the largest is 172" in advice.message
    assert "`training.clip_norm`" not in advice.message  # the usual size is what it is set to
    advice = only(advised(lines, {**RUN, "training": {"lr": 3e-4, "clip_norm": 5.0}}), "gradient_spikes")
    assert "set `training.clip_norm` to 1 (now 5)" in advice.message


def test_gradients_that_are_not_finite_are_spikes() -> None:
    steps = Steps()
    lines = [*steps(50), *(line for _ in range(6) for line in (*steps(1, grad_norm=math.nan), *steps(3)))]
    only(advised(lines), "gradient_spikes")


def test_masked_tokens_are_said() -> None:
    steps = Steps()
    advice = only(advised([*steps(20), *steps(30, masked_fraction=0.4)]), "masked_tokens")
    assert "leaves out 40% of the tokens; set `queue.max_staleness` to 1 (now 2)" in advice.message


def test_a_collapse_of_the_entropy_is_said_unless_answers_became_right() -> None:
    steps = Steps()
    advice = only(advised([*steps(20), *steps(40, entropy=0.01)]), "entropy_collapse")
    assert "raise `algorithm.entropy_coef` from 0 to 0.001" in advice.message
    steps = Steps()
    assert advised([*steps(40, (0.3, 0.97)), *steps(40, 0.97, entropy=0.01)]) == []


def test_groups_without_variance_are_said_unless_answers_became_right() -> None:
    steps = Steps()
    advice = only(advised(steps(40, 0.1, zero_variance_groups=0.9)), "zero_variance_groups")
    assert "90% of the groups" in advice.message
    filtered = Steps()(40, 0.4, zero_variance_groups=0.0, not_trained={"filtered: by the algorithm": 200})
    assert "86% of the groups" in only(advised(filtered), "zero_variance_groups").message
    steps = Steps()
    assert advised([*steps(20, (0.4, 0.9)), *steps(40, 0.95, zero_variance_groups=0.9)]) == []


def test_truncation_is_said_unless_it_goes_away() -> None:
    steps = Steps()
    advice = only(advised([*steps(20), *steps(30, truncated=0.5)]), "truncation")
    assert "raise `sampling.max_tokens` from 32 to 64" in advice.message
    steps = Steps()
    fading = [line for share in np.geomspace(0.9, 0.02, 60) for line in steps(1, truncated=float(share))]
    assert advised(fading) == []


@pytest.mark.parametrize("figure", ["canary_mean", "mismatch_mean"])
def test_an_engine_that_disagrees_with_the_trainer_is_said(figure: str) -> None:
    steps = Steps()
    advice = only(advised([*steps(10), *steps(5, **{figure: 0.4})]), "engine_mismatch")
    assert "differ by 0.4 per token" in advice.message
    assert "set `inference.dtype` to float32 (now bfloat16)" in advice.message


def test_what_bfloat16_alone_does_is_no_disagreement() -> None:
    """Models of 135 million parameters differ by 0.05 to 0.1."""
    steps = Steps()
    assert advised([*steps(10), *steps(5, canary_mean=0.15)]) == []


def test_a_constant_reward_is_said_at_once_unless_it_has_varied() -> None:
    advice = only(advised(Steps()(200, reward=0.0, reward_std=0.0)), "constant_reward")
    assert (advice.since, advice.said) == (1, 5)
    steps = Steps()
    assert advised([*steps(40, (0.4, 0.97)), *steps(30, 1.0)]) == []


def test_failures_are_said_by_cause() -> None:
    steps = Steps()
    failed = {
        "failed: RewardError: reward raised KeyError: 'gold' (mine.py:3)": 8,
        "failed: RewardError: reward took longer than reward.timeout_s=30": 4,
        "filtered: prompt longer than max_prompt_tokens=9": 50,
    }
    advice = only(advised([*steps(10), *steps(1, not_trained=failed), *steps(9)]), "failures")
    assert (advice.since, advice.said) == (11, 11)
    assert "8 x RewardError: reward raised KeyError: 'gold' (mine.py:3); 4 x " in advice.message
    assert "12 of 332 tickets" in advice.message
    assert "raise `reward.timeout_s` from 30 to 60" in advice.message
    assert advised([*steps(10), *steps(1, not_trained={"failed: worker lost": 2}), *steps(9)]) == []


def test_failed_samples_are_those_of_the_batches_that_they_are_compared_with() -> None:
    """Groups that are made ahead have ended, too: 110 of 128 samples seemed to have failed, and 55 had."""
    steps = Steps()
    lines = steps(1, not_trained={"missing: EnvironmentError: x": 110}, failed_members=55)
    advice = only(advised(lines), "failures")
    assert advice.message.startswith("55 of ")
    assert advised(steps(1, not_trained={"missing: EnvironmentError: x": 110}, failed_members=0)) == []


def test_causes_that_differ_in_numbers_and_quotes_only_are_one() -> None:
    reasons = {"failed: row 3 has no 'a'": 2, "failed: row 14 has no 'b'": 3, "failed: other": 1}
    assert causes(reasons) == {"failed: row 3 has no 'a'": 5, "failed: other": 1}


SPEED = {
    "training_waits": ({"train_s": 0.2}, "raise `inference.replicas` from 1 to 2"),
    "generation_waits": ({"train_s": 0.98, "generate_busy_s": 0.1}, "raise `training.processes` from 1 to 2"),
    "slot_bound": (
        {"train_s": 0.2, "slots_used": 1.0, "samples_waiting": 60.0},
        "raise `inference.slots` from 16 to 32",
    ),
    "kv_bound": (
        {"train_s": 0.2, "slots_used": 0.4, "samples_waiting": 60.0, "kv_used": 0.9},
        "raise `inference.cache_gb` from 1 to 2",
    ),
    "lost_prefixes": (
        {"train_s": 0.2, "lost_per_token": 5.0},
        "set `rollout.concurrency` to {min: 8, max: 64} (now 64)",
    ),
    "verifier_bound": ({"train_s": 0.2, "ticket_score_s": 3.0}, "raise `verifier.children` from 1 to 2"),
    "slow_swaps": ({"swap_pause_s": 0.3}, "raise `queue.batch_size` from 32 to 64"),
}


@pytest.mark.parametrize("rule", SPEED)
def test_what_a_run_waits_for_is_said(rule: str) -> None:
    figures, suggestion = SPEED[rule]
    advice = only(advised(Steps()(60, **figures)), rule)
    assert advice.since == 2  # the first step waits for the first groups
    assert suggestion in advice.message


def test_late_tools_are_given_more_processes_of_their_own() -> None:
    figures, _ = SPEED["verifier_bound"]
    run = {
        **RUN,
        "workflow": {"tools": ["tools.py:look"]},
        "verifier": {**RUN["verifier"], "tool_children": 4},
    }
    advice = only(advised(Steps()(60, **figures), run), "verifier_bound")
    assert "; raise `verifier.tool_children` from 4 to 8, or raise `verifier.children`" in advice.message


@pytest.mark.parametrize("rule", ["training_waits", "generation_waits", "slot_bound", "verifier_bound"])
def test_where_no_core_is_idle_more_work_at_once_is_not_advised(rule: str) -> None:
    figures, _ = SPEED[rule]
    full = {**figures, "cores_used": 0.07, "cores_idle": 0.05}  # other programs use the machine
    assert rule not in {advice.rule for advice in advised(Steps()(60, **full))}
    gpus = {**RUN, "inference": {**RUN["inference"], "gpus": 1}}
    assert rule in {advice.rule for advice in advised(Steps()(60, **full), gpus)}


@pytest.mark.parametrize(
    ("rule", "section", "fixed"),
    [
        ("generation_waits", "training", {"gpus": 1}),
        ("training_waits", "inference", {"gpus": 1}),
        ("training_waits", "inference", {"deterministic": True}),
    ],
)
def test_one_more_thread_is_advised_where_it_may_help(rule: str, section: str, fixed: dict[str, Any]) -> None:
    figures, _ = SPEED[rule]
    run = {**RUN, section: {**RUN[section], "threads": 2}}
    more = f"raise `{section}.threads` from 2 to 3"
    assert more in only(advised(Steps()(60, **figures), run), rule).message
    run = {**run, section: {**run[section], **fixed}}
    assert more not in only(advised(Steps()(60, **figures), run), rule).message


def test_memory_that_is_used_as_much_as_the_slots_is_not_the_bound() -> None:
    figures = {"train_s": 0.2, "slots_used": 0.73, "samples_waiting": 60.0, "kv_used": 0.72}
    assert "kv_bound" not in {advice.rule for advice in advised(Steps()(60, **figures))}


def test_synchronous_training_is_told_to_overlap() -> None:
    run = {**RUN, "queue": {"batch_size": 32, "max_staleness": 0}}
    advice = only(advised(Steps()(60, train_s=0.2), run), "training_waits")
    assert "raise `queue.max_staleness` from 0 to 1" in advice.message
    assert "`inference.replicas`" in advice.message
    advice = only(advised(Steps()(60, train_s=0.2, cores_idle=0.05), run), "training_waits")
    assert advice.message.endswith("; raise `queue.max_staleness` from 0 to 1")


def evaluated_steps(evaluation_s: float) -> list[Line]:
    """Lines of 90 steps with one engine: an evaluation after every 15th stops generation for some time."""
    lines = Steps()(90, train_s=0.8)
    for line in lines[16::15]:
        line["step_s"] += evaluation_s
        line["wait/evaluation_s"] = evaluation_s
    return lines


def test_evaluations_that_take_the_only_engine_are_named_in_place_of_generation() -> None:
    run = {**RUN, "evaluation": {"every": 15, "rows": None}}
    advice = only(advised(evaluated_steps(25.0), run), "evaluation_waits")
    assert "training waits for evaluations in 50 of the 80 s of steps 61-90 (62%)" in advice.message
    assert advice.message.endswith(
        "; raise `evaluation.every` from 15 to 30, or evaluate fewer rows (`evaluation.rows`), or raise "
        "`inference.replicas` from 1 to 2"
    )
    rows = {**RUN, "evaluation": {"every": 15, "rows": 500}}
    message = only(advised(evaluated_steps(25.0), rows), "evaluation_waits").message
    assert "set `evaluation.rows` to 250 (now 500)" in message
    shared = {**RUN, "evaluation": {"every": 15, "rows": None, "own_engine": False}}
    message = only(advised(evaluated_steps(25.0), shared), "evaluation_waits").message
    assert (
        "because they take all inference engines; set `evaluation.own_engine` to true (now false), "
        in message
    )
    own = {**RUN, "evaluation": {"every": 15, "rows": None, "own_engine": True}}
    message = only(advised(evaluated_steps(25.0), own), "evaluation_waits").message
    assert "because they are due faster than their engine samples; raise `evaluation.every`" in message


def test_short_evaluations_are_given_no_advice() -> None:
    run = {**RUN, "evaluation": {"every": 15, "rows": None}}
    assert advised(evaluated_steps(2.0), run) == []


def test_the_bottleneck_is_what_the_others_wait_for() -> None:
    assert bottleneck(Steps()(5))[0] == "training"
    assert bottleneck(Steps()(5, train_s=0.25)) == ("generation", 0.75)
    assert bottleneck(Steps()(5, train_s=0.2, ticket_score_s=2.0)) == ("verification", 0.8)
    assert bottleneck(Steps()(5, train_s=0.2, ticket_own_s=2.0)) == ("workflow", 0.8)
    waits = {"wait/evaluation_s": 0.4, "wait/checkpoint_s": 0.1, "wait/groups_s": 0.3}
    assert bottleneck(Steps()(5, train_s=0.2, **waits)) == ("evaluation", 0.4)


def test_every_rule_has_a_definition_for_people() -> None:
    page = (Path(__file__).parents[2] / "docs" / "advice.md").read_text()
    for rule in RULES:
        assert f"| `{rule.name}` |" in page, rule.name


# --------------------------------------------------------------------------- no false alarms, hysteresis


@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_are_given_no_advice(seed: int) -> None:
    steps = Steps(seed)
    start, end = np.random.default_rng(seed).uniform([0.05, 0.6], [0.6, 1.0])
    assert advised([*steps(150, (start, end)), *steps(50, end, lr=1e-5)]) == []


@pytest.mark.parametrize("seed", range(10))
def test_small_and_noisy_batches_are_given_no_advice(seed: int) -> None:
    random, lines = np.random.default_rng(seed), Steps(seed)(300, (0.3, 0.7))
    for line in lines:
        line["reward"] = float(np.clip(line["reward"] + random.normal(0, 0.25), 0, 1))
        line["grad_norm"] = float(random.lognormal(0, 1.0))
    assert advised(lines) == []


def test_advice_is_said_once_and_withdrawn_when_it_has_been_false_for_long() -> None:
    adviser, steps = Adviser(RUN), Steps()
    told: list[tuple[int, str, int | None]] = []

    def go(lines: list[Line]) -> None:
        for line in lines:
            changed = [advice for advice in adviser.step(line) if advice.rule == "truncation"]
            told.extend((line["step"], advice.rule, advice.until) for advice in changed)

    go(steps(20))
    for _ in range(5):  # in and out of the condition
        go([*steps(12, truncated=0.6), *steps(6)])
    assert [(rule, until) for _, rule, until in told] == [("truncation", None)]
    assert "truncation" in [advice.rule for advice in adviser.open]
    go(steps(40))
    assert len(told) == 2
    assert told[1][2] == told[1][0]  # until the step at which it was withdrawn
    assert adviser.given[0].until == told[1][0]


def test_suggestions_name_only_keys_that_the_run_has() -> None:
    steps = Steps()
    lines = [*steps(30, 0.6), *steps(30, 0.05)]
    advice = only(advised(lines, {"training": {"lr": 3e-4, "clip_norm": None}}), "reward_collapse")
    assert advice.message.endswith(
        "; set `training.lr` to 3e-05 (now 0.0003), or set `training.clip_norm` to 0.3 (now null)"
    )


# --------------------------------------------------------------------------------------- in runs


def reward(tmp_path: Path, body: str) -> list[str]:
    (tmp_path / "mine.py").write_text(textwrap.dedent(body))
    return ["reward=function", f"reward.function={tmp_path}/mine.py:score"]


@in_simulation
def test_a_run_says_its_advice_everywhere(start: Start) -> None:
    run = start("steps=8")  # random answers are never right
    summary = run.assert_completed(8)
    [advice] = summary["advice"]
    assert advice.items() >= {"rule": "constant_reward", "since": 1, "said": 5, "until": None}.items()
    assert [line["advice"] for line in run.metrics()] == [[]] * 4 + [["constant_reward"]] * 4
    assert f"advice: since step 1: {advice['message']}" in run.text()
    assert [line["rule"] for line in run.log() if line["event"] == "advice"] == ["constant_reward"]
    line = run.metrics()[-1]
    assert line["reward_std"] == 0
    assert line["zero_variance_groups"] == 1
    assert 0 < line["ticket_generate_s"] < 10
    assert 0 < line["ticket_score_s"] < 10


@in_simulation
def test_a_reward_that_fails_is_told_by_cause(start: Start, tmp_path: Path) -> None:
    body = """
    def score(prompt, completion, n):
        if n % 5 == 2: raise LookupError(f"row {n}")
        if n % 5 == 3: return None
        return float(len(completion))
    """
    run = start(*reward(tmp_path, body), "steps=10", "queue.max_failures=1000")
    advice = next(each for each in run.assert_completed(10)["advice"] if each["rule"] == "failures")
    assert "reward raised LookupError: row" in advice["message"]
    assert "the reward of completion 0 is None" in advice["message"]
    assert sum(count for line in run.metrics() for count in line["not_trained"].values()) > 0


COLLAPSING = """
    calls = 0
    def score(prompt, completion):
        global calls
        calls += 1
        return float(len(completion) % 2) if calls < 240 else 0.0
"""


@in_simulation
def test_a_run_may_be_ended_by_a_collapse_of_its_reward(start: Start, tmp_path: Path) -> None:
    run = start(
        *reward(tmp_path, COLLAPSING), "steps=60", "on_collapse=stop", "training.seconds_per_step=0.02"
    )
    assert run.end() == 1
    summary = run.assert_balanced()
    assert summary["status"] == "failed"
    assert summary["reason"].startswith("reward collapse (on_collapse: stop): mean reward fell from 0.")
    assert 15 < summary["steps"] < 40
    assert summary["checkpoints"][-1] == f"step-{summary['steps']:06d}"
    assert summary["advice"][0]["rule"] == "reward_collapse"
    run.assert_nothing_is_left()


@in_simulation
def test_a_kernel_that_is_killed_before_it_can_say_why_the_run_ends_leaves_that_to_the_next_one(
    start: Start, tmp_path: Path
) -> None:
    options = (*reward(tmp_path, COLLAPSING), "steps=60", "on_collapse=stop", "checkpoint.every=4")
    run = start(*options, "training.seconds_per_step=0.02")
    run.until(lambda: "the run cannot go on" in run.text())
    run.kill()
    assert not (run.folder / "summary.json").exists()
    steps = len(run.metrics())
    resumed = start(resume=run)
    assert resumed.end() == 1
    summary = resumed.assert_balanced()
    assert summary["reason"].startswith("reward collapse (on_collapse: stop): mean reward fell from 0.")
    assert steps <= summary["steps"] <= steps + 1
    assert summary["checkpoints"][-1] == f"step-{summary['steps']:06d}"
    again = start(resume=run)  # now its user knows
    again.until_step(summary["steps"] + 2)
    again.kill()


@in_simulation
def test_a_resumed_run_keeps_its_advice(start: Start) -> None:
    run = start("steps=30", "checkpoint.every=4")
    run.until_step(8)
    run.process.terminate()
    assert run.end() == 130
    before = run.summary()["advice"]
    assert [advice["rule"] for advice in before] == ["constant_reward"]
    assert start(resume=run).assert_completed(30)["advice"][0] == before[0]


@in_simulation
def test_a_run_that_ends_with_a_worse_policy_says_so_in_its_first_line(start: Start, tmp_path: Path) -> None:
    run = start(*reward(tmp_path, COLLAPSING), "steps=40", "training.seconds_per_step=0.02")
    verdict = run.assert_completed(40)["verdict"]
    assert verdict["state"] == "broken"  # the simulated gradient is 0 then
    assert verdict["text"].startswith("finished, broken: mean reward fell from 0.")
    assert f"verdict {verdict['text']}" in run.text().splitlines()


QUICK = "training.seconds_per_step=0.02"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "words", "overrides", "body"),
    [
        ("slot_bound", "bound by its slots", f"{QUICK} inference.slots=2 inference.tokens_per_s=500", ""),
        ("verifier_bound", "bound by verifiers", QUICK, "import time; time.sleep(0.03); "),
        ("slow_swaps", "swaps of weights stop the engines", "inference.swap_s=0.1", ""),
        ("training_waits", "bound by generation", f"{QUICK} inference.tokens_per_s=3000", ""),
        (
            "generation_waits",
            "bound by training",
            "training.seconds_per_step=2 inference.tokens_per_s=2e5",
            "",
        ),
        ("truncation", "end at the limit of tokens", "sampling.max_tokens=16", ""),
    ],
)
def test_a_fault_in_a_real_run_is_said(
    start: Start, tmp_path: Path, rule: str, words: str, overrides: str, body: str
) -> None:
    score = f"def score(prompt, completion):\n    {body}return float(len(completion) % 2)\n"
    run = start(*reward(tmp_path, score), *overrides.split(), "steps=34")
    run.assert_completed(34)
    adviser = Adviser(yaml.safe_load((run.folder / "config.yaml").read_text()))
    for line in run.metrics():
        adviser.step(line | {"cores_idle": 0.5})  # whatever else this machine does
    assert rule in [advice.rule for advice in adviser.given]
    assert words in verdict(adviser, RunState("completed", 34)).text
