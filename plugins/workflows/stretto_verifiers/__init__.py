"""`verifiers`: environments of the library `verifiers`, as dataset, workflow and reward.

The library pins many dependencies, so it has a Python environment of its own, where an environment plays its
episodes against the policy's endpoint.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import stretto
from stretto.chat.calls import ParserName
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.dataset import Row
from stretto.errors import ConfigError
from stretto.machine.child_process import last_line, run_child
from stretto.user_code.sandbox import sandbox_problems

__all__ = ["PROGRAM", "Verifiers", "VerifiersConfig", "VerifiersReward", "VerifiersWorkflowConfig"]

PROGRAM = Path(__file__).with_name("environment.py")
_LIST_S = 600.0
"""Time limit for importing an environment and listing its tasks."""


class VerifiersConfig(stretto.DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `verifiers`."""

    environment: str
    """Id of the environment's taskset, such as `gsm8k-v1`: an installed package, or a module in `path`."""
    python: stretto.LocalPath
    """Python interpreter in which `verifiers` and the environment are installed, such as
    `/opt/envs/gsm8k/bin/python`."""
    path: stretto.LocalPath | None = None
    """Folder with environments that are not installed."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Further settings of the environment's own config, as under `[env]` in its files: `{taskset: {…}, agent:
    {…}}`. Agents run in the sandbox of the rollout worker unless their `runtime` says otherwise."""
    size: PositiveInt | None = None
    """Number of tasks to use, from the first task on; required if the environment has infinitely many."""


class Verifiers:
    """A dataset with a row for each task: a prompt, for display and length, and the task's data."""

    def __init__(self, config: VerifiersConfig, context: stretto.Context) -> None:
        del context
        taskset = {**config.options.get("taskset", {}), "id": config.environment}
        self._request = {
            "python": config.python,
            "path": [config.path] if config.path else [],
            "config": {**config.options, "taskset": taskset},
            "size": config.size,
        }
        self._tasks: list[dict[str, Any]] = self._list_tasks(config)
        keys = [task["key"] for task in self._tasks]
        self.fingerprint = hashlib.sha256(msgspec.json.encode((self._request["config"], keys))).hexdigest()
        """SHA-256 of the environment's config and the keys of its tasks."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Row:
        task = self._tasks[index]
        system = [{"role": "system", "content": task["system"]}] if task["system"] else []
        return {
            "id": task["name"] or task["key"],
            "prompt": [*system, {"role": "user", "content": task["prompt"] or "…"}],
            "data": task["data"],
            "verifiers": {**self._request, "task": index, "key": task["key"]},
        }

    def _list_tasks(self, config: VerifiersConfig) -> list[dict[str, Any]]:
        failure = f"cannot list the tasks of the environment {config.environment!r}"
        try:
            request = json.dumps(self._request).encode() + b"\n"
            result = run_child([config.python, str(PROGRAM)], request, _LIST_S)
        except TimeoutError as error:
            raise ConfigError(f"{failure}: it takes more than {_LIST_S:g} s") from error
        except OSError as error:
            raise ConfigError(f"{failure}: {error}") from error
        if not result.stdout:
            raise ConfigError(
                f"{failure}: {config.python} ended with status {result.returncode}: "
                f"{last_line(result.stderr)}"
            )
        reply = msgspec.json.decode(result.stdout.partition(b"\n")[0], type=dict[str, Any])
        if "error" in reply:
            raise ConfigError(f"cannot load the environment {config.environment!r}: {reply['error']}")
        return reply["tasks"]


class VerifiersWorkflowConfig(stretto.WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `verifiers`."""

    episode_timeout_s: PositiveFloat = 300.0
    """Seconds that one episode may take before it fails; must be less than `timeout_s`."""
    episodes: PositiveInt = 32
    """Number of episodes that each rollout worker plays at once; others wait."""
    max_calls: PositiveInt = 64
    """Maximum number of answers of the policy in one episode."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a chat, prompt included. Default: only the engine's limit."""
    tool_parser: ParserName = "auto"
    """Format in which the policy writes tool calls: hermes (also Qwen), llama3, mistral, or auto: the
    one that the chat template writes."""
    readable: tuple[stretto.LocalPath, ...] = ()
    """Files and folders that the environment can read besides its interpreter's, such as a cache of data."""
    private: tuple[str, ...] = ()
    """Folders that each episode finds empty and may write, such as `[/tests, /logs]` for Harbor's tasks.
    Each episode then has a process in a sandbox of its own, so that it cannot read what others left there."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Additional variables of the environment's process, such as API keys of judges. Of the run's environment
    variables, the process gets only PATH."""

    def __post_init__(self) -> None:
        for folder in map(Path, self.private):
            if not folder.is_absolute() or ".." in folder.parts or folder == Path("/"):
                raise ValueError(f"private: {str(folder)!r} is no absolute path of a folder below /")
        if self.episode_timeout_s >= self.limit_s:
            raise ValueError(
                f"episode_timeout_s={self.episode_timeout_s:g} must be less than "
                f"timeout_s={self.limit_s:g}, which includes waiting and scoring"
            )


def check_workflow(config: VerifiersWorkflowConfig, run: RunConfig) -> Iterator[stretto.Problem]:
    """Check that the rows come from the dataset `verifiers`, and that the sandbox works here."""
    held_out = None if run.evaluation is None else run.evaluation.dataset
    for path, dataset in (("dataset", run.dataset), ("evaluation.dataset", held_out)):
        if dataset is not None and dataset.use != "verifiers":
            yield stretto.Problem(
                f"{path}.use", f"is {dataset.use!r}; the workflow 'verifiers' needs the dataset 'verifiers'"
            )
    if config.private and run.sandbox == "unsafe":
        yield stretto.Problem("workflow.private", "needs a sandbox, and the run has sandbox 'unsafe'")
    yield from sandbox_problems(run, network=True)


class VerifiersReward(stretto.RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `verifiers`."""


def make_reward(config: VerifiersReward, context: stretto.Context) -> Callable[..., dict[str, float]]:
    """Return a function that returns the environment's own reward and metrics of the episode."""
    del config, context

    def verifiers(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        if "verdict" not in columns:
            raise ValueError("no environment has scored this answer; expected the workflow 'verifiers'")
        return columns["verdict"]

    return verifiers


@stretto.hookimpl
def stretto_dataset() -> Iterator[stretto.Component[VerifiersConfig]]:
    summary = "the tasks of an environment of `verifiers`"
    yield stretto.Component("verifiers", Verifiers, VerifiersConfig, summary)


@stretto.hookimpl
def stretto_workflow() -> Iterator[stretto.Component[VerifiersWorkflowConfig]]:
    yield stretto.Component(
        "verifiers",
        "stretto_verifiers.workflow:VerifiersWorkflow",
        VerifiersWorkflowConfig,
        "episodes of an environment of `verifiers`, in a separate Python environment",
        check_workflow,
        reward_columns=("verdict", "messages"),
    )


@stretto.hookimpl
def stretto_reward() -> Iterator[stretto.Component[VerifiersReward]]:
    yield stretto.Component("verifiers", make_reward, VerifiersReward, "the environment's own reward")
