"""Workflow `agent`: each sample is one run of an agent program that calls the policy by OpenAI's API.

The program is any command, or a Python function, unmodified: it finds the address in `OPENAI_BASE_URL` and a
key of its own in `OPENAI_API_KEY`. It runs in a process of its own, in the sandbox; docs/agents.md says what
it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto import Component, Context, LocalPath, Problem, WorkflowConfig, hookimpl
from stretto.component import Importable, PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.errors import ConfigError
from stretto.models.tokenizer import shows_tools
from stretto.tools import ParserName
from stretto.user_code.importable import fault_of_importable
from stretto.user_code.sandbox import sandbox_problems

__all__ = ["AgentConfig"]


class AgentConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `agent`."""

    command: str | tuple[str, ...] | None = None
    """The agent: a line for `/bin/sh`, or a program and its arguments. Give this or `function`."""
    function: Importable | None = None
    """The agent: `path.py:name` or `module:name`, a Python function, sync or async. It is given by name what
    it asks for of `prompt`, `row`, `base_url`, `api_key`, and the row's other columns."""
    folder: LocalPath | None = None
    """Folder that the agent begins in, and can read; default the working folder, which it can read anyway."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """More environment variables of the agent; of the run's own it gets none but PATH."""
    agent_timeout_s: PositiveFloat = 300.0
    """Seconds for one run of the agent, which is then killed; must be less than `timeout_s`."""
    on_timeout: Literal["score", "fail"] = "score"
    """An agent that takes longer: score what there is, or fail the ticket."""
    on_error: Literal["fail", "score"] = "fail"
    """An agent that ends with a status other than 0: fail the ticket, or score what there is. One that was
    refused a call by the limits below is always scored."""
    max_calls: PositiveInt = 64
    """Answers that one run of the agent may ask for."""
    max_tokens: PositiveInt | None = None
    """Tokens of a whole chat, the prompt included; default no limit but the engine's, which fails the
    call."""
    max_total_tokens: PositiveInt | None = None
    """Tokens that may be sampled in one run of the agent; default no limit."""
    tool_parser: ParserName = "hermes"
    """How the policy writes calls of tools: hermes (Qwen too), llama3 or mistral."""
    processes: PositiveInt = 32
    """Agents that each rollout worker runs at once; others wait."""
    memory_mb: PositiveInt | None = None
    """Address space of each of an agent's processes in MiB; default no limit."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.function is None):
            raise ValueError("expected either `command` or `function`")
        if self.agent_timeout_s >= self.timeout_s:
            raise ValueError(
                f"agent_timeout_s={self.agent_timeout_s:g} must be less than timeout_s={self.timeout_s:g}, "
                "which includes waiting and scoring"
            )


def make(config: AgentConfig, context: Context) -> Any:
    """The workflow."""
    from stretto_agent.workflow import AgentWorkflow

    return AgentWorkflow(config, context)


def check(config: AgentConfig, run: RunConfig) -> Iterator[Problem]:
    """Whether there is such a function, whether commands can run here, and whether tools would be seen."""
    if config.function is not None and (fault := fault_of_importable(config.function)):
        yield Problem("workflow.function", fault)
    if config.folder is not None and not Path(config.folder).is_dir():
        yield Problem("workflow.folder", f"{config.folder} is no folder")
    if not config.command and config.command is not None:
        yield Problem("workflow.command", "is empty; expected a line for the shell, or program and arguments")
    yield from sandbox_problems(run)
    if run.model is not None and Path(run.model).is_dir() and _hides_tools(run.model):
        yield Problem(
            "model",
            f"the chat template of {run.model!r} does not show tools to the model: it will not see what the "
            "agent sends as `tools`",
            "warning",
        )


def _hides_tools(model: str) -> bool:
    """Whether there is a chat template, and it shows no tools. An agent can do without either."""
    try:
        return not shows_tools(model)
    except ConfigError:
        return False


@hookimpl
def stretto_workflow() -> Iterator[Component[AgentConfig]]:
    """The component of this package."""
    yield Component(
        "agent",
        make,
        AgentConfig,
        "any program that speaks OpenAI's API",
        check,
        reward_columns=("messages", "exit_status"),
    )
