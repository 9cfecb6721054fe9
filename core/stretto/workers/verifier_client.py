"""What a rollout worker asks of the verifier workers: scores, tools, environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from stretto.bus.messages import (
    AskTools,
    EnvironmentSaid,
    Message,
    RunTool,
    Scored,
    ScoreSamples,
    TellEnvironment,
    ToolDone,
    ToolList,
)
from stretto.environment import EnvironmentConfig, Feedback
from stretto.errors import ConfigError, RewardError
from stretto.tools import ToolAnswer, ToolsConfig
from stretto.workers.context import WorkerContext
from stretto.workers.routing import Router

__all__ = ["VerifierClient"]

M = TypeVar("M", bound=Message)


class VerifierClient:
    """All verifier workers of the run, as one. What was asked of one that is lost is asked of another."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._pool = Router(context, "verifier")
        self._schemas: list[dict[str, Any]] | None = None
        self._listing = anyio.Lock()

    async def score(
        self, row: Mapping[str, Any], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """Reward and metrics of each text.

        Raises:
            RewardError: if there are none.
        """
        if self._context.composed.config.reward is None:
            raise RewardError(
                "the run has no `reward`: its environment has to give one to every conversation"
            )
        message = ScoreSamples(msgspec.msgpack.encode(row), tuple(texts), msgspec.msgpack.encode(columns))
        scored = await self._ask("score", message, Scored)
        if scored.error:
            raise RewardError(scored.error)
        return list(scored.scores)

    async def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the run's tools.

        Raises:
            ConfigError: if its workflow's section has none.
        """
        if not isinstance(self._context.composed.config.workflow, ToolsConfig):
            raise ConfigError("the section of this workflow has no tools: it must extend `ToolsConfig`")
        async with self._listing:
            if self._schemas is None:
                listed = await self._ask("tools", AskTools(), ToolList)
                self._schemas = msgspec.msgpack.decode(listed.schemas, type=list[dict[str, Any]])
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """What a tool answers.

        Raises:
            ConfigError: as of `tools`.
        """
        await self.tools()
        message = RunTool(name, json.dumps(arguments).encode())
        return (await self._ask("tool", message, ToolDone)).answer

    async def feedback(self, offered: Mapping[str, Any]) -> Feedback:
        """What the environment says.

        Raises:
            ConfigError: if the workflow's section has no environment.
            RewardError: if it raised, took too long, or returned what none may.
        """
        if not isinstance(self._context.composed.config.workflow, EnvironmentConfig):
            raise ConfigError(
                "the section of this workflow has no environment: it must extend `EnvironmentConfig`"
            )
        message = TellEnvironment(msgspec.msgpack.encode(offered))
        said = await self._ask("environment", message, EnvironmentSaid)
        if said.error:
            raise RewardError(said.error)
        return said.feedback

    async def _ask(self, verb: str, message: Message, kind: type[M]) -> M:
        """Ask whichever verifier is there. The ticket's own time limit is shorter than the deadline."""
        context = self._context
        while True:
            async with self._pool.member() as verifier:
                return await context.bus.request(
                    context.names.worker("verifier", verifier, verb),
                    message,
                    kind,
                    who=verifier,
                    deadline_s=context.composed.config.workflow.timeout_s,
                )
