"""Sessions of outside programs: their requests, and runs that train on rewards that are posted later."""

import json
import stat
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError

import anyio
import anyio.to_thread
import numpy as np
import openai
import pytest
from anthropic import AsyncAnthropic
from anyio.abc import TaskGroup
from openai import AsyncOpenAI

from agent_session import FakeSession
from bus_testing import until
from kernel_setup import write_run
from patience import patience
from stretto import Context
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start.checks import faults_and_warnings
from stretto.models.tokenizer import ByteTokenizer
from stretto.workflow import Prompt, Session, Trajectory
from stretto_online import OnlineConfig
from stretto_online.workflow import OnlineError, OnlineWorkflow

ROW = {"prompt": "1+1=", "answer": "2"}
USER: Any = {"role": "user", "content": "1+1="}


def post(url: str, key: str, body: Any = None, *, raw: bytes = b"") -> tuple[int, Any]:
    data = raw or (b"" if body is None else json.dumps(body).encode())
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=patience()) as answer:
            status, text = answer.status, answer.read()
    except HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text else None


class Client:
    """An outside program, which knows the file of a worker."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sessions" / "rollout-0.json"
        address = json.loads(self.file.read_text())
        self.url, self.token = address["base_url"], address["token"]

    async def start(self) -> Any:
        status, session = await self.post("", self.token)
        assert status == 200
        return session

    async def post(self, path: str, key: str, body: Any = None, *, raw: bytes = b"") -> tuple[int, Any]:
        call = partial(post, f"{self.url}/sessions{path}", key, body, raw=raw)
        return await anyio.to_thread.run_sync(call)

    async def ask(self, session: Any) -> str:
        async with AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
            message: Any = {"role": "user", "content": session["prompt"]}
            answer = await client.chat.completions.create(model="policy", messages=[message])
            return answer.choices[0].message.content or ""


class Ticket:
    """A ticket of the workflow, and how it ended."""

    trajectories: Sequence[Trajectory] = ()
    error: Exception | None = None

    def __init__(self, workflow: OnlineWorkflow, session: FakeSession) -> None:
        self._workflow, self._session = workflow, session
        self.ended = anyio.Event()

    async def run(self) -> None:
        prompt = Prompt(ROW, np.ones(1, np.int32))
        try:
            self.trajectories = await self._workflow.run(prompt, cast("Session", self._session))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.ended.set()


@asynccontextmanager
async def registry_of(
    folder: Path, *sessions: FakeSession, **options: Any
) -> AsyncGenerator[tuple[Client, list[Ticket], TaskGroup]]:
    context = Context(run="r", name="r", seed=1, folder=str(folder), worker="rollout-0")
    workflow = OnlineWorkflow(OnlineConfig(use="online", **options), context)
    await workflow.registry.open()
    tickets = [Ticket(workflow, session) for session in sessions]
    with anyio.fail_after(patience()):
        async with anyio.create_task_group() as tasks:
            for ticket in tickets:
                tasks.start_soon(ticket.run)
            yield Client(folder), tickets, tasks
            tasks.cancel_scope.cancel()
    await workflow.registry.endpoint.stop()


def group(*texts: str, size: int = 1) -> FakeSession:
    session = FakeSession(ByteTokenizer(), *texts)
    session.group_size = size
    return session


async def test_a_session_talks_ends_and_gets_its_reward_later(tmp_path: Path) -> None:
    policy = group("two", "2", size=2)
    async with registry_of(tmp_path, policy) as (registry, [ticket], _):
        assert stat.S_IMODE(registry.file.stat().st_mode) == 0o600
        first, second = await registry.start(), await registry.start()
        assert first["prompt"] == "1+1="
        assert first["row"] == ROW
        assert first["id"] != second["id"]
        assert first["api_key"] != second["api_key"]
        assert await registry.ask(first) == "two"
        _, state = await registry.post(f"/{first['id']}/end", first["api_key"])
        assert state == {"id": first["id"], "calls": 1, "rewarded": False, "ended": True}
        with pytest.raises(openai.AuthenticationError):  # it has ended
            await registry.ask(first)

        async with AsyncAnthropic(base_url=second["anthropic_base_url"], api_key=second["api_key"]) as client:
            [block] = (await client.messages.create(model="policy", max_tokens=9, messages=[USER])).content
        assert block.type == "text"
        assert block.text == "2"
        # The reward may come before the end or after it, with the session's key or the token.
        status, _ = await registry.post(
            f"/{second['id']}/reward", second["api_key"], {"reward": 1, "exact": 1}
        )
        assert status == 200
        await registry.post(f"/{second['id']}/end", second["api_key"], {})
        assert not ticket.ended.is_set()
        await registry.post(f"/{first['id']}/reward", registry.token, -0.5)
        await ticket.ended.wait()
    assert ticket.error is None
    rewards = {text_of(each): each.score.reward for each in ticket.trajectories}
    assert rewards == {"two": -0.5, "2": 1}
    assert {each.score.metrics.get("exact") for each in ticket.trajectories} == {None, 1.0}


def text_of(trajectory: Trajectory) -> str:
    """What the policy wrote of it."""
    return trajectory.tokens[trajectory.loss_mask].astype(np.uint8).tobytes().decode()


async def test_a_session_that_never_ends_fails_its_ticket_alone(tmp_path: Path) -> None:
    stuck, other, limit_s = group("a", "b", size=2), group("c"), patience(2)
    async with registry_of(tmp_path, stuck, other, session_timeout_s=limit_s) as (registry, tickets, _):
        sessions = [await registry.start() for _ in range(2)]
        for session in sessions:
            await registry.ask(session)
        await registry.post(f"/{sessions[1]['id']}/reward", registry.token, 1.0)
        await registry.post(f"/{sessions[1]['id']}/end", registry.token)
        await tickets[0].ended.wait()
        message = f"session {sessions[0]['id']} had no reward {limit_s:g} s after its start"
        assert isinstance(tickets[0].error, OnlineError)
        assert str(tickets[0].error) == f"{message} (workflow.session_timeout_s)"
        # Its program learns it, with the session's own key or with the token.
        for key in (sessions[0]["api_key"], registry.token):
            status, answer = await registry.post(f"/{sessions[0]['id']}/reward", key, 1.0)
            assert (status, answer["error"]["code"]) == (410, "session_over")
            assert message in answer["error"]["message"]
        status, answer = await registry.post(f"/{sessions[1]['id']}/reward", registry.token, 1.0)
        assert (status, "it is complete" in answer["error"]["message"]) == (410, True)
        third = await registry.start()
        await registry.ask(third)
        await registry.post(f"/{third['id']}/reward", third["api_key"], 1.0)
        await registry.post(f"/{third['id']}/end", third["api_key"])
        await tickets[1].ended.wait()
        assert tickets[1].error is None


@pytest.mark.parametrize(
    ("answers", "end", "reason"),
    [
        (0, {}, "ended without an answer of the model"),
        (1, {"error": "the browser crashed"}, "was given up: the browser crashed"),
    ],
)
async def test_a_session_without_an_answer_fails(tmp_path: Path, answers: int, end: Any, reason: str) -> None:
    async with registry_of(tmp_path, group("a")) as (registry, [ticket], _):
        session = await registry.start()
        for _ in range(answers):
            await registry.ask(session)
        await registry.post(f"/{session['id']}/reward", registry.token, 1.0)
        await registry.post(f"/{session['id']}/end", registry.token, end)
        await ticket.ended.wait()
    assert reason in str(ticket.error)


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b"NaN", 400, "not JSON"),
        (b"1e39", 400, "no finite number"),
        (b"1e999", 400, ""),
        (b"-Infinity", 400, "not JSON"),
        (b'"1"', 400, "expected"),
        (b"true", 400, "expected"),
        (b"[1]", 400, "expected"),
        (b"null", 400, "expected"),
        (b'{"accuracy": 1}', 400, "with `reward`"),
        (b'{"reward": 1, "accuracy": "1"}', 400, "expected"),
        (b'{"reward": 1, "accuracy": 1e300}', 400, "no finite number"),
        (b'{"reward": 1, "\\u001b[2J": 1}', 400, "no metric's name"),
        (json.dumps({"reward": 1, **{f"m{n}": n for n in range(32)}}).encode(), 400, "32 numbers"),
        (b"[" * 60_000, 400, ""),
        (b" " * 70_000 + b"1", 413, "65536 bytes"),
        (b"\xff", 400, ""),
    ],
)
async def test_what_is_no_reward_is_refused(tmp_path: Path, raw: bytes, status: int, message: str) -> None:
    async with registry_of(tmp_path, group("a")) as (registry, _, _):
        session = await registry.start()
        answer = await registry.post(f"/{session['id']}/reward", session["api_key"], raw=raw)
        assert answer[0] == status
        assert message in answer[1]["error"]["message"]
        assert "\x1b" not in answer[1]["error"]["message"]
        assert (await registry.post(f"/{session['id']}/reward", session["api_key"], 1.0))[0] == 200
        assert (await registry.post(f"/{session['id']}/reward", session["api_key"], 1.0))[0] == 409


async def test_only_the_right_keys_are_accepted(tmp_path: Path) -> None:
    async with registry_of(tmp_path, group("a"), group("b")) as (registry, _, _):
        first, second = await registry.start(), await registry.start()
        for path in ("", f"/{first['id']}/reward", f"/{first['id']}/end", "/sess_other/end"):
            for key in ("", "other", "\xff", second["api_key"]):
                status, answer = await registry.post(path, key, {} if path.endswith("end") else 1.0)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await registry.post("", first["api_key"]))[0] == 401
        status, answer = await registry.post("/sess_other/end", registry.token)
        assert (status, "may have restarted" in answer["error"]["message"]) == (410, True)
        with pytest.raises(openai.AuthenticationError):  # the token alone does not open the policy
            await registry.ask({**first, "api_key": registry.token})
        assert await registry.ask(first) == "a"


async def test_a_start_waits_for_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_online.registry._WAIT_S", 0.2)
    async with registry_of(tmp_path) as (registry, _, _):
        assert await registry.post("", registry.token) == (204, None)
    monkeypatch.setattr("stretto_online.registry._WAIT_S", 20)
    async with registry_of(tmp_path, group("a")) as (registry, [ticket], tasks):
        await registry.start()
        started: list[Any] = []

        async def start_next() -> None:
            started.append(await registry.start())

        tasks.start_soon(start_next)
        late = Ticket(ticket._workflow, group("b"))  # pyright: ignore[reportPrivateUsage]
        tasks.start_soon(late.run)
        await until(lambda: started)
        assert await registry.ask(started[0]) == "b"


# ------------------------------------------------------------------------------------------ whole runs

POLICY = """
def answer(prompt, seed):
    return "yes" if seed % 2 else "no"
"""


def online(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "policy.py").write_text(POLICY)
    file = tmp_path / "run.yaml"
    file.write_text(file.read_text().replace("reward: exact\n", ""))
    return [
        *("workflow=online", f"inference={{use: mock, script: '{tmp_path}/policy.py:answer'}}"),
        *("algorithm.group_size=2", "queue.batch_size=2", "rollout.concurrency=6", *more),
    ]


@pytest.mark.slow
def test_the_program_of_the_page_trains(start: Callable[..., Any], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    program = page.partition("# program.py\n")[2].partition("```")[0]
    assert "runs/mine" in program
    (tmp_path / "program.py").write_text(program.replace("runs/mine", f"{tmp_path}/out"))
    run = start(*online(tmp_path, "steps=3"))
    run.until((tmp_path / "out" / "sessions" / "rollout-0.json").exists)
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stderr=subprocess.PIPE) as process:
        run.assert_completed(3, batch_size=2)
        process.kill()  # it continues until it finds no worker
    assert 0 < sum(line["reward"] for line in run.metrics()) < 3
    token = json.loads((tmp_path / "out" / "sessions" / "rollout-0.json").read_text())["token"]
    written = [path.read_text(errors="replace") for path in (run.folder / "logs").iterdir()]
    assert not any(token in text or "sk-" in text for text in [*written, run.text()])


def test_check_wants_no_reward_and_one_worker_for_a_port(tmp_path: Path) -> None:
    file = write_run(tmp_path, steps=1, workflow={"use": "online"}, reward=None)

    def faults(*overrides: str) -> list[str]:
        return faults_and_warnings(Assembly(compose(file, overrides)), starting=False)[0]

    assert faults() == []
    [fault] = faults("reward=exact")
    assert "the sessions of the workflow 'online' post their rewards" in fault
    [fault] = faults("workflow.port=9999", "rollout.processes=2")
    assert "2 rollout workers cannot listen on one port" in fault
