"""Workflow `agent`: each sample is a run of a program that calls the policy by OpenAI's or Anthropic's API.

The program is any command or Python function, unmodified. It finds the address and its own key in
`OPENAI_BASE_URL` and `OPENAI_API_KEY`, or in `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. It runs in the
sandbox; docs/agents.md lists its inputs.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto import Component, LocalPath, Problem, hookimpl
from stretto.agents.config import AgentCallsConfig
from stretto.component import Importable, PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.errors import ConfigError
from stretto.models.tokenizer import load_tokenizer
from stretto.user_code.importable import fault_of_importable, unknown_parameter
from stretto.user_code.sandbox import sandbox_problems

__all__ = ["AgentConfig"]


_PLAIN_LINE = re.compile(r"\s*[\w./+-]+(\s+[^;|&$()<>`\n]*)?")
"""A line for the shell that begins with the name of a program or of a shell command."""
_SHELL_COMMANDS = {
    *(".", "case", "cd", "command", "echo", "eval", "exec", "export", "false", "for", "if", "printf", "set"),
    *("test", "time", "trap", "true", "ulimit", "umask", "unset", "until", "while", "{"),
}


class AgentConfig(AgentCallsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `agent`."""

    command: str | tuple[str, ...] | None = None
    """The agent, as a command: a line for `/bin/sh`, or a program and its arguments. Set either this or
    `function`."""
    function: Importable | None = None
    """The agent, as a Python function, sync or async: `path.py:name` or `module:name`. Its parameters may be
    any of `prompt`, `row`, `base_url`, `api_key` and the row's other columns, passed by name."""
    folder: LocalPath | None = None
    """Working folder of the agent, which it can read. Default: the run's working folder, which it can always
    read."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Additional environment variables of the agent. Of the run's environment, the agent gets only PATH."""
    network: bool = False
    """Let the agent use this machine's network, its loopback included. Without this, the agent reaches only
    the policy. With `sandbox: unsafe` it always has the network."""
    agent_timeout_s: PositiveFloat = 300.0
    """Seconds that one run of the agent may take before it is killed; must be less than `timeout_s`."""
    on_timeout: Literal["score", "fail"] = "score"
    """If the agent exceeds `agent_timeout_s`: `score` scores the answers so far, `fail` fails the sample."""
    on_error: Literal["fail", "score"] = "fail"
    """If the agent ends with a status other than 0: `fail` fails the sample, `score` scores the answers so
    far. An agent that was refused a call because of `max_calls`, `max_tokens` or `max_total_tokens` is always
    scored."""
    processes: PositiveInt = 32
    """Number of agents that each rollout worker runs at once; others wait."""
    memory_mb: PositiveInt | None = None
    """Limit in MiB of the address space of each process of an agent; with systemd, also of the memory of all
    its processes together. Null: no limit, but with systemd half of the machine's memory."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.function is None):
            raise ValueError("expected either `command` or `function`")
        if self.agent_timeout_s >= self.limit_s:
            raise ValueError(
                f"agent_timeout_s={self.agent_timeout_s:g} must be less than timeout_s={self.limit_s:g}, "
                "which includes waiting and scoring"
            )


def check(config: AgentConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the function exists, commands can run here, and the model's chat template shows tools."""
    if config.function is not None and (fault := fault_of_importable(config.function)):
        yield Problem("workflow.function", fault)
    if config.folder is not None and not Path(config.folder).is_dir():
        yield Problem("workflow.folder", f"{config.folder} is not a folder")
    if not config.command and config.command is not None:
        yield Problem("workflow.command", "is empty; expected a line for the shell, or program and arguments")
    elif config.command and (missing := _missing_program(config)):
        yield Problem(
            "workflow.command",
            f"there is no program {missing!r} on this machine's PATH, which the agent gets; "
            "workflow.env may set another",
            "environment",
        )
    yield from sandbox_problems(run, network=config.network)
    if config.network and run.sandbox != "unsafe":
        yield Problem(
            "workflow.network", "agents reach all that this machine reaches, its loopback included", "warning"
        )
    if run.model is not None and Path(run.model).is_dir() and _hides_tools(run.model):
        yield Problem(
            "model",
            f"the chat template of {run.model!r} does not show tools to the model: it will not see what the "
            "agent sends as `tools`",
            "warning",
        )


def _missing_program(config: AgentConfig) -> str:
    """Return the command's program if it does not exist; else empty, also for lines only a shell can read."""
    command = config.command or ""
    if isinstance(command, str) and (not _PLAIN_LINE.fullmatch(command) or "=" in command.split()[0]):
        return ""
    program = command.split()[0] if isinstance(command, str) else command[0]
    if isinstance(command, str) and program in _SHELL_COMMANDS:
        return ""
    path = config.env.get("PATH", os.environ.get("PATH"))
    here = Path(config.folder or ".", program)
    return "" if shutil.which(program, path=path) or ("/" in program and here.exists()) else program


def check_row(config: AgentConfig, row: Mapping[str, Any]) -> str:
    """Return an error if the row gives no value for a parameter of the function; else empty."""
    if config.function is None:
        return ""
    known = ("prompt", "row", "base_url", "api_key", *row)
    unknown = unknown_parameter(config.function, known)
    return f"the agent has a parameter {unknown!r}; available: {', '.join(known)}" if unknown else ""


def _hides_tools(model: str) -> bool:
    """Return whether the model has a chat template that shows no tools. Agents need no template."""
    try:
        form = load_tokenizer(model).form
        return form.has_template and not form.shows_tools
    except ConfigError:
        return False


@hookimpl
def stretto_workflow() -> Iterator[Component[AgentConfig]]:
    yield Component(
        "agent",
        "stretto_agent.workflow:AgentWorkflow",
        AgentConfig,
        "any program that calls the API of OpenAI or Anthropic",
        check,
        check_row,
        reward_columns=("messages", "exit_status"),
    )
