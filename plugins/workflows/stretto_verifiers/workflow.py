"""The workflow `verifiers`: play episodes in environments, one process per environment, and score them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from stretto import Context, StrettoError
from stretto.agents.api_call import MODEL
from stretto.agents.endpoint import Endpoint
from stretto.agents.recorder import CallLimits, CallRecorder
from stretto.user_code.sandbox import kill, sandbox_command
from stretto.workflow import Prompt, Session, Trajectory
from stretto_verifiers import PROGRAM, VerifiersWorkflowConfig

_START_S = 600.0  # importing an environment compiles its libraries, and may download its tasks
_END_S = 5.0  # a process that has closed its pipes ends at once, unless it hangs
_MAX_LINE = 2**30  # bytes of one reply
_SCRATCH_MB = 4096  # files that an environment may write
# Prints the folders of an interpreter, with links resolved.
_PLACES = "import sys, json; print(json.dumps([sys.prefix, sys.base_prefix]))"


class EpisodeError(StrettoError):
    """An environment cannot be started, or an episode failed: there is nothing to train on."""


class VerifiersWorkflow:
    """Plays the episodes of a prompt's group, with one endpoint for all prompts."""

    def __init__(self, config: VerifiersWorkflowConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self.endpoint = Endpoint(config.tool_parser)
        """Started with the first prompt. The endpoint serves as long as the worker lives."""
        self._environments: dict[bytes, _Environment] = {}
        self._starting = anyio.Lock()
        self._episodes = anyio.CapacityLimiter(config.episodes)
        self._limits = CallLimits(calls=config.max_calls, context=config.max_tokens)

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of all episodes; those of one episode have the same score."""
        if "verifiers" not in prompt.row:
            raise EpisodeError("the row has no column 'verifiers'; use the dataset `verifiers`")
        await self.endpoint.start()
        episodes = await session.members(lambda number: self._play(prompt, session, number))
        chats = [recorder.last.chat if recorder.last else [] for recorder, _ in episodes]
        verdicts = [verdict for _, verdict in episodes]
        texts = [str(messages[-1]["content"]) for messages in chats]
        opened = [recorder.last.opened if recorder.last else "" for recorder, _ in episodes]
        columns = {"verdict": verdicts, "messages": chats, "prompt_opened": opened}
        scores = await session.score(prompt, texts, columns=columns)
        return [
            trajectory
            for (recorder, _), score in zip(episodes, scores, strict=True)
            for trajectory in recorder.trajectories(score)
        ]

    async def end(self) -> None:
        """End the processes of all environments, which would also end with this process."""
        for environment in self._environments.values():
            await environment.end()

    async def _play(
        self, prompt: Prompt, session: Session, number: int
    ) -> tuple[CallRecorder, dict[str, float]]:
        recorder = CallRecorder(session, f"v{number}", self._limits)
        source = prompt.row["verifiers"]
        async with (
            self._episodes,
            self.endpoint.serve(recorder) as key,
            self._environment(source) as environment,
        ):
            order = {
                "task": source["task"],
                "key": source["key"],
                "model": MODEL,
                "base_url": self.endpoint.base_url,
                "api_key": key,
            }
            try:
                with anyio.fail_after(self._config.episode_timeout_s):
                    reply = await environment.play(order)
            except TimeoutError:
                raise EpisodeError(
                    f"the episode took longer than episode_timeout_s={self._config.episode_timeout_s:g}"
                ) from None
        if reply["error"]:
            cause = f"; a call of the model failed: {recorder.fault}" if recorder.fault else ""
            raise EpisodeError(f"the episode failed: {reply['error']}{cause}")
        if recorder.last is None:
            raise EpisodeError("the environment made no request to the policy")
        return recorder, {**reply["metrics"], "reward": reply["reward"]}

    @asynccontextmanager
    async def _environment(self, source: Mapping[str, Any]) -> AsyncGenerator[_Environment]:
        """Yield a process for rows with these settings: the one that runs, or with `private` a new one."""
        settings = {key: value for key, value in source.items() if key not in ("task", "key")}
        if self._config.private:
            environment = await self._start(settings)
            try:
                yield environment
            finally:
                await environment.end()
            return
        name = msgspec.json.encode(settings)
        async with self._starting:
            environment = self._environments.get(name)
            if environment is None or environment.ended:
                environment = self._environments[name] = await self._start(settings)
        yield environment

    async def _start(self, settings: dict[str, Any]) -> _Environment:
        python, config = settings["python"], self._config
        places = await anyio.run_process([python, "-c", _PLACES])
        folders = [Path(python).parent, *map(Path, msgspec.json.decode(places.stdout, type=list[str]))]
        command = sandbox_command(
            [python, str(PROGRAM)],
            sandbox=self._context.sandbox,
            readable=[PROGRAM, *folders, *map(Path, (*settings["path"], *config.readable))],
            hidden=[Path(self._context.folder)] if self._context.folder else [],
            network=True,  # the endpoint is on loopback
            env=config.env,
            scratch_mb=_SCRATCH_MB,
            scratch=[Path(folder) for folder in config.private],
        )
        # Programs in the interpreter's folder, such as uv, take precedence over those of this process.
        path = config.env.get("PATH", f"{Path(python).parent}:{command.env['PATH']}")
        command.env["PATH"] = path
        environment = _Environment(await command.start(stdin=PIPE, stdout=PIPE, stderr=None))
        try:
            with anyio.fail_after(_START_S):
                await environment.start(settings)
        except BaseException as error:
            await environment.end()
            if isinstance(error, TimeoutError):
                raise EpisodeError(f"the environment did not start within {_START_S:g} s") from error
            raise
        return environment


class _Environment:
    """One process of `environment.py`, used by many tasks at once. One waiting task reads replies for all."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._writing, self._reading = anyio.Lock(), anyio.Lock()
        self._ids = count(1)
        self._replies: dict[int, dict[str, Any] | None] = {}
        """Replies of the episodes in progress, by id; None until the reply has arrived."""
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether another process must take its place, also if it ended between two episodes."""
        return self._ended or self._process.returncode is not None

    async def start(self, settings: Mapping[str, Any]) -> None:
        await self._send(settings)
        reply = await self._next_reply()
        if "error" in reply:
            raise EpisodeError(f"the environment cannot be loaded: {reply['error']}")

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Play one episode to its end, and cancel it if the caller is cancelled."""
        id = next(self._ids)
        self._replies[id] = None
        try:
            await self._send({"id": id, **order})
            while (reply := self._replies[id]) is None:
                async with self._reading:
                    if self._replies[id] is None:
                        self._take(await self._next_reply())
            return reply
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), suppress(EpisodeError):
                await self._send({"cancel": id})
            raise
        finally:
            del self._replies[id]

    async def end(self) -> None:
        self._ended = True
        kill(self._process)
        with anyio.CancelScope(shield=True):
            await self._process.aclose()

    def _take(self, reply: dict[str, Any]) -> None:
        if reply["id"] in self._replies:  # else the episode was cancelled
            self._replies[reply["id"]] = reply

    async def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            async with self._writing:
                await self._process.stdin.send(msgspec.json.encode(line) + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise await self._end_with_error() from error

    async def _next_reply(self) -> dict[str, Any]:
        try:
            line = await self._lines.receive_until(b"\n", _MAX_LINE)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError) as error:
            raise await self._end_with_error() from error
        return msgspec.json.decode(line, type=dict[str, Any])

    async def _end_with_error(self) -> EpisodeError:
        self._ended = True
        with anyio.move_on_after(_END_S):
            await self._process.wait()
        await self.end()
        return EpisodeError(f"the environment's process ended with status {self._process.returncode}")
