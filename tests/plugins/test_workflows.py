"""Workflows of several turns: what they make of a group, and whole runs of them."""

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixture_types import Start
from kernel_setup import write_run
from patience import patience
from plugin_files import write_plugin
from stretto import Context
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start.checks import problems
from stretto.dataset import Message
from stretto.environment import feedback_of
from stretto.errors import EngineError
from stretto.models.tokenizer import ByteTokenizer
from stretto.testing import FakeSession
from stretto.tools import tool_of
from stretto.user_code.importable import load_importable
from stretto.workflow import Prompt, Score, Trajectory
from stretto_multi_turn import MultiTurn, MultiTurnConfig
from stretto_tool_use import ToolUse, ToolUseConfig
from worlds import in_simulation

CONTEXT = Context(run="r", name="n", seed=1)


class Forgetful(ByteTokenizer):
    """Its chats are written with only the last answer in full, as templates that drop reasoning do."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        last = max((n for n, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        lines = [
            str(each["content"]) if each["role"] != "assistant" or n == last else str(each["content"])[-1:]
            for n, each in enumerate(messages)
        ]
        names = ",".join(tool["function"]["name"] for tool in tools)
        return f"[{names}]" + "".join(f"{line}\n" for line in lines)


def prompt_of(text: Any, **columns: Any) -> Prompt:
    return Prompt({"prompt": text, **columns}, np.zeros(1, np.int32))


def text_of(trajectory: Trajectory) -> tuple[str, str]:
    """The whole, and what the policy wrote of it."""
    whole = trajectory.tokens.astype(np.uint8)
    return whole.tobytes().decode(), whole[trajectory.loss_mask].tobytes().decode()


# --------------------------------------------------------------------------------------- multi_turn


async def multi_turn(session: FakeSession, prompt: Prompt, **options: Any) -> list[Trajectory]:
    config = MultiTurnConfig(use="multi_turn", environment="x.py:x", **options)
    return list(await MultiTurn(config, CONTEXT).run(prompt, session))


def warmer(completion: str, secret: int, turn: int, state: dict[str, Any], **_: Any) -> Any:
    """Once it is guessed, a reward; before that, a little."""
    state["sum"] = state.get("sum", 0) + int(completion)
    if int(completion) == secret:
        return {"reward": 1, "sum": state["sum"]}
    return {"feedback": f" more than {completion}: ", "reward": -0.25, "sum": state["sum"], "turn": turn}


def go_on(turn: int, **_: Any) -> Any:
    return "go on" if turn < 3 else None


async def test_an_environment_answers_until_it_has_nothing_to_say() -> None:
    session = FakeSession(lambda text, number: str(text.count("more") + number), environment=warmer)
    first, second = await multi_turn(session, prompt_of("0..9: ", secret=2))
    assert text_of(first) == ("0..9: 0 more than 0: 1 more than 1: 2", "012")
    assert first.score == Score(0.5, {"sum": 3, "turn": 2, "turns": 3, "splits": 0})
    assert text_of(second) == ("0..9: 1 more than 1: 2", "12")
    assert second.score.reward == 0.75
    assert session.scored == []


async def test_without_a_reward_of_its_own_the_last_answer_is_scored() -> None:
    def environment(turn: int, **_: Any) -> Any:
        return [{"role": "user", "content": "and?"}] if turn < 5 else None

    script = "a" * 3
    session = FakeSession(lambda text, number: script[: number + 1], environment=environment)
    chat = [{"role": "user", "content": "hi"}]
    made = await multi_turn(session, prompt_of(chat), max_turns=2)
    [(texts, columns)] = session.scored
    assert texts == ["a", "aa"]
    assert columns["turns"] == [2, 2]
    said = [("user", "hi"), ("assistant", "aa"), ("user", "and?"), ("assistant", "aa"), ("user", "and?")]
    assert [(each["role"], each["content"]) for each in columns["messages"][1]] == said
    assert [trajectory.score.reward for trajectory in made] == [1.0, 2.0]


async def test_the_pieces_of_a_split_conversation_share_its_score() -> None:
    session = FakeSession(
        lambda text, number: f"thought {number}",
        tokenizer=Forgetful(),
        environment=go_on,
        reward=lambda text: float(text[-1]),
    )
    made = await multi_turn(session, prompt_of([{"role": "user", "content": "hi"}]))
    assert [(each.score.reward, each.score.metrics["splits"], text_of(each)[1]) for each in made] == [
        *((0, 1, "thought 0thought 0"), (0, 1, "thought 0")),  # when the first is no longer the last
        *((1, 1, "thought 1thought 1"), (1, 1, "thought 1")),
    ]


async def test_the_limit_ends_a_conversation_and_is_named_where_nothing_fits() -> None:
    session = FakeSession(lambda text, number: "12345", environment=go_on, size=1)
    [trajectory] = await multi_turn(session, prompt_of("prompt"), max_tokens=19)
    assert text_of(trajectory)[0] == "prompt12345go on123"
    with pytest.raises(EngineError, match=r"workflow\.max_tokens=6 leaves no room"):
        await multi_turn(session, prompt_of("prompt"), max_tokens=6)


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (3, "expected text, a chat message"),
        ([{"content": "x"}], "expected text, a chat message"),
        (
            {"role": "user", "content": "x", "reward": 1},
            "a message with 'reward'; return a dict with the message",
        ),
        ([{"role": "user", "content": "x", "images": []}], "a message with 'images'; return a dict"),
        ({"reward": float("nan")}, "'reward' in the environment's feedback is nan"),
        ({"feedback": "x", "done": True}, "'done' is true beside `feedback`; leave"),
        ({"feedback": "x", "done": "yes"}, "'done' in the environment's feedback is 'yes'"),
    ],
)
def test_an_environment_is_told_what_it_may_return(returned: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        feedback_of(returned, {})


# ----------------------------------------------------------------------------------------- tool_use


def add(a: int, b: int) -> int:
    return a + b


async def test_calls_are_answered_and_counted() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {"a": 1, "b": 2}}</tool_call>'

    def script(text: str, number: int) -> str:
        if number == 0 or "3\n" in text:
            return "no call"
        return call % "add" + call % "sub" + "<tool_call>add(1, 2)</tool_call>"

    session = FakeSession(script, tokenizer=ByteTokenizer(), tools=[add])
    config = ToolUseConfig(use="tool_use", tools=("x.py:add",))
    made = await ToolUse(config, CONTEXT).run(prompt_of("1+2"), session)
    assert [text_of(each)[1] for each in made] == ["no call", script("", 1) + "no call"]
    counted = {"tool_calls": 3, "tool_errors": 2}
    assert made[1].score.metrics == {"scored": 1, "turns": 2, "splits": 0, **counted}
    [(texts, columns)] = session.scored
    assert texts == ["no call", "no call"]
    assert columns["tool_calls"] == [0, 3]
    answers = [each for each in columns["messages"][1] if each["role"] == "tool"]
    assert [(each["name"], each["tool_call_id"]) for each in answers] == [
        *(("add", "call00000"), ("sub", "call00001"), ("", "call00002"))
    ]
    assert answers[0]["content"] == "3"
    assert answers[2]["content"].startswith("error: the call is not valid JSON")


async def test_calls_of_the_last_turn_are_not_made() -> None:
    script = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    session = FakeSession(lambda text, number: script, tools=[add], size=1)
    config = ToolUseConfig(use="tool_use", tools=("x.py:add",), max_turns=3)
    [trajectory] = await ToolUse(config, CONTEXT).run(prompt_of("1+2"), session)
    assert trajectory.score.metrics["turns"] == 3
    assert trajectory.score.metrics["tool_calls"] == 2


# ------------------------------------------------------------------------------------- whole runs


TOOLS = '''
import time

def add(a: int, b: int = 1) -> int:
    """A sum."""
    return a + b

def slow() -> str:
    """Takes its time."""
    time.sleep(1000)
'''

CALLS = """
import json

def answer(text, seed):
    lines = text.splitlines()
    if len(lines) > 2:
        return lines[2]  # what the tool said
    n = int(text.split("+")[0])
    name, arguments = ("slow", {}) if n % 4 == 3 else ("add", {"a": n})
    return f'<tool_call>{json.dumps({"name": name, "arguments": arguments})}</tool_call>'
"""

REWARD = """
def score(prompt, completion, answer, messages, tool_calls, turns):
    assert messages[0] == {"role": "user", "content": prompt} and messages[2]["role"] == "tool"
    return {"reward": float(completion == answer), "slow": float("took longer than" in completion)}
"""


@pytest.mark.slow
def test_a_tool_that_hangs_fails_no_ticket_nor_does_a_dead_verifier(start: Start, tmp_path: Path) -> None:
    for name, code in (("tools", TOOLS), ("reward", REWARD), ("script", CALLS)):
        (tmp_path / f"{name}.py").write_text(code)
    run = start(
        *("inference=mock", f"inference.script={tmp_path}/script.py:answer"),
        f"workflow={{use: tool_use, tools: ['{tmp_path}/tools.py:add', '{tmp_path}/tools.py:slow']}}",
        f"workflow.tool_timeout_s={patience(0.3)}",
        f"reward={{use: function, function: {tmp_path}/reward.py:score}}",
        *("sampling.max_tokens=200", "algorithm.group_size=2", "steps=10"),
        out="tools",
    )
    run.until_step(2)
    run.worker("verifier-0").send_signal(signal.SIGKILL)
    summary = run.assert_completed(10)
    assert summary["restarts"] == 1
    assert summary["ledger"]["failed"] == 0
    lines = run.metrics()
    assert all(line["reward/tool_calls"] == 1 and line["reward/turns"] == 2 for line in lines)
    assert all(line["reward/tool_errors"] == line["reward/slow"] == 1 - line["reward"] for line in lines)
    assert 0 < sum(line["reward/slow"] for line in lines) < len(lines)
    for line in lines:
        whole_s, engine_s, verifier_s, own_s = (
            line[f"ticket_{part}s"] for part in ("", "generate_", "score_", "own_")
        )
        assert 0 < line["ticket_tool_s"] <= verifier_s + 0.001
        assert 0 < own_s <= whole_s - max(engine_s, verifier_s) + 0.001
        assert "ticket_environment_s" not in line


ENVIRONMENT = """
import time

async def count(completion, n, turn, state, messages):
    if n % 8 == 7:
        time.sleep(1000)
    assert state.get("turns", 0) == turn - 1 and messages.endswith(completion)
    state["turns"] = turn
    if turn == 1 + n % 3:
        return {"reward": float(n % 2), "accuracy": 1}
    return " again: "
"""


@pytest.mark.slow
def test_an_environment_rewards_and_one_that_hangs_fails_its_ticket(start: Start, tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    file = tmp_path / "run.yaml"
    file.write_text(file.read_text().replace("reward: exact\n", ""))
    run = start(
        f"workflow={{use: multi_turn, environment: {tmp_path}/environment.py:count}}",
        f"workflow.environment_timeout_s={patience(0.5)}",
        *("verifier.children=2", "algorithm.group_size=2", "steps=6"),
        out="environment",
    )
    summary = run.assert_completed(6)
    assert summary["ledger"]["failed"] > 0
    [reason] = [reason for reason in summary["reasons"] if "environment" in reason]
    assert "environment took longer than workflow.environment_timeout_s=" in reason
    turns = [line["reward/turns"] for line in run.metrics()]
    assert 1 < sum(turns) / len(turns) < 3
    for line in run.metrics():
        assert 0 < line["ticket_environment_s"] <= line["ticket_score_s"] + 0.001
        assert "ticket_tool_s" not in line


UNEVEN = """
from stretto.workflow import Trajectory

class make:
    def __init__(self, config, context): ...

    async def run(self, prompt, session):
        answers = await session.generate(prompt.ids, n=1 + prompt.row["n"] % 5)
        scores = await session.score(prompt, answers)
        return [Trajectory.of(prompt.ids, *pair) for pair in zip(answers, scores, strict=True)]
"""


@pytest.mark.slow
def test_groups_of_any_size_are_trained(start: Start, tmp_path: Path) -> None:
    uneven = write_plugin(tmp_path, "workflow", UNEVEN, "stretto.WorkflowConfig")
    run = start(
        *(f"plugins=[{uneven}]", "workflow=mine"),
        "training.calls_loss=true",
        "algorithm={use: grpo, group_size: 4, minibatches: 2, loss_mean: sequence}",
        "steps=4",
    )
    summary = run.assert_completed(4)
    assert sum(summary["staleness"].values()) != 4 * 4 * 4  # sequences, of 16 groups


@in_simulation
def test_the_page_about_workflows_is_true(start: Start, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    guess, lookup = (load_importable(f"{tmp_path}/{name}") for name in ("guess.py:guess", "tools.py:lookup"))
    state: dict[str, Any] = {}
    assert feedback_of(guess(" 3", 7, 1, state), state).messages == (" No. Not 3. Again: ",)
    assert feedback_of(guess("7", 7, 2, state), state).reward == 0.5
    assert tool_of(lookup).schema["function"]["parameters"]["properties"]["city"]["description"]
    run = start(f"plugins=[{tmp_path}/reconsider.py]", "workflow={use: reconsider}", "steps=2")
    run.assert_completed(2)
    assert [line["reward/turns"] for line in run.metrics()] == [2, 2]


# -------------------------------------------------------------------------------------------- check


def told(tmp_path: Path, workflow: Mapping[str, Any], *overrides: str) -> list[str]:
    composed = compose(write_run(tmp_path, steps=1, workflow=dict(workflow)), overrides)
    return [
        f"{problem.severity} {problem.path}: {problem.message}"
        for problem in problems(Assembly(composed))
        if problem.path.startswith(("workflow", "sandbox", "model"))
    ]


def test_check_tries_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text(TOOLS + "\ndef loose(*args): ...\n")
    tools: dict[str, Any] = {"use": "tool_use", "tools": ["tools.py:add"]}
    assert told(tmp_path, tools) == []
    [warning] = told(tmp_path, tools, "sandbox=unsafe")
    assert warning.startswith("warning sandbox: unsafe: tools and commands run with this user's rights")
    [unknown] = told(tmp_path, {**tools, "tools": ["tools.py:ad"]})
    assert re.match(r"error workflow.tools.0: .*tools.py defines no 'ad'; did you mean 'add'\?", unknown)
    (tmp_path / "bare.py").write_text("def bare(a, b=1): ...\n")
    [bare] = told(tmp_path, {**tools, "tools": ["bare.py:bare"]})
    assert "the tool 'bare' has no description, no type of 'a', no type of 'b': the model does not" in bare
    [loose] = told(tmp_path, {**tools, "tools": ["tools.py:loose"]})
    assert "the tools cannot be made: TypeError: tool 'loose': parameter 'args'" in loose
    [none] = told(tmp_path, {"use": "tool_use"})
    assert "there is no tool" in none
    [unreachable] = told(tmp_path, {**tools, "mcp": [{"url": "http://127.0.0.1:1/mcp"}]})
    assert "workflow.mcp.0.url: the tools cannot reach it without a network" in unreachable
    [missing] = told(tmp_path, {"use": "multi_turn", "environment": "tools.py:sub"})
    assert "workflow.environment" in missing
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    [refused] = told(tmp_path, tools)
    assert refused.startswith("environment sandbox: bubblewrap cannot start: no namespaces")


PIECES = """
from stretto.workflow import Score, Trajectory, parts_of_sample

class make:
    \"\"\"The first of a group's samples is right and comes in three pieces, the others are wrong.\"\"\"

    def __init__(self, config, context): ...

    async def run(self, prompt, session):
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = [Score(float(number == 0)) for number in range(len(answers))]
        first, *others = [Trajectory.of(prompt.ids, *each) for each in zip(answers, scores)]
        return [*parts_of_sample([first] * 3), *others]
"""

LOOKING = """
from stretto_policy_gradients import GRPO

class make(GRPO):
    def advantages(self, batch):
        found = super().advantages(batch)
        of_sequence = [part[-1].item() for part in found.split(batch.lengths)]
        expected = [0.75, 0.75, 0.75, -0.25, -0.25, -0.25]
        for start in range(0, len(batch), 6):  # rewards 1, 0, 0, 0: mean 1/4
            assert of_sequence[start : start + 6] == expected, of_sequence
        return found
"""


@in_simulation
def test_pieces_of_a_sample_count_once_in_a_run(start: Start, tmp_path: Path) -> None:
    pieces = write_plugin(tmp_path, "workflow", PIECES, "stretto.WorkflowConfig")
    looking = write_plugin(tmp_path, "algorithm", LOOKING, "stretto_policy_gradients.GRPOConfig")
    run = start(
        *(f"plugins=[{pieces},{looking}]", "workflow=mine", "algorithm=mine", "steps=2"),
        *("algorithm.group_size=4", "algorithm.group_reward_norm=false"),
    )
    run.assert_completed(2)
    assert [line["reward"] for line in run.metrics()] == [0.25, 0.25]
