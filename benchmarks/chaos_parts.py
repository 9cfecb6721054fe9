"""Plugin of `chaos.py`: a workflow that calls a tool in every episode, and an engine that has a server.

The server is the stand-in of the tests. It "samples" in stated time and needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto import Component, Context, hookimpl
from stretto.serving.config import ServerEngineConfig
from stretto.tools import ToolsConfig
from stretto.workflow import Prompt, Session, Trajectory

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from stand_in_engine import StandInEngine


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


@hookimpl
def stretto_workflow() -> Iterator[Component[ToolWorkflowConfig]]:
    """The workflow of this file."""
    yield Component("chaos_tools", ToolWorkflow, ToolWorkflowConfig, "calls a tool", reward_columns=())


@hookimpl
def stretto_inference() -> Iterator[Component[ServerEngineConfig]]:
    """The engine of this file."""
    yield Component("chaos_server", StandInEngine, ServerEngineConfig, "a stand-in server", needs_model=False)
