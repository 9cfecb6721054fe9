"""Runs whose rewards, workflows, rows or messages have faults, and runs on a full disk."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fixture_types import Start
from patience import patience
from plugin_files import write_plugin, write_reward
from processes import figures_of
from stretto.bus.connection import open_once
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import GroupDone
from stretto.bus.server import Bootstrap
from worlds import in_both_worlds, in_simulation, module_in_both_worlds

FAULTY_REWARD = """
    import time, math, os
    def score(prompt, completion, n, **columns):
        if n % 7 == 6: raise LookupError(f"row {n}")
        if n % 7 == 1: return math.nan
        if n % 7 == 2: return None
        if n == 3: time.sleep(60)
        if n == 4: os._exit(3)
        return {"reward": float(len(completion)), "accuracy": 0.5}
"""
FAULTY_WORKFLOW = """
    import anyio
    from stretto.workflow import Trajectory

    class make:
        def __init__(self, config, context): pass
        async def run(self, prompt, session):
            if prompt.row["n"] % 9 == 0: raise RuntimeError("no luck")
            if prompt.row["n"] == 5: await anyio.sleep_forever()
            if prompt.row["n"] % 9 == 7: return []
            first = await session.generate(prompt.ids)
            answers = await session.generate(prompt.ids, n=session.group_size)
            scores = await session.score(prompt, answers)
            return [Trajectory.of(prompt.ids, a, s) for a, s in zip(answers, scores)]
"""


@pytest.fixture(scope="module")
def faulty(module_start: Start, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A completed run whose reward fails on some rows, and whose workflow on others.

    The sampling of its groups does not run ahead, so each row of the first epoch has its end before the
    run has.
    """
    folder = tmp_path_factory.mktemp("faulty")
    flow = write_plugin(folder, "workflow", FAULTY_WORKFLOW, "stretto.WorkflowConfig")
    run = module_start(
        *(*write_reward(folder, FAULTY_REWARD), f"reward.timeout_s={patience(0.5)}", "steps=6"),
        *("queue.max_failures=1000", "queue.max_attempts=1", "queue.max_staleness=0"),
        # Five ends of a scoring process belong to one row, each with the start of another one.
        *(f"plugins=[{flow}]", "workflow=mine", f"workflow.timeout_s={patience(30)}"),
        out="faulty",
    )
    run.assert_completed(6)
    return run


@module_in_both_worlds
def test_a_reward_that_fails_sometimes_fails_its_tickets_only(faulty: Any) -> None:
    summary = faulty.summary()
    reasons = Counter(summary["reasons"])
    assert all(reason.startswith("failed: ") for reason in reasons)
    assert summary["ledger"]["failed"] == reasons.total() > 0
    text = json.dumps(summary["reasons"])
    assert "reward raised LookupError: row" in text
    assert "mine.py:4)" in text
    assert "the reward of completion 0 is None" in text
    assert "reward took longer than reward.timeout_s=" in text
    assert "reward ended its process: exit status 3" in text
    assert faulty.metrics()[0]["reward/accuracy"] == 0.5


@module_in_both_worlds
def test_a_workflow_that_raises_or_never_ends_fails_its_tickets(faulty: Any) -> None:
    text = json.dumps(faulty.summary()["reasons"])
    assert "RuntimeError: no luck" in text
    assert re.search(r"took longer than [\d.]+ s \(workflow\.timeout_s\)", text)
    assert "returned no trajectory" in text


FOR_SOME_ANSWERS = """
    def score(prompt, completion):
        if len(completion) % 5 == 3: raise LookupError("no score")
        return len(completion)
"""
GROUPS_OF_8 = ("algorithm.group_size=8", "steps=6", "evaluation=null")


@in_both_worlds
def test_an_answer_that_the_reward_cannot_take_has_the_lowest_reward(start: Start, tmp_path: Path) -> None:
    run = start(*write_reward(tmp_path, FOR_SOME_ANSWERS), *GROUPS_OF_8)
    summary = run.assert_completed(6)
    assert summary["members"]["trained"] == summary["members"]["sampled"] == 6 * 4 * 8
    assert summary["failures"]["penalized"] == sum(summary["reasons"].values()) > 0
    for reason in summary["reasons"]:
        assert reason.startswith("penalized: reward raised LookupError: no score (")
    failed = sum(line.get("failed_members/policy", 0) for line in run.metrics())
    assert failed == summary["failures"]["penalized"]


@in_both_worlds
def test_answers_that_the_reward_cannot_take_can_be_left_out(start: Start, tmp_path: Path) -> None:
    run = start(*write_reward(tmp_path, FOR_SOME_ANSWERS), *GROUPS_OF_8, "workflow.failure_reward=missing")
    summary = run.assert_completed(6)
    members, missing = summary["members"], 0
    assert (summary["ledger"]["failed"], summary["given_up"]) == (0, [])
    assert members["missing"] > 0
    assert members["trained"] == members["sampled"] - members["missing"]
    for reason, count in summary["reasons"].items():
        assert reason.startswith("missing: policy: reward raised LookupError: no score (")
        missing += count
    assert missing == sum(line["failed_members"] for line in run.metrics()) == members["missing"]
    assert summary["failures"]["missing"] == {"policy": missing}
    assert summary["failures"]["answer_tokens"]["failed"] > 0


@in_both_worlds
def test_a_reward_that_always_raises_stops_the_run_with_the_reason(start: Start, tmp_path: Path) -> None:
    # It scores what it is tried on before the run, and nothing else.
    body = "def score(prompt, completion):\n    if completion != '0': raise KeyError('gold')\n    return 0"
    run = start(*write_reward(tmp_path, body))
    assert run.end() == 1
    summary = run.summary()
    assert "8 groups failed one after the other" in summary["reason"]
    assert "KeyError: 'gold'" in summary["reason"]
    run.assert_balanced()
    run.assert_nothing_is_left()


FORMS = """
async def own(prompt, completion, answer):
    return float(answer.isdigit())

def trl(completions, answer, prompts, **kwargs):
    assert len(prompts) == len(answer) == len(completions) == 4
    print('printing is harmless')
    return [1.0 for _ in completions]

async def trl_async(prompts, completions, **kwargs):
    return [1.0] * len(completions)
"""


@in_both_worlds
def test_rewards_of_every_form_run(start: Start, tmp_path: Path) -> None:
    """A variant for each."""
    file = tmp_path / "forms.py"
    file.write_text(FORMS)
    run = start(
        *("steps=4", f"reward={{use: function, function: '{file}:own'}}", "variants.own={weight: 1}"),
        *(f"variants.{form}.reward.function={file}:{form}" for form in ("trl", "trl_async")),
    )
    summary = run.assert_completed(4)
    assert summary["variants"].keys() == {"own", "trl", "trl_async"}
    for variant in summary["variants"].values():
        assert variant["ledger"]["trained"] > 0 == variant["ledger"]["failed"]
        assert variant["figures"]["reward"]["mean"] == 1.0
    assert [line["reward"] for line in run.metrics()] == [1.0] * 4


FULL_DISK = """
    from pathlib import Path
    from stretto_mock.training import MockTraining

    class make(MockTraining):
        saves = 0

        def save(self, folder, copy_bytes=0):
            super().save(folder)
            self.saves += 1
            if self.saves <= 2:
                Path("/dev/full").write_text("x" * 100000)
"""


@pytest.fixture(scope="module")
def cramped(module_start: Start, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A completed run with prompts that are too long, and no room for checkpoints before the last one."""
    folder = tmp_path_factory.mktemp("cramped")
    plugin = write_plugin(folder, "training", FULL_DISK, "stretto_mock.MockTrainingConfig")
    run = module_start(
        *("dataset.max_prompt_tokens=4", "queue.max_filtered=1", "steps=5", "checkpoint.every=2"),
        *(f"plugins=[{plugin}]", "training={use: mine, seconds_per_step: 0.05}"),
        out="cramped",
    )
    run.assert_completed(5)
    return run


@module_in_both_worlds
def test_prompts_that_are_too_long_are_filtered_and_counted(cramped: Any) -> None:
    summary = cramped.summary()
    left_out = [line["rows"] for line in cramped.log() if line["event"] == "row left out"]
    filtered = summary["ledger"]["filtered"]
    assert left_out == [2**power for power in range(filtered.bit_length())] != []  # not a line for each row
    assert "ticket failed" not in cramped.text()
    assert filtered == summary["reasons"]["filtered: prompt longer than max_prompt_tokens=4"]


@module_in_both_worlds
def test_a_full_disk_at_a_checkpoint_is_told_and_the_run_goes_on(cramped: Any) -> None:
    summary = cramped.summary()
    assert summary["checkpoints"] == ["step-000005"]
    assert len(summary["problems"]) == 2
    assert "checkpoint of version 2 not written" in summary["problems"][0]
    assert "No space left on device" in summary["problems"][0]
    assert [each.name for each in (cramped.folder / "checkpoints").iterdir()] == ["step-000005"]


async def write_faulty_groups(folder: Path) -> None:
    """Write groups without members for the first 100 tickets, and a message that is none."""
    bootstrap = Bootstrap.read(folder / "bus" / "rollout-0.json")
    client = await open_once(bootstrap, bootstrap.url, 10)
    subject = Subjects(bootstrap.run).groups
    data = b""
    for ticket in range(100):  # the kernel fails those that are in flight
        data = msgspec.msgpack.encode(GroupDone("train", ticket, 1, "rollout-0", (), 0.0))
        await client.publish(subject, data)
    nested = bytes([data[0] + 1]) + data[1:] + b"\x91" * 10000
    await client.publish(subject, nested)
    await client.flush()
    await client.close()


@in_simulation
def test_an_outcome_that_no_step_could_use_fails_its_ticket(start: Start) -> None:
    """And what is no outcome at all is refused and counted."""
    run = start("steps=25", "queue.max_failures=1000")
    run.until_step(2)
    run.call(write_faulty_groups, run.folder)
    summary = run.assert_completed(25)
    assert summary["refused_messages"] > 0
    assert summary["ledger"]["failed"] == 0, "each has been made again"
    assert summary["members"]["missing"] > 0
    assert summary["reasons"] == {}
    assert "message refused" in [line["event"] for line in run.log()]


@pytest.mark.slow
def test_hostile_messages_of_every_role_harm_no_process() -> None:
    """Random, truncated and wrongly typed messages, in the middle of a run; a few thousand of them."""
    result = figures_of("fuzz.py", "--messages", 500)
    assert result["refused"] > 500
    assert result["status"] == "interrupted"
    assert (result["restarts"], result["ended"]) == (0, [])
    assert max(result["grown_mb"].values()) < 100
