"""Engines that are servers: what a run file is refused for, and what becomes of samples when a server is in
trouble. The servers are small stand-ins; real ones are in `integration/`."""

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from bus_testing import until
from kernel_setup import write_run
from patience import patience
from processes import arguments_of
from stand_in_engine import STAND_IN, StandInEngine
from stretto.array import Array
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start.checks import problems
from stretto.component import Context
from stretto.engine import Chunk, GenerateRequest, Sampling
from stretto.errors import ConfigError, EngineError, WeightsError, leaves
from stretto.launcher import ALLOCATOR_VARIABLES, thread_variables
from stretto.models.version_files import FolderPublisher, open_version
from stretto.serving.config import ServerEngineConfig, flags
from stretto.serving.engine import ServerEngine
from stretto.serving.server import Server, ServerCommand
from stretto.serving.streams import Ask, StreamChunk
from stretto_sglang import SglangConfig
from stretto_sglang.checksums import Checksums
from stretto_sglang.engine import SglangEngine
from stretto_torch import TorchTrainingConfig
from stretto_vllm import VllmConfig
from stretto_vllm.engine import VllmEngine

PROMPT = [3, 4, 5]
URLS = "inference.urls=[http://a:1]"
EVALUATION = "evaluation.dataset={use: jsonl, path: rows.jsonl}"


# ---------------------------------------------------------------------------------- the run file


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, steps=1)


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["inference.python=/"], "inference.python", "is a folder; expected path/to/venv/bin/python"),
        (["inference.python=rows.jsonl"], "inference.python", "is not an executable file"),
        (["inference.python={this}"], "inference.python", "has no module 'vllm'"),
        (["inference.python=/bin/sh"], "inference.python", "is not a Python interpreter"),
        ([URLS, "inference.replicas=2"], "inference.urls", "1 server(s) for 2"),
        ([URLS, "inference.python=/bin/sh"], "inference.urls", "excludes inference.python"),
        ([URLS, "inference.args={x: 1}"], "inference.args", "urls are running"),
        (["inference.urls=[http://a:1, http://b:1]", EVALUATION, "evaluation.own_engine=true"],
         "evaluation.own_engine", "needs one more server"),
        ([URLS, "inference.sleep=true"], "inference.sleep", "servers that the workers start"),
        (["inference.deterministic=true"], "inference.deterministic", "cannot repeat answers"),
        (["inference.args={port: 1}"], "inference.args.port", "the worker sets --port"),
        (["inference.args={max_num_seqs: 1}"], "inference.args.max_num_seqs", "set inference.slots instead"),
        (["inference.context_length=200"], "inference.context_length", "sampling.max_tokens (256) need more"),
        (["inference.tensor_parallel=2", "inference.gpus=1"], "inference.tensor_parallel", "has 1 GPU(s)"),
        (["inference.api_key=k"], "inference.api_key", "is for the servers in urls"),
        (["sampling.temperature=0.005"], "sampling", "temperature 0.005: vLLM supports 0 and 0.01 to 2"),
        (["inference=sglang", EVALUATION, "evaluation.sampling={top_k: 20, top_p: 0.8}"],
         "evaluation.sampling", "top_k 20 with top_p 0.8: SGLang"),
    ],
)  # fmt: skip
def test_check_refuses_a_section_that_cannot_work(
    run_file: Path, overrides: list[str], path: str, message: str
) -> None:
    given = [override.replace("{this}", sys.executable) for override in overrides]
    found = problems(Assembly(compose(run_file, ["inference=vllm", *given])))
    assert any(problem.path == path and message in problem.message for problem in found), found


def test_an_interpreter_that_is_not_there_is_refused_with_its_place(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"inference.python: no such file or folder: 'no/python'"):
        compose(run_file, ["inference=sglang", "inference.python=no/python"])


def test_an_interpreter_that_is_a_link_stays_one(run_file: Path, tmp_path: Path) -> None:
    """In a virtual environment it is, and only under its own name does it find that environment's
    packages."""
    (tmp_path / "python").symlink_to(sys.executable)
    config = compose(run_file, ["inference=sglang", "inference.python=python"]).config.inference
    assert isinstance(config, SglangConfig)
    assert config.python == str(tmp_path / "python")


def test_flags_of_the_run_file_win() -> None:
    own = {"--port": 1, "--enforce-eager": True, "--swap": False}
    given = {"block_size": 32, "enforce-eager": False, "--lora-modules": ("a", "b"), "trace": True}
    line = ["--port", "1", "--block-size", "32", "--lora-modules", "a", "--lora-modules", "b", "--trace"]
    assert flags(own, given) == line


@pytest.mark.parametrize(("engine", "config"), [(VllmEngine, VllmConfig), (SglangEngine, SglangConfig)])
async def test_the_key_stands_in_no_command_line(
    engine: Callable[[Any, Context], ServerEngine], config: type[ServerEngineConfig]
) -> None:
    context = Context(run="r", name="n", seed=1, model="m")
    command = engine(config(use="any", python=sys.executable), context).command(1234, "the-key")
    assert "the-key" not in " ".join(command.arguments)
    assert "the-key" in command.env.values()
    assert "127.0.0.1" in command.arguments


@pytest.mark.parametrize(("engine", "config"), [(VllmEngine, VllmConfig), (SglangEngine, SglangConfig)])
def test_segments_of_a_trainer_grow_and_those_of_a_server_that_sleeps_do_not(
    engine: Callable[[Any, Context], ServerEngine],
    config: type[ServerEngineConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes of many sizes leave pieces that none fits into. The pool of a sleeping server refuses it."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    asleep = config(use="any", python=sys.executable, gpus=1, sleep=True)
    grown = dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
    assert thread_variables(TorchTrainingConfig(gpus=1)).items() >= grown.items()
    for section in (TorchTrainingConfig(), asleep):
        assert not thread_variables(section).keys() & grown.keys()
    context = Context(run="r", name="n", seed=1, model="m")
    assert {engine(asleep, context).command(1, "key").env[name] for name in grown} == {""}
    monkeypatch.setenv(ALLOCATOR_VARIABLES[1], "max_split_size_mb:512")
    assert not thread_variables(TorchTrainingConfig(gpus=1)).keys() & grown.keys(), "a user's own"


# -------------------------------------------------------------------------------------- the server


class Engine(StandInEngine):
    """Every request of this file has this prompt."""

    prompt_tokens = len(PROMPT)


def version_of(folder: Path, version: int) -> Any:
    """A version of weights, as the `file` transport gives it."""
    note = FolderPublisher(folder / f"{version}", 1, 1.0).publish(version, iter([("w", torch.ones(1))]))
    return open_version(note, Path(note.address))


class Answers:
    """All that an engine emits, in order and without gaps."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.versions: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.errors: list[str] = []

    def emit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            key = chunk.request, chunk.sample
            assert key not in self.finish, "a chunk after the last one"
            tokens = self.tokens.setdefault(key, [])
            assert chunk.position == len(tokens), "a gap, or a token twice"
            assert [-version for version in chunk.versions.tolist()] == chunk.logprobs.tolist()
            tokens += chunk.tokens.tolist()
            self.versions.setdefault(key, []).extend(chunk.versions.tolist())
            if chunk.finish:
                self.finish[key] = chunk.finish
                self.errors += [chunk.error] if chunk.error else []


def right(count: int) -> list[int]:
    """The stand-in's answer to the prompt."""
    return [(sum(PROMPT) + position) % 97 for position in range(count)]


def request(id: str, samples: int = 1, tokens: int = 100, **more: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=tokens, stop=more.pop("stop", ()))
    ids = Array.of(np.array(PROMPT, np.int32))
    return GenerateRequest(id, ids, tuple(range(samples)), sampling, more.pop("min_version", 0), **more)


Started = tuple[Engine, Answers]


@asynccontextmanager
async def started(folder: Path, version: int | None = 0, /, **options: Any) -> AsyncGenerator[Started]:
    """An engine that serves a version, and what it emits."""
    options = {"python": sys.executable, "slots": 4, "start_timeout_s": patience(20.0)} | options
    context = Context(run="r", name="n", seed=1, folder=str(folder), worker="inference-0")
    engine, answers = Engine(ServerEngineConfig(use="stand_in", **options), context), Answers()
    try:
        async with anyio.create_task_group() as tasks:
            await engine.start(answers.emit, tasks)
            if version is not None:
                await engine.swap(version_of(folder / "weights", version))
            yield engine, answers
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.stop()


def process_of(folder: Path) -> psutil.Process:
    """The server's own process, of the last one started."""
    lines = (folder / "logs" / "inference-0-server.log").read_text().splitlines()
    child = next(line.split()[1] for line in reversed(lines) if line.startswith("child"))
    parent = psutil.Process(int(child)).parent()
    assert parent is not None
    return parent


async def test_nothing_is_served_before_a_swap_and_every_version_is_told_right(tmp_path: Path) -> None:
    async with started(tmp_path, None) as (engine, answers):
        engine.generate(request("early", 6, tokens=150))
        engine.generate(request("later", 1, tokens=5, min_version=2))
        await anyio.sleep(patience(0.1))
        assert not answers.tokens
        for version in range(3):
            report = await engine.swap(version_of(tmp_path / "weights", version))
            assert report.pause_s < 5
            if version < 2:
                assert ("later", 0) not in answers.tokens
                running = engine.load().generated_tokens
                await until(lambda running=running: engine.load().generated_tokens > running + 40)
        await until(lambda: len(answers.finish) == 7)
        assert set(answers.finish.values()) == {"length"}
        assert all(answers.tokens["early", sample] == right(150) for sample in range(6))
        versions = answers.versions["early", 0]
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        assert set(answers.versions["later", 0]) == {2}
        load = engine.load()
        assert (load.version, load.running, load.waiting, load.swaps) == (2, 0, 0, 3)
        assert load.generated_tokens == 905


async def test_a_killed_server_is_started_again_and_no_token_is_lost_or_doubled(tmp_path: Path) -> None:
    async with started(tmp_path, None) as (engine, answers):
        update = version_of(tmp_path / "weights", 0)
        await engine.swap(update)
        assert update.folder is not None
        for file in update.folder.iterdir():  # its publisher removes old versions
            file.unlink()
        engine.generate(request("a", 6, tokens=120))
        await until(lambda: len(answers.tokens) == 4 and engine.load().generated_tokens > 60)
        server = process_of(tmp_path)
        child = server.children()[0]
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: len(answers.finish) == 6)
        assert all(answers.tokens["a", sample] == right(120) for sample in range(6))
        assert process_of(tmp_path).pid != server.pid
        assert not child.is_running(), "a process of the lost server is left"


async def memory_of(engine: Engine) -> list[str]:
    server = engine._current_server()  # pyright: ignore[reportPrivateUsage]
    return (await server.get("/state", deadline_s=patience()))["memory"]


async def test_a_server_sleeps_until_a_swap_also_if_it_is_killed(tmp_path: Path) -> None:
    """The stand-in ends if a call comes in a wrong order."""
    async with started(tmp_path, None, sleep=True, restarts=1) as (engine, answers):
        for version in (0, 0, 1):
            await engine.sleep()
            await engine.sleep()
            assert (engine.load().version, await memory_of(engine)) == (-1, [])
            if version:
                process_of(tmp_path).kill()
            await engine.swap(version_of(tmp_path / f"{version}-{len(answers.finish)}", version))
            assert await memory_of(engine) == ["kv_cache", "weights"]
            count = len(answers.finish)
            engine.generate(request(f"{count}", 2, tokens=10))
            await until(lambda count=count: len(answers.finish) == count + 2)
            assert answers.tokens[f"{count}", 1] == right(10)
            assert set(answers.versions[f"{count}", 1]) == {version}


async def test_a_server_killed_when_it_goes_to_sleep_is_replaced_at_the_next_swap(tmp_path: Path) -> None:
    async with started(tmp_path, sleep=True, restarts=1) as (engine, _):
        process_of(tmp_path).kill()
        await engine.sleep()
        await anyio.sleep(patience(0.3))  # the engine looks for lost servers
        log = tmp_path / "logs" / "inference-0-server.log"
        assert log.read_text().count("child") == 1, "a server has started"
        await engine.swap(version_of(tmp_path / "next", 1))
        assert log.read_text().count("child") == 2
        assert (engine.load().version, await memory_of(engine)) == (1, ["kv_cache", "weights"])


async def test_a_server_that_falls_silent_is_ended_and_started_again(tmp_path: Path) -> None:
    async with started(tmp_path, silence_s=patience(0.5)) as (engine, answers):
        engine.generate(request("a", 2))
        await until(lambda: engine.load().generated_tokens > 10)
        os.kill(process_of(tmp_path).pid, signal.SIGSTOP)
        await until(lambda: len(answers.finish) == 2)
        assert answers.tokens["a", 1] == right(100)


async def test_a_server_lost_too_often_ends_the_engine_with_its_log(tmp_path: Path) -> None:
    async def lose() -> None:
        async with started(tmp_path, restarts=0):
            os.kill(process_of(tmp_path).pid, signal.SIGKILL)
            await anyio.sleep(patience(20))

    with pytest.raises(ExceptionGroup) as raised:
        await lose()
    (error,) = leaves(raised.value)
    assert isinstance(error, EngineError)
    assert "lost 1 times within 10 minutes (inference.restarts: 0)" in str(error)
    assert "its log ends:\nchild" in str(error)


@pytest.mark.parametrize(
    ("program", "limit", "words"),
    [
        ("import sys; sys.exit('[Errno 98]')", 20, r"at its start with status 1; its log.*\n\[Errno 98\]"),
        ("import time; time.sleep(600)", 0.5, r"was not ready after .* s .*inference\.start_timeout_s"),
    ],
    ids=["a command that exits", "a server that never answers"],
)
async def test_a_start_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit: float, words: str
) -> None:
    monkeypatch.setattr(Engine, "program", ("-c", program))
    with pytest.raises(ExceptionGroup) as raised:
        async with started(tmp_path, start_timeout_s=patience(limit)):
            pass
    assert re.search(words, str(leaves(raised.value)[0]))


async def test_an_abort_reaches_the_server(tmp_path: Path) -> None:
    async with started(tmp_path) as (engine, answers):
        engine.generate(request("a", 6, tokens=1000))
        await until(lambda: len(answers.tokens) == 4)
        engine.abort("a")
        await until(lambda: len(answers.finish) == 6 and engine.load().running == 0)
        assert set(answers.finish.values()) == {"abort"}
        server = engine._current_server()  # pyright: ignore[reportPrivateUsage]
        assert (await server.get("/state", deadline_s=patience()))["running"] == []


async def test_tokens_that_arrived_before_an_abort_do_not_follow_the_last_chunk(tmp_path: Path) -> None:
    """A cancelled stream yields once more: its data had arrived, so the cancellation comes only later."""
    async with started(tmp_path) as (engine, answers):

        async def stream(server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
            yield StreamChunk([1], [-0.0])
            await until(lambda: answers.tokens.get(("a", 0)) == [1])
            engine.abort("a")
            with anyio.CancelScope(shield=True):
                await until(lambda: ("a", 0) in answers.finish)
            yield StreamChunk([2], [-0.0])

        engine.stream = stream
        engine.generate(request("a"))
        await until(lambda: ("a", 0) in answers.finish and engine.load().running == 0)
        assert engine.load().generated_tokens == 1
        assert (answers.tokens["a", 0], answers.finish["a", 0]) == ([1], "abort")


async def test_tokens_are_lost_that_the_server_had_and_computes_again(tmp_path: Path) -> None:
    async with started(tmp_path, context_length=2000) as (engine, answers):
        cached = 0

        async def stream(server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
            version = -float(engine.load().version)
            yield StreamChunk([1], [version], cached_tokens=cached)
            yield StreamChunk([2], [version], "length")

        async def lost(id: str, length: int, found: int, **more: Any) -> int | None:
            nonlocal cached
            cached = found
            prompt = Array.of(np.arange(length, dtype=np.int32))
            sampling = Sampling(max_tokens=2, **more)
            engine.generate(msgspec.structs.replace(request(id), prompt_ids=prompt, sampling=sampling))
            await until(lambda: (id, 0) in answers.finish)
            return engine.load().lost_tokens

        engine.stream = stream
        assert await lost("new", 1000, 0) is None
        assert await lost("not found", 1200, 0) is None  # perhaps it has no prefix cache
        assert await lost("found", 1400, 1152) == 0
        assert await lost("found in blocks", 1500, 1280) == 0
        assert await lost("lost", 1600, 640) == 1472 - 640  # of the whole pieces of 32 in 1500
        await engine.swap(version_of(tmp_path / "weights", 1))
        assert await lost("other weights", 1700, 0) == 1472 - 640

        async def stops(server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
            yield StreamChunk([5], [-1.0], cached_tokens=cached)
            await anyio.sleep_forever()

        async def is_aborted(server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
            yield StreamChunk([], [], "abort", cached_tokens=0)

        engine.stream = stops  # it stops at a token that the server does not know
        assert await lost("stopped", 1800, 1664, stop_token_ids=(5,)) == 1472 - 640
        engine.stream = is_aborted  # before its prompt was computed
        assert await lost("aborted", 1900, 0) == 1472 - 640
        engine.stream = stream
        assert await lost("after it", 1950, 1280) == 1472 - 640 + 1792 - 1280


BEFORE_ITS_END_S = 0.2
"""Seconds after which an answer of 140 tokens is not complete."""


async def test_begun_answers_go_on_and_wrong_requests_are_answered(tmp_path: Path) -> None:
    async with started(tmp_path, context_length=150) as (engine, answers):
        begun = (Array.of(np.array(right(30), np.int32)), Array.of(np.array([], np.int32)))
        answers.tokens["a", 0] = right(30)
        engine.generate(request("a", 2, begun=begun, have=(30, -1)))
        engine.generate(request("long", tokens=148))
        engine.generate(request("late", tokens=140, deadline_s=BEFORE_ITS_END_S))
        await until(lambda: len(answers.finish) == 3)
        assert answers.tokens["a", 0] == right(100)
        assert ("a", 1) not in answers.tokens, "nothing was wanted of it"
        assert answers.finish["long", 0] == answers.finish["late", 0] == "error"
        assert "a sample can have 150 (inference.context_length)" in answers.errors[0]
        assert answers.errors[1] == f"not finished within {BEFORE_ITS_END_S} s"


async def test_a_stop_string_is_found_over_a_swap(tmp_path: Path, tiny_models: Callable[[str], Path]) -> None:
    """Its first half was sampled before, its second after: no part of the server saw it whole."""
    from stretto.models.tokenizer import load_tokenizer

    text = load_tokenizer(str(tiny_models("qwen2"))).decode(np.array(right(60), np.int32))
    async with started(tmp_path) as (engine, answers):
        engine._samples._model = str(tiny_models("qwen2"))  # pyright: ignore[reportPrivateUsage]
        engine.generate(request("a", tokens=80, stop=(text[10:50],)))
        await until(lambda: len(answers.tokens.get(("a", 0), ())) > 20)
        await engine.swap(version_of(tmp_path / "weights", 1))
        await until(lambda: bool(answers.finish))
        assert answers.finish["a", 0] == "stop"
        assert answers.tokens["a", 0] == right(50)
        assert set(answers.versions["a", 0]) == {0, 1}


async def test_weights_that_are_refused_leave_the_old_ones(tmp_path: Path) -> None:
    async with started(tmp_path) as (engine, answers):
        wrong = version_of(tmp_path / "weights", 1)
        assert wrong.folder is not None
        (wrong.folder / "model-00000.safetensors").unlink()
        with pytest.raises(WeightsError, match="no weights in"):
            await engine.swap(wrong)
        wrong.folder = None
        with pytest.raises(WeightsError, match=r"set weights\.use"):
            await engine.swap(wrong)
        engine.generate(request("a", tokens=5))
        await until(lambda: bool(answers.finish))
        assert answers.versions["a", 0] == [0] * 5


def test_a_server_takes_no_key_for_a_flag() -> None:
    """In URL-safe base64, one key of 64 begins with "-"."""
    keys = {Server.draw_address()[1] for _ in range(64)}
    assert len(keys) == 64
    assert all(key.isalnum() for key in keys)


async def test_an_attached_server_is_used_and_its_loss_told(tmp_path: Path) -> None:
    port, _ = Server.draw_address()
    process = subprocess.Popen([sys.executable, str(STAND_IN), str(port), "secret"], stdout=subprocess.PIPE)
    children = psutil.Process(process.pid).children

    async def lose() -> None:
        options = {"python": None, "urls": (f"http://127.0.0.1:{port}",), "api_key": "secret"}
        async with started(tmp_path, **options) as (engine, answers):
            engine.generate(request("a", tokens=200))
            await until(lambda: bool(answers.tokens))
            for child in children():
                child.kill()
            process.kill()
            await anyio.sleep(patience(20))

    try:
        with pytest.raises(ExceptionGroup) as raised:
            await lose()
    finally:
        process.kill()
        process.communicate()
    assert "is lost" in str(leaves(raised.value)[0])
    assert "start it again" in str(leaves(raised.value)[0])


async def test_no_process_of_a_server_outlives_its_stop_when_its_guard_was_killed(tmp_path: Path) -> None:
    command = ServerCommand(("sh", "-c", "sleep 1000 & echo up; exec sleep 1000"), {})
    server = await Server.start(command, 1, "", tmp_path / "log")
    await until(lambda: "up" in server.tail())
    [guard] = [each for each in psutil.Process().children() if "sleep 1000" in " ".join(arguments_of(each))]
    family = guard.children(recursive=True)
    assert len(family) == 2
    guard.kill()
    await server.stop()
    assert not psutil.wait_procs(family, timeout=patience())[1]


# ------------------------------------------------------------------------------ SGLang's checksums


def test_checksums_tell_which_tensor_the_server_has_not_loaded(tmp_path: Path) -> None:
    tensors = {"q_proj.weight": b"q" * 16, "k_proj.weight": b"k" * 16, "v_proj.weight": b"v" * 16}
    tensors = {f"layers.0.{name}": data for name, data in tensors.items()}
    tensors["embed.weight"] = b"e" * 24
    published = write_safetensors(tmp_path / "v0", tensors)
    fused = hashlib.sha256(b"q" * 16 + b"k" * 16 + b"v" * 16).hexdigest()[:16]
    padded = hashlib.sha256(b"e" * 24 + bytes(61 * 8)).hexdigest()[:16]
    found = {"layers.0.qkv_proj.weight": fused, "embed.weight": padded, "unknown": "1"}

    exact = Checksums("float32", exact=True)
    assert exact.hashes(published, tmp_path / "v0", found) == published
    wrong = exact.hashes(published, tmp_path / "v0", found | {"layers.0.qkv_proj.weight": "0" * 16})
    assert {name for name in published if wrong[name] != published[name]} == {
        name for name in tensors if "_proj" in name
    }

    # The tensors of a vision-language model have older names in the server.
    tower = write_safetensors(tmp_path / "vision", {"model.visual.blocks.0.attn.qkv.weight": b"q" * 16})
    right = hashlib.sha256(b"q" * 16).hexdigest()[:16]
    name = "visual.blocks.0.attn.qkv_proj.weight"
    assert exact.hashes(tower, tmp_path / "vision", {name: right}) == tower
    assert exact.hashes(tower, tmp_path / "vision", {name: "0" * 16}) != tower

    # Where checksums cannot be worked out: they must change with the tensor, and only then.
    tensors["embed.weight"] = b"f" * 24
    newer = write_safetensors(tmp_path / "v1", tensors)
    other = Checksums("float32", exact=False)
    other.hashes(published, tmp_path / "v0", {"embed.weight": "1", "layers.0.qkv_proj.weight": "2"})
    skipped = other.hashes(newer, tmp_path / "v1", {"embed.weight": "1", "layers.0.qkv_proj.weight": "2"})
    assert [name for name in newer if skipped[name] != newer[name]] == ["embed.weight"]


def write_safetensors(folder: Path, tensors: Mapping[str, bytes]) -> dict[str, str]:
    """A file of float32 tensors, 8 bytes a row; the hashes of their bytes."""
    folder.mkdir()
    rows = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, 2)
        for name, data in tensors.items()
    }
    save_file(rows, folder / "model.safetensors")
    return {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}
