"""Advice: every rule says its fault and nothing else; runs show it, keep it, and end by it where asked."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fixture_types import Start
from plugin_files import write_reward
from step_lines import RUN, Line, Steps, advised
from stretto.bus.messages.events import Evaluation
from stretto.kernel.step_meter import causes
from stretto.observe.advice import RULES, Advice, Adviser
from stretto.observe.bottleneck import bottleneck
from stretto.observe.verdict import RunState, verdict
from worlds import in_simulation

Part = tuple[int, float | tuple[float, float], dict[str, Any]]


def only(given: list[Advice], rule: str) -> Advice:
    assert [advice.rule for advice in given] == [rule], given
    return given[0]


def part(count: int, reward: float | tuple[float, float] = 0.5, **changed: Any) -> Part:
    """Some steps of a run; see `Steps`."""
    return count, reward, changed


def series(*parts: Part) -> list[Line]:
    steps = Steps()
    return [line for count, reward, changed in parts for line in steps(count, reward, **changed)]


def run_with(section: str, **values: Any) -> dict[str, Any]:
    return {**RUN, section: {**RUN.get(section, {}), **values}}


# ------------------------------------------------------------------------------------ every rule


def spikes(norm: float) -> list[Part]:
    return [part(50), *[part(1, grad_norm=norm), part(3)] * 6]


SHORTENED: dict[str, Any] = {"lr_scale": 0.2, "lr": 6e-5, "behaviour_kl": 0.03}
FAILED = {
    "failed: RewardError: reward raised KeyError: 'gold' (mine.py:3)": 8,
    "failed: RewardError: reward took longer than reward.timeout_s=30": 4,
    "filtered: prompt longer than max_prompt_tokens=9": 50,
}
FAILURES = [part(10), part(1, not_trained=FAILED), part(9)]
MISSING: dict[str, Any] = {"not_trained": {"missing: EnvironmentError: x": 110}}
"""Groups that are made ahead have ended, too: 110 of 128 samples seemed to have failed, and 55 had."""
FILTERED = {"not_trained": {"filtered: by the algorithm": 200}}
SPEED: dict[str, dict[str, Any]] = {
    "training_waits": {"train_s": 0.2},
    "generation_waits": {"train_s": 0.98, "generate_busy_s": 0.1},
    "slot_bound": {"train_s": 0.2, "slots_used": 1.0, "samples_waiting": 60.0},
    "kv_bound": {"train_s": 0.2, "slots_used": 0.4, "samples_waiting": 60.0, "kv_used": 0.9},
    "verifier_bound": {"train_s": 0.2, "ticket_score_s": 3.0},
}
LATE: dict[str, Any] = {"train_s": 0.3, "wait/late_ticket_s": 0.6, "generate_busy_s": 0.3}
SAVING: dict[str, Any] = {"train_s": 0.3, "wait/checkpoint_s": 0.4}
AT_ONCE, CLIPPED = run_with("queue", max_staleness=0), run_with("training", clip_norm=5.0)
UNCLIPPED: dict[str, Any] = {"training": {"lr": 3e-4, "clip_norm": None}}
TOOLS = run_with("workflow", tools=["tools.py:look"]) | {"verifier": {"children": 1, "tool_children": 4}}
SAID: list[tuple[str, list[Part], str]] = [
    ("shortened_steps", [part(60, 0.3, **SHORTENED)], "keeps the learning rate at 0.2 of the scheduled one"),
    ("shortened_steps", [part(60, 0.3, **SHORTENED)], "set `training.lr` to 6e-05 (now 0.0003)"),
    ("plateau", [part(60, (0.2, 0.5)), part(150)], "; raise `training.lr` from 0.0003 to 0.0006, or "),
    ("plateau", [part(60, (0.2, 0.5)), part(150)], "raise `algorithm.group_size` from 8 to 16"),
    # The usual size of gradients is what `training.clip_norm` is set to.
    ("gradient_spikes", spikes(172.0), "the largest is 172; set `training.lr` to 0.0001 (now 0.0003)"),
    ("gradient_spikes", spikes(math.nan), "the largest is inf"),
    ("masked_tokens", [part(20), part(30, masked_fraction=0.4)],
     "leaves out 40% of the tokens; set `queue.max_staleness` to 1 (now 2)"),
    ("entropy_collapse", [part(20), part(40, entropy=0.01)],
     "raise `algorithm.entropy_coef` from 0 to 0.001"),
    ("zero_variance_groups", [part(40, 0.1, zero_variance_groups=0.9)], "90% of the groups"),
    ("zero_variance_groups", [part(40, 0.4, zero_variance_groups=0.0, **FILTERED)], "86% of the groups"),
    ("truncation", [part(20), part(30, truncated=0.5)], "raise `sampling.max_tokens` from 32 to 64"),
    ("engine_mismatch", [part(10), part(5, canary_mean=0.4)], "differ by 0.4 per token on the canary"),
    ("engine_mismatch", [part(10), part(5, mismatch_mean=0.4)], "differ by 0.4 per token"),
    ("engine_mismatch", [part(10), part(5, mismatch_mean=0.4)],
     "set `inference.dtype` to float32 (now bfloat16)"),
    ("constant_reward", [part(200, 0.0, reward_std=0.0)], "every answer so far has the reward 0,"),
    ("failures", FAILURES, "'gold' (mine.py:3); 4 x RewardError: reward took longer"),
    ("failures", FAILURES, "12 of 332 tickets failed in 10 steps: 8 x RewardError: reward raised KeyError: "),
    ("failures", FAILURES, "raise `reward.timeout_s` from 30 to 60"),
    ("failures", [part(1, **MISSING, failed_members=55)], "55 of "),
    ("training_waits", [part(60, **SPEED["training_waits"])], "raise `inference.replicas` from 1 to 2"),
    ("generation_waits", [part(60, **SPEED["generation_waits"])], "raise `training.processes` from 1 to 2"),
    ("slot_bound", [part(60, **SPEED["slot_bound"])], "raise `inference.slots` from 16 to 32"),
    ("kv_bound", [part(60, **SPEED["kv_bound"])], "raise `inference.cache_gb` from 1 to 2"),
    ("lost_prefixes", [part(60, train_s=0.2, lost_per_token=5.0)],
     "set `rollout.concurrency` to {min: 8, max: 64} (now 64)"),
    ("verifier_bound", [part(60, **SPEED["verifier_bound"])], "raise `verifier.children` from 1 to 2"),
    ("slow_swaps", [part(60, swap_pause_s=0.3)], "raise `queue.batch_size` from 32 to 64"),
    ("late_tickets", [part(60, **LATE)], "late tickets 60% of the time: a few take much longer"),
    ("late_tickets", [part(60, **LATE)], "raise `queue.max_staleness` from 2 to 3"),
    ("training_waits", [part(60, **LATE | {"generate_busy_s": 0.95})], "training waits for generation"),
    ("checkpoint_waits", [part(60, **SAVING)], "for checkpoints 40% of the time"),
]  # fmt: skip
FALLING = [part(30, 0.6), part(30, 0.05)]
NO_CORE = [part(60, train_s=0.2, cores_idle=0.05)]
OF_RUN: list[tuple[dict[str, Any], str, list[Part], str]] = [
    (CLIPPED, "gradient_spikes", spikes(172.0), "set `training.clip_norm` to 1 (now 5)"),
    (UNCLIPPED, "reward_collapse", FALLING,
     "; set `training.lr` to 3e-05 (now 0.0003), or set `training.clip_norm` to 0.3 (now null)"),
    (UNCLIPPED, "reward_collapse", FALLING, "`training.clip_norm` to 0.3 (now null)\n"),
    (TOOLS, "verifier_bound", [part(60, **SPEED["verifier_bound"])],
     "; raise `verifier.tool_children` from 4 to 8, or raise `verifier.children`"),
    (AT_ONCE, "training_waits", [part(60, train_s=0.2)], "from 0 to 1, or raise `inference.replicas`"),
    (AT_ONCE, "training_waits", NO_CORE, "`queue.max_staleness` from 0 to 1\n"),
]  # fmt: skip
CASES = [*((RUN, *each) for each in SAID), *OF_RUN]
SILENT: dict[str, list[Part]] = {
    "steps are short and the run learns": [part(60, (0.3, 0.7), **SHORTENED)],
    "the learning rate has decayed": [part(60), part(150, lr=1e-4)],
    "the entropy of right answers falls": [part(40, (0.3, 0.97)), part(40, 0.97, entropy=0.01)],
    "groups of right answers are equal": [part(20, (0.4, 0.9)), part(40, 0.95, zero_variance_groups=0.9)],
    "truncation goes away": [part(1, truncated=float(share)) for share in np.geomspace(0.9, 0.02, 60)],
    # Models of 135 million parameters differ by 0.05 to 0.1.
    "bfloat16 alone differs": [part(10), part(5, canary_mean=0.15)],
    "a constant reward has varied": [part(40, (0.4, 0.97)), part(30, 1.0)],
    "two tickets failed": [part(10), part(1, not_trained={"failed: worker lost": 2}), part(9)],
    "samples of later batches failed": [part(1, **MISSING, failed_members=0)],
}


@pytest.mark.parametrize(("run", "rule", "parts", "text"), CASES, ids=[rule for _, rule, *_ in CASES])
def test_a_fault_is_said_with_a_remedy(run: dict[str, Any], rule: str, parts: list[Part], text: str) -> None:
    advice = only(advised(series(*parts), run), rule)
    assert text in f"{advice.message}\n"
    if rule in SPEED:
        assert advice.since == 2  # the first step waits for the first groups
    if rule == "plateau":
        assert advice.said > 160


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said_where(case: str) -> None:
    assert advised(series(*SILENT[case])) == []


def test_constant_rewards_and_failures_are_said_at_once() -> None:
    [constant], [failing] = (advised(series(*each)) for each in ([part(200, 0.0, reward_std=0.0)], FAILURES))
    assert (constant.since, constant.said) == (1, 5)
    assert (failing.since, failing.said) == (11, 11)


def test_a_collapse_of_the_reward_is_said_soon_with_the_keys_that_hold_a_policy() -> None:
    lines = series(part(20, (0.5, 0.62)), part(20, (0.62, 0.1)), part(20, 0.04))
    advice = only(advised(lines), "reward_collapse")
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
    lines = series(*FALLING)
    for line in lines:
        line["reward"], line["reward_std"] = 40 * line["reward"] - 100, 40 * line["reward_std"]
    only(advised(lines), "reward_collapse")


@pytest.mark.parametrize("start", [0.15, 0.25, 0.6])
def test_a_policy_that_the_first_steps_destroy_is_said_with_the_learning_rate_alone(start: float) -> None:
    broken = {"entropy": 0.01, "grad_norm": 0.0, "truncated": 1.0, "reward_std": 0.0, "train_s": 0.2}
    lines = series(part(2, start), part(2, start / 2), part(40, 0.0, **broken, zero_variance_groups=1.0))
    advice = only(advised(lines), "reward_collapse")
    assert advice.said < 20
    assert (
        "the policy is broken: its answers are nearly certain (entropy 0.01 nats per token), 100% of the "
        "answers end at the limit of tokens, the gradient is 0, so no step changes it any more; "
        "set `training.lr` to 3e-05 (now 0.0003), or set `queue.max_staleness` to 1"
    ) in advice.message


def test_a_fall_ends_the_advice_that_explains_it_falsely() -> None:
    given = advised(series(part(30, truncated=0.4), part(15, 0.0, truncated=1.0)))
    assert [(advice.rule, advice.until is None) for advice in given] == [
        ("truncation", False),
        ("reward_collapse", True),
    ]


def test_held_out_accuracy_that_falls_is_a_collapse() -> None:
    given = evaluated(series(part(23, 0.3)), {0: 0.25, 20: 0.05}, samples=400)
    advice = only(given, "reward_collapse")
    assert advice.message.startswith("held-out accuracy fell from 0.25 (version 0) to 0.05 (version 20)")


def evaluated(lines: list[Line], scores: dict[int, float], samples: int = 512) -> list[Advice]:
    """The advice on steps, and on evaluations of these versions."""
    adviser = Adviser(RUN)
    for line in [{"step": 0}, *lines]:
        if line["step"]:
            adviser.step(line)
        if line["step"] in scores:
            adviser.evaluated(Evaluation(line["step"], scores[line["step"]], samples, 0))
    return adviser.given


@pytest.mark.parametrize(
    ("parts", "scores"),
    [
        ([part(60, (0.2, 0.77)), part(150, 0.77)], {0: 0.04, 60: 0.93}),
        ([part(200)], {step: step / 400 for step in range(20, 201, 20)}),
    ],
    ids=["the policy has learnt what the reward shows", "evaluations rise"],
)
def test_no_plateau_is_said_where(parts: list[Part], scores: dict[int, float]) -> None:
    assert evaluated(series(*parts), scores) == []


def test_causes_that_differ_in_numbers_and_quotes_only_are_one() -> None:
    reasons = {"failed: row 3 has no 'a'": 2, "failed: row 14 has no 'b'": 3, "failed: other": 1}
    assert causes(reasons) == {"failed: row 3 has no 'a'": 5, "failed: other": 1}


@pytest.mark.parametrize("rule", ["training_waits", "generation_waits", "slot_bound", "verifier_bound"])
def test_where_no_core_is_idle_more_work_at_once_is_not_advised(rule: str) -> None:
    lines = series(part(60, **SPEED[rule], cores_used=0.07, cores_idle=0.05))  # others use the machine
    assert rule not in {advice.rule for advice in advised(lines)}
    assert rule in {advice.rule for advice in advised(lines, run_with("inference", gpus=1))}


@pytest.mark.parametrize(
    ("rule", "section", "fixed"),
    [
        ("generation_waits", "training", {"gpus": 1}),
        ("training_waits", "inference", {"gpus": 1}),
        ("training_waits", "inference", {"deterministic": True}),
    ],
)
def test_one_more_thread_is_advised_where_it_may_help(rule: str, section: str, fixed: dict[str, Any]) -> None:
    lines, more = series(part(60, **SPEED[rule])), f"raise `{section}.threads` from 2 to 3"
    assert more in only(advised(lines, run_with(section, threads=2)), rule).message
    assert more not in only(advised(lines, run_with(section, threads=2, **fixed)), rule).message


def test_memory_that_is_used_as_much_as_the_slots_is_not_the_bound() -> None:
    lines = series(part(60, train_s=0.2, slots_used=0.73, samples_waiting=60.0, kv_used=0.72))
    assert "kv_bound" not in {advice.rule for advice in advised(lines)}


def evaluated_steps(evaluation_s: float) -> list[Line]:
    """Lines of 90 steps with one engine: an evaluation after every 15th stops generation for some time."""
    lines = Steps()(90, train_s=0.8)
    for line in lines[16::15]:
        line["step_s"] += evaluation_s
        line["wait/evaluation_s"] = evaluation_s
    return lines


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {},
            "training waits for evaluations in 50 of the 80 s of steps 61-90 (62%), because they take all "
            "inference engines; raise `evaluation.every` from 15 to 30, or evaluate fewer rows "
            "(`evaluation.rows`), or raise `inference.replicas` from 1 to 2",
        ),
        ({"rows": 500}, "set `evaluation.rows` to 250 (now 500)"),
        ({"own_engine": False},
         "because they take all inference engines; set `evaluation.own_engine` to true (now false), "),
        ({"own_engine": True},
         "because they are due faster than their engine samples; raise `evaluation.every`"),
    ],
)  # fmt: skip
def test_long_evaluations_are_named_in_place_of_generation(values: dict[str, Any], text: str) -> None:
    run = {**RUN, "evaluation": {"every": 15, "rows": None, **values}}
    assert text in only(advised(evaluated_steps(25.0), run), "evaluation_waits").message
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
def test_healthy_runs_and_noisy_batches_are_given_no_advice(seed: int) -> None:
    random, steps = np.random.default_rng(seed), Steps(seed)
    start, end = random.uniform([0.05, 0.6], [0.6, 1.0])
    assert advised([*steps(150, (start, end)), *steps(50, end, lr=1e-5)]) == []
    lines, rewards = Steps(seed)(300, (0.3, 0.7)), np.clip(0.4 + 0.1 * random.normal(size=60), 0, 1)
    for line in lines:
        line["reward"] = float(np.clip(line["reward"] + random.normal(0, 0.25), 0, 1))
        line["grad_norm"] = float(random.lognormal(0, 1.0))
    assert advised(lines) == []
    steps = Steps(seed)  # few groups of very different rows
    assert advised(line for reward in rewards for line in steps(1, float(reward))) == []


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


# --------------------------------------------------------------------------------------- in runs


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
    run = start(*write_reward(tmp_path, body), "steps=10", "queue.max_failures=1000")
    advice = next(each for each in run.assert_completed(10)["advice"] if each["rule"] == "failures")
    assert "reward raised LookupError: row" in advice["message"]
    assert "the reward of completion 0 is None" in advice["message"]
    assert sum(count for line in run.metrics() for count in line["not_trained"].values()) > 0


QUICK = "training.seconds_per_step=0.02"
COLLAPSING = """
    calls = 0
    def score(prompt, completion):
        global calls
        calls += 1
        return float(len(completion) % 2) if calls < 240 else 0.0
"""


@in_simulation
def test_a_run_may_be_ended_by_a_collapse_of_its_reward(start: Start, tmp_path: Path) -> None:
    run = start(*write_reward(tmp_path, COLLAPSING), "steps=60", "on_collapse=stop", QUICK)
    assert run.end() == 1
    summary = run.assert_balanced()
    assert summary["status"] == "failed"
    assert summary["reason"].startswith("reward collapse (on_collapse: stop): mean reward fell from 0.")
    assert 15 < summary["steps"] < 40
    assert summary["checkpoints"][-1] == f"step-{summary['steps']:06d}"
    assert summary["advice"][0]["rule"] == "reward_collapse"
    verdict = summary["verdict"]
    assert verdict["state"] == "broken"  # the simulated gradient is 0 then
    assert f"verdict {verdict['text']}" in run.text().splitlines()
    run.assert_nothing_is_left()


@in_simulation
def test_a_kernel_that_is_killed_before_it_can_say_why_the_run_ends_leaves_that_to_the_next_one(
    start: Start, tmp_path: Path
) -> None:
    options = (*write_reward(tmp_path, COLLAPSING), "steps=60", "on_collapse=stop", "checkpoint.every=4")
    run = start(*options, QUICK)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "words", "overrides", "body"),
    [
        ("slot_bound", "bound by its slots", f"{QUICK} inference.slots=2 inference.tokens_per_s=500", ""),
        ("verifier_bound", "bound by verifiers", QUICK, "import time; time.sleep(0.03); "),
        ("slow_swaps", "swaps of weights stop the engines", "inference.swap_s=0.1", ""),
        ("training_waits", "bound by generation", f"{QUICK} inference.tokens_per_s=3000", ""),
        ("generation_waits", "bound by training", "training.seconds_per_step=2 inference.tokens_per_s=2e5",
         ""),
        ("truncation", "end at the limit of tokens", "sampling.max_tokens=16", ""),
    ],
)  # fmt: skip
def test_a_fault_in_a_real_run_is_said(
    start: Start, tmp_path: Path, rule: str, words: str, overrides: str, body: str
) -> None:
    score = f"def score(prompt, completion):\n    {body}return float(len(completion) % 2)\n"
    run = start(*write_reward(tmp_path, score), *overrides.split(), "steps=34")
    run.assert_completed(34)
    adviser = Adviser(yaml.safe_load((run.folder / "config.yaml").read_text()))
    for line in run.metrics():
        adviser.step(line | {"cores_idle": 0.5})  # whatever else this machine does
    assert rule in [advice.rule for advice in adviser.given]
    assert words in verdict(adviser, RunState("completed", 34)).text
