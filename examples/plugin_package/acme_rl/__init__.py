"""A plugin package: an algorithm, a reward and a launcher, in one module.

It imports only public names of stretto, and torch only in the functions that compute.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import Process

from stretto import AlgorithmConfig, Component, Context, LauncherConfig, Problem, RewardConfig, hookimpl
from stretto.algorithm import Call, Group, Loss, Model, function, generate, score, train
from stretto.component import PositiveFloat, PositiveInt
from stretto.launcher import Job, thread_variables

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch


# ------------------------------------------------------------------------------------- the algorithm


class ReinforceConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the algorithm `reinforce`."""

    group_size: PositiveInt = 8
    """Samples of each prompt."""
    max_weight: PositiveFloat = 2.0
    """Largest importance weight pi / mu of a token (truncated importance sampling)."""


class Reinforce:
    """REINFORCE with the mean of the group as baseline, corrected towards the policy that sampled:
    loss = - min(pi / mu, max_weight) (R - mean_G) log pi."""

    models: Mapping[str, Model] = {"actor": Model()}

    def __init__(self, config: ReinforceConfig, context: Context) -> None:
        del context
        self.config = config

    def calls(self) -> Sequence[Call]:
        """Return the dataflow generate -> score -> advantages -> train."""
        return [
            generate(samples=self.config.group_size),
            score(),
            function(self.advantages, reads=("rewards", "group", "sample"), writes=("advantages",)),
            train("actor", Loss(self.loss, "token"), reads=("advantages", "behaviour_logprobs")),
        ]

    def keep(self, group: Group) -> bool:
        """Filter groups in which all answers have the same reward: they have no gradient."""
        return max(group.rewards) > min(group.rewards)

    def advantages(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the reward minus the group's mean, (S,), at every token: (T,)."""
        from stretto.rl.functional import group_normalise

        centred = group_normalise(batch["rewards"], batch["group"], batch["sample"], std=False)
        return {"advantages": centred[batch.sequence_index()]}

    def loss(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token, (T,), and statistics."""
        from stretto.rl.functional import importance_weight

        weight = importance_weight(
            logprobs, batch["behaviour_logprobs"], cap=self.config.max_weight, over_cap="truncate"
        )
        return -weight * batch["advantages"] * logprobs, {"weight": weight}


@hookimpl
def stretto_algorithm() -> Iterator[Component[ReinforceConfig]]:
    """The algorithm."""
    yield Component("reinforce", Reinforce, ReinforceConfig, "REINFORCE, truncated importance weights")


# ---------------------------------------------------------------------------------------- the reward


class DigitsConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `digits`."""

    wanted: str = "0123456789"
    """Characters that the reward counts."""


def make_digits(config: DigitsConfig, context: Context) -> Callable[..., float]:
    """Return the scoring function: the share of an answer's characters that are in `wanted`."""
    del context

    def digits(prompt: Any, completion: str) -> float:
        return sum(character in config.wanted for character in completion) / max(1, len(completion))

    return digits


@hookimpl
def stretto_reward() -> Iterator[Component[DigitsConfig]]:
    """The reward."""
    yield Component("digits", make_digits, DigitsConfig, "share of characters that are in `wanted`")


# -------------------------------------------------------------------------------------- the launcher


class PlainHandle:
    """One process."""

    def __init__(self, process: Process) -> None:
        self.place = f"process {process.pid}"
        self._process = process

    async def wait(self) -> int:
        """Wait for the exit status."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Terminate the process, and kill it after `grace_s` seconds."""
        if self._process.returncode is None:
            self._process.terminate()
            with anyio.move_on_after(grace_s):
                await self._process.wait()
                return
            self._process.kill()
        await self._process.wait()

    async def dump_stacks(self) -> None:
        """Send SIGUSR1, at which a worker writes the stacks of its threads."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)


class PlainLauncher:
    """Processes of this machine, without GPUs."""

    def __init__(self, config: LauncherConfig, context: Context) -> None:
        del config, context

    def check(self, jobs: Sequence[Job]) -> Iterable[Problem]:
        """Refuse jobs that need GPUs."""
        if any(job.resources.gpus for job in jobs):
            yield Problem("launcher.use", "'plain' gives no GPUs; use 'local'")

    async def launch(self, jobs: Sequence[Job]) -> Sequence[PlainHandle]:
        """Start the jobs, one after the other."""
        handles: list[PlainHandle] = []
        for job in jobs:
            env = {**os.environ, **thread_variables(job.resources), **job.env}
            with Path(job.log).open("ab") as log:
                process = await anyio.open_process(
                    job.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            handles.append(PlainHandle(process))
        return handles


@hookimpl
def stretto_launcher() -> Iterator[Component[LauncherConfig]]:
    """The launcher."""
    yield Component("plain", PlainLauncher, LauncherConfig, "processes, nothing else")
