"""`verifiers`: environments of the library of that name, as dataset, workflow and reward.

The library pins much that stretto does not, so it lives in a Python environment of its own. There an
environment plays its episodes against the policy's endpoint, and says what they are worth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stretto import (
    Component,
    Context,
    DatasetConfig,
    LocalPath,
    Problem,
    RewardConfig,
    WorkflowConfig,
    hookimpl,
)
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.dataset import Row
from stretto.errors import ConfigError
from stretto.tools import ParserName
from stretto.user_code.child_process import last_line, run_child
from stretto.user_code.sandbox import sandbox_problems

__all__ = ["PROGRAM", "Verifiers", "VerifiersConfig", "VerifiersReward", "VerifiersWorkflowConfig"]

PROGRAM = Path(__file__).with_name("environment.py")
_LIST_S = 600.0
"""For an environment to be imported and its tasks to be listed."""


class VerifiersConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `verifiers`."""

    environment: str
    """Id of the environment's taskset, such as `gsm8k-v1`: an installed package, or a module in `path`."""
    python: LocalPath
    """The interpreter that has `verifiers` and the environment, such as `/opt/envs/gsm8k/bin/python`."""
    path: LocalPath | None = None
    """Folder with environments that are not installed."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """More of the environment's own config, as below `[env]` of its files: `{taskset: {…}, agent: {…}}`.
    Agents run in the sandbox of the rollout worker unless their `runtime` says otherwise."""
    size: PositiveInt | None = None
    """Use the first so many tasks; needed where they have no end."""


class Verifiers:
    """A row for each task: a prompt for people and for the length, and what the workflow plays it by."""

    def __init__(self, config: VerifiersConfig, context: Context) -> None:
        del context
        taskset = {**config.options.get("taskset", {}), "id": config.environment}
        self._made_by = {
            "python": config.python,
            "path": [config.path] if config.path else [],
            "config": {**config.options, "taskset": taskset},
            "size": config.size,
        }
        self._tasks: list[dict[str, Any]] = self._listed(config)
        keys = [task["key"] for task in self._tasks]
        self.fingerprint = hashlib.sha256(msgspec.json.encode((self._made_by["config"], keys))).hexdigest()
        """Of the environment's config and the keys of its tasks."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Row:
        task = self._tasks[index]
        system = [{"role": "system", "content": task["system"]}] if task["system"] else []
        return {
            "id": task["name"] or task["key"],
            "prompt": [*system, {"role": "user", "content": task["prompt"] or "…"}],
            "data": task["data"],
            "verifiers": {**self._made_by, "task": index, "key": task["key"]},
        }

    def _listed(self, config: VerifiersConfig) -> list[dict[str, Any]]:
        what = f"the environment {config.environment!r}"
        try:
            told = json.dumps(self._made_by).encode() + b"\n"
            done = run_child([config.python, str(PROGRAM)], told, _LIST_S)
        except TimeoutError as error:
            raise ConfigError(f"{what} cannot be listed: it takes more than {_LIST_S:g} s") from error
        except OSError as error:
            raise ConfigError(f"{what} cannot be listed: {error}") from error
        if not done.stdout:
            raise ConfigError(
                f"{what} cannot be listed: {config.python} ended with {done.returncode}: {last_line(done)}"
            )
        reply = msgspec.json.decode(done.stdout.splitlines()[0], type=dict[str, Any])
        if "error" in reply:
            raise ConfigError(f"{what} cannot be loaded: {reply['error']}")
        return reply["tasks"]


# ---------------------------------------------------------------------------------------- workflow


class VerifiersWorkflowConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `verifiers`."""

    episode_timeout_s: PositiveFloat = 300.0
    """Seconds for one episode, which then fails the ticket; must be less than `timeout_s`."""
    episodes: PositiveInt = 32
    """Episodes that each rollout worker plays at once; others wait."""
    max_calls: PositiveInt = 64
    """Answers of the policy in one episode."""
    max_tokens: PositiveInt | None = None
    """Tokens of a whole chat, the prompt included; default no limit but the engine's."""
    tool_parser: ParserName = "hermes"
    """How the policy writes calls of tools: hermes (Qwen too), llama3 or mistral."""
    readable: tuple[LocalPath, ...] = ()
    """Files and folders that the environment can read besides its interpreter's, such as a cache of data."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Its environment variables, such as keys of judges; of the run's own it gets none but PATH."""

    def __post_init__(self) -> None:
        """Relations between fields."""
        if self.episode_timeout_s >= self.timeout_s:
            raise ValueError(
                f"episode_timeout_s={self.episode_timeout_s:g} must be less than "
                f"timeout_s={self.timeout_s:g}, which includes waiting and scoring"
            )


def make_workflow(config: VerifiersWorkflowConfig, context: Context) -> Any:
    """The workflow."""
    from stretto_verifiers.workflow import VerifiersWorkflow

    return VerifiersWorkflow(config, context)


def check_workflow(config: VerifiersWorkflowConfig, run: RunConfig) -> Iterator[Problem]:
    """Whether its rows say what to play, and whether that can run here."""
    del config
    held_out = None if run.evaluation is None else run.evaluation.dataset
    for path, dataset in (("dataset", run.dataset), ("evaluation.dataset", held_out)):
        if dataset is not None and dataset.use != "verifiers":
            yield Problem(
                f"{path}.use", f"is {dataset.use!r}; the workflow 'verifiers' plays rows of 'verifiers'"
            )
    yield from sandbox_problems(run)


# ------------------------------------------------------------------------------------------ reward


class VerifiersReward(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `verifiers`."""


def make_reward(config: VerifiersReward, context: Context) -> Callable[..., dict[str, float]]:
    """What the environment said of the episode: its reward, and its metrics."""
    del config, context

    def verifiers(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        if "verdict" not in columns:
            raise ValueError("no environment has said anything; this reward is for the workflow 'verifiers'")
        return columns["verdict"]

    return verifiers


@hookimpl
def stretto_dataset() -> Iterator[Component[VerifiersConfig]]:
    """The dataset of this package."""
    yield Component("verifiers", Verifiers, VerifiersConfig, "the tasks of an environment of `verifiers`")


@hookimpl
def stretto_workflow() -> Iterator[Component[VerifiersWorkflowConfig]]:
    """The workflow of this package."""
    yield Component(
        "verifiers",
        make_workflow,
        VerifiersWorkflowConfig,
        "episodes of an environment of `verifiers`, in a Python environment of its own",
        check_workflow,
        reward_columns=("verdict", "messages"),
    )


@hookimpl
def stretto_reward() -> Iterator[Component[VerifiersReward]]:
    """The reward of this package."""
    yield Component("verifiers", make_reward, VerifiersReward, "what an environment of `verifiers` gives")
