"""Plugin of `chaos.py`: a workflow that calls a tool in every episode, and an engine that has a server.

The server is the stand-in of the tests. It "samples" in stated time and needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, Context, hookimpl
from stretto.errors import WeightsError
from stretto.serving.config import ServerEngineConfig
from stretto.serving.engine import ServerEngine
from stretto.serving.server import Server, ServerCommand, ServerRefused
from stretto.serving.streams import Ask, StreamChunk
from stretto.tools import ToolsConfig
from stretto.weights import WeightUpdate
from stretto.workflow import Prompt, Session, Trajectory

STAND_IN = Path(__file__).parents[1] / "tests" / "serving" / "stand_in_server.py"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any number.
    """
    return 2 * number


class ToolWorkflowConfig(ToolsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `chaos_tools`."""


class ToolWorkflow:
    """One call of the tool, then one answer for each sample."""

    def __init__(self, config: ToolWorkflowConfig, context: Context) -> None:
        del config, context

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of one group."""
        await session.call("double", {"number": 4})
        answers = await session.generate(prompt.ids, n=session.group_size)
        scores = await session.score(prompt, answers)
        pairs = zip(answers, scores, strict=True)
        return [Trajectory.of(prompt.ids, answer, score) for answer, score in pairs]


class _Event(msgspec.Struct):
    tokens: list[int]
    logprobs: list[float]
    finish: Any
    versions: list[str]


class StandInEngine(ServerEngine):
    """Speaks with the stand-in server."""

    health = "/health"

    def command(self, port: int, key: str) -> ServerCommand:
        """Return the command of the server."""
        return ServerCommand((sys.executable, str(STAND_IN), str(port), key), {})

    async def greet(self, server: Server) -> None:
        """Ask for its state."""
        await server.get("/state", deadline_s=5)

    async def stream(self, server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one answer."""
        body = {"id": ask.id, "tokens": ask.tokens, "prompt": 0, "max_tokens": ask.max_tokens}
        async for event in server.stream("/generate", body, msgspec.json.Decoder(_Event)):
            yield StreamChunk(event.tokens, event.logprobs, event.finish, "", event.versions)

    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        """Stop answers."""
        await server.post("/abort", ids, deadline_s=5)

    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """Do nothing: the server loads files as they are."""

    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        """Load a version."""
        del forget
        body = {"folder": str(folder), "version": str(update.note.version)}
        try:
            await server.post("/load", body, deadline_s=5)
        except ServerRefused as error:
            raise WeightsError(error.reason, version=update.note.version) from error
        return update.hashes()

    async def score(self, server: Server, tokens: list[int]) -> list[float]:
        """Return a logprob of -1 for each token."""
        return [-1.0] * (len(tokens) - 1)


@hookimpl
def stretto_workflow() -> Iterator[Component[ToolWorkflowConfig]]:
    """The workflow of this file."""
    yield Component("chaos_tools", ToolWorkflow, ToolWorkflowConfig, "calls a tool", reward_columns=())


@hookimpl
def stretto_inference() -> Iterator[Component[ServerEngineConfig]]:
    """The engine of this file."""
    yield Component("chaos_server", StandInEngine, ServerEngineConfig, "a stand-in server", needs_model=False)
