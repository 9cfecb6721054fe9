"""Dataset, workflow and reward `verifiers`, against a stand-in that sends what the library sent in recorded
episodes, and against the library.

STRETTO_VERIFIERS_PYTHON names an interpreter that has it and uv: `pip install 'verifiers>=0.4' uv`.
STRETTO_TEXTARENA_PYTHON, STRETTO_OPENENV_PYTHON and STRETTO_HARBOR_PYTHON (3.12) name interpreters that also
have its extra `ta`, `openenv` or `harbor`, and STRETTO_SMALL_MODEL a chat model that two cores can train.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import numpy as np
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from patience import SOON_S, patience
from processes import arguments_of
from stretto import Context
from stretto.agents.endpoint import Endpoint
from stretto.errors import ConfigError
from stretto.records.run_folder import open_samples
from stretto.testing import FakeSession
from stretto.user_code.sandbox import sandbox_problem
from stretto.workflow import Prompt
from stretto_verifiers import Verifiers, VerifiersConfig, VerifiersWorkflowConfig
from stretto_verifiers.workflow import EpisodeError, VerifiersWorkflow

EPISODES_FILE = Path(__file__).parents[1] / "fixtures" / "episodes.verifiers-0.4.0.json"
RECORDED = json.loads(EPISODES_FILE.read_text())
EPISODES: dict[str, Any] = RECORDED["episodes"]
"""What the library sent to the endpoint in one episode of each environment, what was sampled, and what the
library got. Of the chat, a call has the messages that it adds."""

# As much of the library as `environment.py` uses: sums, and recorded episodes. It sends requests as recorded.
LIBRARY = """
import asyncio, contextlib, http.client, json, os
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any
from urllib.parse import urlsplit

EPISODES = json.loads(Path(__file__).with_name("episodes.json").read_text())["episodes"]

class AgentConfig: ...
class EvalClientConfig(Space): ...
class ModelContext(Space): ...

def env_config_type(taskset, env):
    if taskset not in ("sums", *EPISODES):
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
    return Space(model_fields={"solver": Space(default=AgentConfig()), "id": Space(default="")})

def resolve_env_config(data):
    assert data["solver"]["runtime"] == {"type": "subprocess"}, data
    return data

class Tasks(list):
    bounded = True
    def take(self, size):
        return Tasks(self[:size])

class Data(Space):
    def model_dump(self, **options):
        return {"n": self.n}

def task(n):
    data = Data(n=n, name=f"sum {n}", id=None, prompt_text=f"{n}+1=?", system_prompt="Add.")
    return Space(data=data, key=f"key-{n}-{os.environ.get('SALT', '')}")

def load_environment(config):
    print("a library may print")
    return Environment(config)

class Environment:
    def __init__(self, config):
        self.taskset = Tasks(task(n) for n in range(config["taskset"].get("rows", 5)))
        self.recorded = EPISODES.get(config["taskset"]["id"])
    @contextlib.asynccontextmanager
    async def serving(self):
        yield
    def slots(self, task):
        return [task]
    async def run_slot(self, task, context):
        n = task.data.n
        if n == 1:
            return Space(ok=False, traces=[], errors=[Space(type="TaskError", message="cannot be added")])
        if n == 2:
            await asyncio.sleep(3600)
        if n == 3:
            os._exit(7)
        trace = await asyncio.to_thread(self.replay if self.recorded else self.add, task, context)
        return Space(ok=True, errors=[], traces=[trace])
    def replay(self, task, context):
        chat, verdict = [], dict(self.recorded["verdict"])
        for call in self.recorded["calls"]:
            chat += call.get("adds", [])
            got = ask(context, self.recorded, call["request"], chat)
            assert got == call["answer"], f"the endpoint answered {got}, not {call['answer']}"
        return Space(reward=verdict.pop("reward"), metrics=verdict)
    def add(self, task, context):
        messages = [{"role": "user", "content": task.data.prompt_text}]
        chunks = ask(context, EPISODES["textarena"], "POST /v1/chat/completions", messages)
        reply = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        return Space(reward=float(reply == str(task.data.n + 1)), metrics={"length": float(len(reply))})

def ask(context, form, request, messages):
    method, path = request.split()
    body = json.dumps({**form["body"], "messages": messages}, ensure_ascii=False) if method == "POST" else ""
    key = os.environ[context.client.api_key_var]
    headers = {**form["headers"][request], "Authorization": f"Bearer {key}"}
    client = http.client.HTTPConnection(urlsplit(context.client.base_url).netloc)
    with contextlib.closing(client):
        client.request(method, path, body.encode() or None, headers)
        answer = client.getresponse()
        text = answer.read().decode()
    assert answer.status == 200, text
    return data_of(answer.headers.get_content_type(), text)

"""


def data_of(kind: str, text: str) -> Any:
    """Return the data of an answer; of a stream, without what differs from one answer to another."""
    if kind != "text/event-stream":
        return json.loads(text)
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), text
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1, text
    return chunks


@pytest.fixture
def library(tmp_path: Path) -> Path:
    package = tmp_path / "library" / "verifiers" / "v1"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(LIBRARY + inspect.getsource(data_of))
    (package / "episodes.json").write_text(EPISODES_FILE.read_text())
    return tmp_path / "library"


def tasks(library: Path, **keys: Any) -> Verifiers:
    plain: dict[str, Any] = {"environment": "sums", "python": sys.executable, "path": str(library), **keys}
    return Verifiers(VerifiersConfig(use="verifiers", **plain), Context(run="r", name="n", seed=1))


@pytest.fixture
async def workflow() -> AsyncIterator[VerifiersWorkflow]:
    config = VerifiersWorkflowConfig(use="verifiers", episode_timeout_s=patience(20), timeout_s=patience(60))
    mode: Any = "unsafe" if sandbox_problem() else "bubblewrap"
    made = VerifiersWorkflow(config, Context(run="r", name="n", seed=1, sandbox=mode))
    yield made
    await made.end()
    await made.endpoint.stop()


async def play(
    workflow: VerifiersWorkflow, row: dict[str, Any], session: FakeSession | None = None
) -> list[Any]:
    prompt = Prompt(row, np.zeros(1, np.int32))
    return list(await workflow.run(prompt, session or FakeSession(["1"])))


# ----------------------------------------------------------------------------------------- dataset


def test_rows_are_the_tasks_of_the_environment(library: Path) -> None:
    rows = tasks(library, size=4)
    assert len(rows) == 4
    row = rows[3]
    assert row["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+1=?"}]
    assert (row["id"], row["data"]) == ("sum 3", {"n": 3})
    assert (row["verifiers"]["task"], row["verifiers"]["key"]) == (3, "key-3-")
    assert rows.fingerprint == tasks(library, size=4).fingerprint
    assert rows.fingerprint != tasks(library, options={"taskset": {"rows": 4}}).fingerprint


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"environment": "sumz"}, "cannot load .*: ModuleNotFoundError: taskset 'sumz' not found"),
        ({"options": {"taskset": {"rows": "x"}}}, "cannot load .*: TypeError"),
        ({"python": "/bin/false"}, "cannot list the tasks of .*: /bin/false ended with status 1"),
        ({"python": "/no/python"}, "cannot list the tasks of .*No such file"),
        ({"path": None}, "No module named 'verifiers'"),
    ],
)
def test_an_environment_that_is_not_there_says_so(library: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks(library, **keys)


# ---------------------------------------------------------------------------------------- workflow


async def test_an_episode_is_what_was_sampled_with_the_environments_verdict(
    library: Path, workflow: VerifiersWorkflow
) -> None:
    session, rows = FakeSession(["1"], reward=lambda text: 0.25), tasks(library)
    trajectories = await play(workflow, rows[0], session)
    await play(workflow, rows[4], session)
    right, wrong = session.scored
    assert (right.texts, wrong.texts) == (["1", "1"], ["1", "1"])
    assert right.columns["verdict"] == [{"reward": 1.0, "length": 1.0}] * 2
    assert wrong.columns["verdict"] == [{"reward": 0.0, "length": 1.0}] * 2
    assert [each.score.reward for each in trajectories] == [0.25, 0.25]
    assert [each.tokens[each.loss_mask].tolist() for each in trajectories] == [[49], [49]]


@pytest.mark.parametrize("name", ["textarena", "openenv", "harbor"])
async def test_a_recorded_episode_is_one_trajectory(
    library: Path, workflow: VerifiersWorkflow, name: str
) -> None:
    recorded = EPISODES[name]
    calls = [call for call in recorded["calls"] if "samples" in call]
    session = FakeSession([call["samples"] for call in calls], size=1)
    [trajectory] = await play(workflow, tasks(library, environment=name)[0], session)
    sampled = np.concatenate([each.answer.tokens for each in session.generated])
    assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled.tolist()
    assert session.tokenizer.decode(sampled) == "".join(call["samples"] for call in calls)
    assert session.scored[0].columns["verdict"] == [recorded["verdict"]]
    text = session.tokenizer.decode(trajectory.tokens)
    assert all(message["content"] in text for call in calls for message in call["adds"])


async def test_a_fault_in_an_episode_fails_it_alone(library: Path, workflow: VerifiersWorkflow) -> None:
    rows = tasks(library)
    with pytest.raises(EpisodeError, match="the episode failed: RuntimeError: TaskError: cannot be added"):
        await play(workflow, rows[1])
    with pytest.raises(EpisodeError, match="task 0 is not the one that the row was made from"):
        await play(workflow, {**rows[0], "verifiers": {**rows[0]["verifiers"], "key": "other"}})
    with pytest.raises(EpisodeError, match="no column 'verifiers'; use the dataset `verifiers`"):
        await play(workflow, {"prompt": "1+1="})
    with anyio.move_on_after(patience(0.5)) as given_up:  # by the kernel, say
        await play(workflow, rows[2])
    assert given_up.cancelled_caught
    [process] = _environments()
    assert len(await play(workflow, rows[0])) == 2
    with pytest.raises(EpisodeError, match="the environment's process ended with status"):
        await play(workflow, rows[3])
    assert len(await play(workflow, rows[0])) == 2  # by a new one
    [successor] = _environments()
    assert successor.pid != process.pid


async def test_an_episode_has_a_time_limit(library: Path) -> None:
    config = VerifiersWorkflowConfig(use="verifiers", episode_timeout_s=patience(1), timeout_s=patience(60))
    workflow = VerifiersWorkflow(config, Context(run="r", name="n", seed=1, sandbox="unsafe"))
    with pytest.raises(EpisodeError, match="took longer than episode_timeout_s="):
        await play(workflow, tasks(library)[2])
    await workflow.end()
    await workflow.endpoint.stop()
    with anyio.fail_after(patience()):
        while _environments():
            await anyio.sleep(SOON_S)


@pytest.mark.skipif("sandbox_problem()", reason="no sandbox")
async def test_private_folders_are_empty_in_each_episode(library: Path) -> None:
    [file] = library.glob("**/v1/__init__.py")
    begin = "        n = task.data.n\n"
    use = "import pathlib; logs = pathlib.Path('/logs'); assert not [*logs.iterdir()]; (logs / 'x').touch()"
    file.write_text(file.read_text().replace(begin, f"        {use}\n{begin}", 1))
    keys: Any = {"episode_timeout_s": patience(20), "timeout_s": patience(60), "private": ("/logs",)}
    config = VerifiersWorkflowConfig(use="verifiers", **keys)
    workflow = VerifiersWorkflow(config, Context(run="r", name="n", seed=1, sandbox="bubblewrap"))
    row = tasks(library)[0]
    assert len(await play(workflow, row)) == 2
    assert len(await play(workflow, row)) == 2
    assert not _environments()
    await workflow.endpoint.stop()


@pytest.mark.parametrize("folder", ["logs", "/", "/logs/../etc"])
def test_private_folders_are_below_the_root(folder: str) -> None:
    with pytest.raises(ValueError, match="no absolute path of a folder below /"):
        VerifiersWorkflowConfig(use="verifiers", private=(folder,))


def test_tasks_cached_below_another_home_are_the_same(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [file] = library.glob("**/v1/__init__.py")
    dump = "return {'folder': os.environ['HOME'] + '/.cache/t'}"
    file.write_text(file.read_text().replace('return {"n": self.n}', dump))
    keys: list[str] = []
    for home, salt in (("/root", "a"), ("/tmp/b", "b")):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("SALT", salt)  # changes the library's own key
        keys.append(tasks(library)[0]["verifiers"]["key"])
    assert keys[0] == keys[1]


def _environments() -> list[psutil.Process]:
    """Processes that play, the sandbox around them left out."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if "".join(arguments_of(each)[1:2]).endswith("environment.py")]


# -------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_run_trains_on_an_environment(start: Any, library: Path) -> None:
    run = start(*_run_on(sys.executable, library), "dataset.size=1", out="verifiers")
    run.assert_completed(steps=1, batch_size=2, bound=0)
    [step] = run.metrics()
    assert (step["reward/calls"], step["truncated"]) == (1.0, 0.0)
    assert "reward/length" in step


def test_the_workflow_plays_rows_of_its_own_dataset_only(refusals: Callable[..., list[str]]) -> None:
    [fault] = refusals("workflow=verifiers", "reward=verifiers", "sandbox=unsafe")
    assert fault.endswith(": dataset.use: is 'jsonl'; the workflow 'verifiers' needs the dataset 'verifiers'")


def test_private_folders_need_a_sandbox(refusals: Callable[..., list[str]]) -> None:
    faults = refusals("workflow={use: verifiers, private: [/tests]}", "reward=verifiers", "sandbox=unsafe")
    assert any("workflow.private: needs a sandbox" in fault for fault in faults)


def _run_on(python: str, folder: Path) -> list[str]:
    return [
        *("dataset.use=verifiers", "dataset.environment=sums"),
        *(f"dataset.python={python}", f"dataset.path={folder}"),
        *("workflow=verifiers", "reward=verifiers", "steps=1", "algorithm.group_size=2"),
        *("queue.batch_size=2", "queue.max_staleness=0"),
        f"sandbox={'unsafe' if sandbox_problem() else 'bubblewrap'}",
    ]


SUMS = """\
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def answered(self, trace) -> float:
        return float(bool(trace.last_reply))

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield Sum(Data(prompt=f"{n}+1=?", answer=str(n + 1)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.mark.slow
@pytest.mark.skipif("STRETTO_VERIFIERS_PYTHON" not in os.environ, reason="no interpreter with verifiers")
def test_a_run_trains_on_an_environment_of_the_library(start: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sums.py").write_text(SUMS)
    run = start(
        *_run_on(os.environ["STRETTO_VERIFIERS_PYTHON"], tmp_path / "own"),
        "dataset.options={agent: {harness: {id: 'null'}}}",
        *("inference.mean_tokens=12", "inference.sigma=0"),
        *(f"workflow.env.{name}={os.environ[name]}" for name in ("SSL_CERT_FILE",) if name in os.environ),
        out="real",
    )
    assert run.end() == 0, run.text()
    [step] = run.metrics()
    assert (step["reward"], step["length"], step["reward/calls"]) == (0.5, 12.0, 1.0)
    assert step["reward/characters"] > 0


# ----------------------------------------------------------- TextArena, OpenEnv and Harbor, by `verifiers`

SERVER = """\
import sys
from aiohttp import web

ACTION = {"title": "Guess", "properties": {"guess": {"type": "string"}}, "required": ["guess"]}

async def schema(request):
    return web.json_response({"action": ACTION})

async def play(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    steps = 0
    async for message in socket:
        order = message.json()
        if order["type"] == "close":
            break
        steps += order["type"] == "step"
        right = order["type"] == "step" and str(order["data"]["guess"]) == "7"
        data = {"observation": {"text": "a digit"}, "reward": float(right), "done": right or steps == 2}
        await socket.send_json({"type": "observation", "data": data})
    return socket

async def main():
    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", play)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

import asyncio
asyncio.run(main())
"""
ANSWERS = """\
import re

def textarena(prompt, seed):
    return "[stone]"

def openenv(prompt, seed):
    return "7"

def harbor(prompt, seed):
    if "printf" in prompt:
        return "done"
    command = "printf " + re.search("the word ([a-z]+)", prompt)[1] + " > answer.txt"
    return '<tool_call>{"name": "bash", "arguments": {"command": "' + command + '"}}</tool_call>'
"""
GRADE = """\
verdict='{"reward": %d, "characters": %d}'
printf "$verdict" $(grep -c "^apple$" answer.txt) $(wc -c < answer.txt) > /logs/verifier/reward.json
"""

NULL = {"harness": {"id": "null"}}
Settings = tuple[dict[str, Any], dict[str, Any]]
"""Options of the dataset, and keys of the workflow."""


@contextmanager
def textarena(folder: Path) -> Generator[Settings]:
    """A game whose words are this test's: nltk would download its own."""
    words = folder / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("stone\n")
    yield {"taskset": {"game": "Hangman-v0"}, "player": NULL}, {"env": {"NLTK_DATA": str(folder / "nltk")}}


@contextmanager
def openenv(folder: Path) -> Generator[Settings]:
    (folder / "server.py").write_text(SERVER)
    server = subprocess.Popen([sys.executable, folder / "server.py"], stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            yield {"taskset": {"base_url": url, "resets": [{}, {}]}, "player": NULL}, {}
        finally:
            server.kill()


@contextmanager
def harbor(folder: Path) -> Generator[Settings]:
    """Two tasks in a git repository: the registry's own paths are not copied by `harbor download`."""
    tasks: list[dict[str, str]] = []
    for name in ("one", "two"):
        (folder / "repo" / name / "tests").mkdir(parents=True)
        (folder / "repo" / name / "task.toml").write_text('version = "1.0"')
        (folder / "repo" / name / "instruction.md").write_text("Write the word apple into answer.txt.")
        (folder / "repo" / name / "tests" / "test.sh").write_text(GRADE)
        tasks.append({"name": name, "git_url": f"file://{folder}/repo", "path": name})
    for command in ("init -q", "add -A", "-c user.name=t -c user.email=t@t commit -qm tasks"):
        subprocess.run(["git", *command.split()], cwd=folder / "repo", check=True)
    registry = [{"name": folder.name, "version": "1", "description": "", "tasks": tasks}]
    (folder / "registry.json").write_text(json.dumps(registry))
    taskset = {"dataset": f"{folder.name}@1", "registry_path": str(folder / "registry.json")}
    yield {"taskset": taskset, "agent": {"harness": {"id": "bash"}}}, {"private": ["/tests", "/logs"]}


@contextmanager
def settings_of(prepare: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Settings]:
    """Yield the sections of dataset and workflow for an environment; skip the test if it is not installed."""
    name = prepare.__name__
    if (python := os.environ.get(f"STRETTO_{name.upper()}_PYTHON")) is None:
        pytest.skip("no interpreter with this library")
    with prepare(folder) as (options, workflow):
        variables = {"SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE", ""), **workflow.get("env", {})}
        workflow |= {"use": "verifiers", "readable": [str(folder)], "max_calls": 8, "env": variables}
        for key, value in variables.items():
            monkeypatch.setenv(key, value)  # the tasks are listed outside of the sandbox
        dataset = {"use": "verifiers", "size": 2, "environment": name, "python": python, "options": options}
        yield dataset, workflow


@pytest.mark.nightly
@pytest.mark.skipif("sandbox_problem(network=True)", reason="no sandbox")
@pytest.mark.parametrize("prepare", [textarena, openenv, harbor])
@pytest.mark.parametrize("engine", ["mock", "model"])
def test_an_environment_of_another_library(
    start: Any, tmp_path: Path, prepare: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, model = prepare.__name__, os.environ.get("STRETTO_SMALL_MODEL")
    if engine == "model" and model is None:
        pytest.skip("no model")
    (tmp_path / "answers.py").write_text(ANSWERS)
    inference = {"use": "mock", "script": f"{tmp_path}/answers.py:{name}"}
    keys = [f"inference={json.dumps(inference)}", "sampling.max_tokens=200"]
    if engine == "model":
        keys = [f"model={model}", "training={use: torch, lr: 1.0e-6}", "sampling.max_tokens=16"]
        keys.append("inference={use: torch, context_length: 2048, slots: 4}")
    with settings_of(prepare, tmp_path, monkeypatch) as (dataset, workflow):
        given = [f"dataset={json.dumps(dataset)}", f"workflow={json.dumps(workflow)}", "samples.keep=all"]
        run = start(*_run_on(dataset["python"], tmp_path), *given, *keys)
        assert run.end() == 0, run.text()
    [step] = run.metrics()
    assert (step["reward"] == 1.0) if engine == "mock" else (0 <= step["reward"] <= 1)
    for sample in open_samples(run.folder).find(limit=3):
        print(name, engine, sample["reward"], repr(sample["text"]))


@pytest.mark.nightly
@pytest.mark.skipif("sandbox_problem(network=True)", reason="no sandbox")
@pytest.mark.parametrize("prepare", [textarena, openenv, harbor])
async def test_the_library_sends_what_was_recorded(
    tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not, set STRETTO_RECORD to record the episode, and write its versions into the file."""
    recorded = EPISODES[prepare.__name__]
    samples = [call["samples"] for call in recorded["calls"] if "samples" in call]
    session = FakeSession(samples, size=1)
    with settings_of(prepare, tmp_path, monkeypatch) as (dataset, keys):
        context = Context(run="r", name="n", seed=1, sandbox="bubblewrap")
        rows = Verifiers(msgspec.convert(dataset, VerifiersConfig), context)
        workflow = VerifiersWorkflow(msgspec.convert(keys, VerifiersWorkflowConfig), context)
        async with recording(workflow.endpoint, samples) as seen:
            await play(workflow, rows[0], session)
        await workflow.end()
        await workflow.endpoint.stop()
    seen["verdict"] = session.scored[0].columns["verdict"][0]
    if "STRETTO_RECORD" in os.environ:
        EPISODES[prepare.__name__] = seen
        EPISODES_FILE.write_text(json.dumps(RECORDED, indent=1, ensure_ascii=False) + "\n")
        return
    sent, expected = (  # the values of headers name the machine, and the versions of clients
        {**episode, "headers": {request: [*values] for request, values in episode["headers"].items()}}
        for episode in (seen, recorded)
    )
    assert sent == expected


@asynccontextmanager
async def recording(endpoint: Endpoint, samples: list[str]) -> AsyncGenerator[dict[str, Any]]:
    """Yield what clients of the endpoint send and get inside the block, in the form of `EPISODES`."""
    await endpoint.start()
    origin, left = endpoint.base_url.removesuffix("/v1"), iter(samples)
    chat: list[Any] = []
    seen: dict[str, Any] = {"headers": {}, "calls": []}

    async def relay(request: web.BaseRequest) -> web.Response:
        line, body = f"{request.method} {request.path}", await request.read()
        url, headers = f"{origin}{request.path}", request.headers
        async with aiohttp.request(request.method, url, data=body, headers=headers) as answer:
            text = await answer.text()
        call: dict[str, Any] = {"request": line}
        if body:
            form = json.loads(body)
            messages = form.pop("messages")
            assert (messages[: len(chat)], seen.setdefault("body", form)) == (chat, form)
            call |= {"adds": messages[len(chat) :], "samples": next(left)}
            chat[:] = messages
        seen["calls"].append({**call, "answer": data_of(answer.content_type, text)})
        shown = {name: headers[name] for name in headers if name not in ("Host", "Content-Length")}
        hidden = {"Authorization": "Bearer KEY", "X-Session-ID": "SESSION"}
        shown |= {name: value for name, value in hidden.items() if name in shown}
        assert seen["headers"].setdefault(line, shown) == shown
        return web.Response(text=text, status=answer.status, content_type=answer.content_type)

    async with RawTestServer(relay) as server:
        endpoint.base_url = str(server.make_url("/v1"))
        yield seen
