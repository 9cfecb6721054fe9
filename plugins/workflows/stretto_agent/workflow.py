"""The workflow `agent`: run agents, each in its own process, and score their runs."""

import codecs
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, ByteSendStream

from stretto import Context, StrettoError
from stretto.agents.endpoint import Endpoint, base_url
from stretto.agents.recorder import CallRecorder
from stretto.errors import one_job
from stretto.user_code.forwarded_port import ForwardedPort
from stretto.user_code.sandbox import SandboxedCommand, can_show, kill, sandbox_command
from stretto.workflow import Prompt, Session, Trajectory
from stretto_agent import AgentConfig

_PORT = 20117
"""The policy's port in the sandboxes of agents, each with its own loopback. Few programs listen here, and the
system gives clients no port below 32768."""
_RUNNER = Path(__file__).with_name("call_function.py")
_REST = bytes(range(0x80, 0xC0))  # what follows the first byte of a character in UTF-8
_MAX_OUTPUT = 256 * 1024  # bytes of standard output that are kept, from the end
_MAX_ERRORS = 4096  # the same for standard error
# Linux does not accept longer environment variables.
_MAX_VARIABLE = 120_000


class AgentError(StrettoError):
    """A run of an agent failed: there is nothing to train on."""


@dataclass(frozen=True)
class _AgentResult:
    status: int | None
    """Exit status; None if the agent exceeded its time."""
    output: str
    """Standard output; of a long output only the end."""
    errors: str


class AgentWorkflow:
    """Runs the agent once for each sample of a group, with one endpoint for all prompts."""

    def __init__(self, config: AgentConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self.endpoint = Endpoint(config.tool_parser)
        """The server of the policy's API, which serves as long as the worker lives."""
        self._shares_network = config.network or context.sandbox == "unsafe"
        self._processes = anyio.CapacityLimiter(config.processes)

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of all runs; those of one run have the same score."""
        if self._shares_network:
            await self.endpoint.start()
        runs = await session.members(lambda number: self._run(prompt, session, number))
        chats = [recorder.last.chat if recorder.last else [] for recorder, _ in runs]
        texts = [result.output or chat[-1]["content"] for (_, result), chat in zip(runs, chats, strict=True)]
        opened = ["" if result.output or not each.last else each.last.opened for each, result in runs]
        statuses = [result.status for _, result in runs]
        columns = {"messages": chats, "exit_status": statuses, "prompt_opened": opened}
        scores = await session.score(prompt, texts, columns=columns)
        return [
            trajectory
            for (recorder, _), score in zip(runs, scores, strict=True)
            for trajectory in recorder.trajectories(score)
        ]

    async def _run(self, prompt: Prompt, session: Session, number: int) -> tuple[CallRecorder, _AgentResult]:
        config = self._config
        recorder = CallRecorder(session, f"a{number}", config.call_limits)
        async with (
            self._processes,
            self.endpoint.serve(recorder) as key,
            self._forwarded_port() as port,
        ):
            row = msgspec.json.encode(prompt.row)
            result = await _run(self._command(prompt, key, port), row, config.agent_timeout_s)
        errors = f"; the end of its standard error: {result.errors}" if result.errors else ""
        cause = f"; a call of the model failed: {recorder.fault}" if recorder.fault else errors
        if result.status is None and config.on_timeout == "fail":
            raise AgentError(f"the agent took longer than agent_timeout_s={config.agent_timeout_s:g}{cause}")
        if result.status and config.on_error == "fail" and not recorder.over:
            raise AgentError(f"the agent ended with status {result.status}{cause}")
        if recorder.last is None:
            ending = f"ended with status {result.status}"
            if result.status is None:
                ending = f"was killed after agent_timeout_s={config.agent_timeout_s:g}"
            raise AgentError(f"the agent got no answer of the model and {ending}{cause}")
        return recorder, result

    @asynccontextmanager
    async def _forwarded_port(self) -> AsyncGenerator[ForwardedPort | None]:
        """Forward a port in the agent's sandbox to the endpoint; None if the agent shares the network."""
        if self._shares_network:
            yield None
            return
        with ForwardedPort(_PORT) as port:
            async with one_job() as tasks:
                tasks.start_soon(self._serve, port)
                yield port
                tasks.cancel_scope.cancel()

    async def _serve(self, port: ForwardedPort) -> None:
        with await port.listener() as listener:
            await self.endpoint.serve_socket(listener)

    def _command(self, prompt: Prompt, key: str, port: ForwardedPort | None) -> SandboxedCommand:
        config, chat = self._config, prompt.row["prompt"]
        url = base_url(port.port) if port else self.endpoint.base_url
        text = chat if isinstance(chat, str) else msgspec.json.encode(chat).decode()
        env = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # its clients add the version
            "ANTHROPIC_API_KEY": key,
            **({"STRETTO_PROMPT": text} if len(text.encode()) < _MAX_VARIABLE else {}),
        }
        cwd = Path.cwd()
        folder = Path(config.folder) if config.folder else cwd
        readable = [cwd, folder, _RUNNER]
        if config.function is None:
            line = config.command
            argv = ["/bin/sh", "-c", line] if isinstance(line, str) else list(line or ())
        else:
            argv = [sys.executable, str(_RUNNER), config.function]
            module = config.function.rpartition(":")[0]
            readable += [Path(module), Path(module).parent] if module.endswith(".py") else []
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
        return sandbox_command(
            argv,
            sandbox=self._context.sandbox,
            readable=readable,
            hidden=[cwd / "runs", *([Path(self._context.folder)] if self._context.folder else [])],
            folder=folder if can_show(folder) else None,
            network=self._shares_network,
            forwarded_port=port,
            env={**env, **config.env},
            memory_mb=config.memory_mb,
        )


async def _run(command: SandboxedCommand, row: bytes, timeout_s: float) -> _AgentResult:
    """Run a command until it ends or its time is over, then kill all processes that it started."""
    process = await command.start(stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Tail(_MAX_OUTPUT), _Tail(_MAX_ERRORS)
    status: int | None = None
    try:
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_send_row, process.stdin, row)
                tasks.start_soon(output.read, process.stdout)
                tasks.start_soon(errors.read, process.stderr)
                status = await process.wait()
                kill(process)  # processes that it left running may hold the pipes open
    finally:
        kill(process)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    try:
        text = output.text(cut=status is None)
    except UnicodeDecodeError as error:
        raise AgentError(f"the agent's standard output is not UTF-8: {error}") from error
    return _AgentResult(status, text, "\n".join(errors.text("replace").splitlines()[-5:]))


async def _send_row(stdin: ByteSendStream, row: bytes) -> None:
    with suppress(anyio.BrokenResourceError):  # the agent need not read the row
        async with stdin:
            await stdin.send(row)


class _Tail:
    """Reads a whole stream and keeps the end of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = b""

    def text(self, errors: str = "strict", *, cut: bool = False) -> str:
        """Return the text. Its last character may be incomplete if the writer was `cut` off."""
        data = self._data.lstrip(_REST) if len(self._data) == self._limit else self._data
        return codecs.getincrementaldecoder("utf-8")(errors).decode(data, not cut).strip()

    async def read(self, stream: ByteReceiveStream) -> None:
        async for part in stream:
            self._data = (self._data + part)[-self._limit :]
