"""The requests of a rollout worker to the verifier workers: scores, tools, environments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from stretto.bus.messages import scoring
from stretto.bus.messages.base import Message
from stretto.config import RunConfig
from stretto.environment import ENVIRONMENTS, Feedback
from stretto.errors import ConfigError, RewardError
from stretto.tools import ToolAnswer, ToolsConfig
from stretto.user_code.faults import SampleFault
from stretto.user_code.plain_data import encode_row
from stretto.workers.context import WorkerContext
from stretto.workers.sampling.routing import Router

M = TypeVar("M", bound=Message)


class VerifierClient:
    """The run's verifier workers, for one variant. Requests to a lost worker are sent to another one."""

    def __init__(self, context: WorkerContext, router: Router, config: RunConfig, variant: str) -> None:
        self._context = context
        self._router = router
        self._config = config
        self._variant = variant
        self._schemas: list[dict[str, Any]] | None = None
        self._listing = anyio.Lock()

    async def score(
        self, row: Mapping[str, Any], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Sequence[tuple[float, dict[str, float]] | SampleFault]:
        """Return the reward and the metrics of each text, or the fault because of which it has none."""
        if self._config.reward is None:
            raise RewardError(
                "the run has no `reward`, so its environment must return a reward for every conversation"
            )
        columns_data = msgspec.msgpack.encode(columns)
        message = scoring.ScoreSamples(encode_row(row), tuple(texts), columns_data, self._variant)
        answer = await self._ask("score", message, scoring.Scored)
        if len(answer.scores) != len(texts):
            raise RewardError(f"the verifier scored {len(answer.scores)} of {len(texts)} answers")
        return answer.scores

    async def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the run's tools."""
        if not isinstance(self._config.workflow, ToolsConfig):
            raise ConfigError("this workflow has no tools: its config must extend `ToolsConfig`")
        async with self._listing:
            if self._schemas is None:
                answer = await self._ask("tools", scoring.AskTools(variant=self._variant), scoring.ToolList)
                self._schemas = msgspec.msgpack.decode(answer.schemas, type=list[dict[str, Any]])
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Any], *, images: bool = False) -> ToolAnswer:
        await self.tools()
        message = scoring.RunTool(name, json.dumps(arguments).encode(), self._variant, images)
        return (await self._ask("tool", message, scoring.ToolDone)).answer

    async def feedback(self, question: Mapping[str, Any]) -> Feedback:
        """Call the environment, and return its feedback."""
        if not isinstance(self._config.workflow, ENVIRONMENTS):
            raise ConfigError("this workflow has no environment: its config must extend `EnvironmentConfig`")
        message = scoring.EnvironmentTurn(encode_row(question), self._variant)
        answer = await self._ask("environment", message, scoring.EnvironmentAnswer)
        if answer.fault:
            raise answer.fault.raised()
        return answer.feedback

    async def _ask(self, verb: str, message: Message, kind: type[M]) -> M:
        """Send a request to a verifier, after its loss to another. The ticket's limit ends this earlier."""
        bus, names, deadline_s = self._context.bus, self._context.names, self._config.workflow.limit_s
        while True:
            async with self._router.member() as verifier:
                subject = names.worker("verifier", verifier.worker, verifier.nonce, verb)
                return await bus.request(subject, message, kind, deadline_s=deadline_s)
