"""The hook specifications: the one page a plugin author reads first.

A plugin is an importable module with functions marked `@hookimpl`. It is found

- by entry point, in a group named after the kind of component it offers, under the component's name:

      [project.entry-points."stretto.reward"]
      length = "acme_rewards"

- or by path: `plugins: [./my_reward.py]` in the run file.

There is one hook a kind, which returns components, and a few that follow a run's life. The hooks of a
kind are called when a component of that plugin is first wanted: in the kernel to check a run, and in
each worker that uses it. They must be quick and import nothing heavy: that belongs in the factory.

    from stretto import Component, RewardConfig, hookimpl

    def make(config, context):
        return lambda prompt, completion, **columns: float(len(completion) < 100)

    @hookimpl
    def stretto_reward():
        yield Component("length", make, RewardConfig, "rewards short answers")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.component import Component, Context
    from stretto.config import RunConfig

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("stretto")
hookimpl = pluggy.HookimplMarker("stretto")

# ---------------------------------------------------------------------- components, one hook a kind
#
# Each is called at most once a process, with no arguments. It returns all components of its kind that
# the plugin offers, in any order. An exception makes the plugin unusable: `stretto plugins` says why,
# and a run that names one of its components is refused.


@hookspec
def stretto_algorithm() -> Iterable[Component[Any]]:
    """Algorithms (`stretto.algorithm.Algorithm`); made in the kernel and in every trainer."""
    ...


@hookspec
def stretto_training() -> Iterable[Component[Any]]:
    """Training engines (`stretto.engine.TrainingEngine`); made in every rank of a worker group."""
    ...


@hookspec
def stretto_inference() -> Iterable[Component[Any]]:
    """Inference engines (`stretto.engine.InferenceEngine`); made in every inference worker."""
    ...


@hookspec
def stretto_workflow() -> Iterable[Component[Any]]:
    """Workflows (`stretto.workflow.Workflow`); made in every rollout worker."""
    ...


@hookspec
def stretto_reward() -> Iterable[Component[Any]]:
    """Rewards (`stretto.reward`); made in every scoring process of the verifier workers."""
    ...


@hookspec
def stretto_dataset() -> Iterable[Component[Any]]:
    """Datasets (`stretto.dataset.Dataset`); made in the kernel and in every rollout worker."""
    ...


@hookspec
def stretto_launcher() -> Iterable[Component[Any]]:
    """Launchers (`stretto.launcher.Launcher`); made in the kernel."""
    ...


@hookspec
def stretto_weights() -> Iterable[Component[Any]]:
    """Weight transports (`stretto.weights.WeightsTransport`); made in trainers and inference workers."""
    ...


@hookspec
def stretto_tracker() -> Iterable[Component[Any]]:
    """Trackers (`stretto.tracker.Tracker`); made in the kernel."""
    ...


# ------------------------------------------------------------------------------------ a run's life
#
# Called in the kernel, on its event loop, for every plugin that the run uses, in this order:
# configured, started, (step_finished | checkpoint_saved)*, then finished or failed, once. They must
# not block. All implementations are called. An exception in `configured` refuses the run; in any
# other it is logged with the plugin's name and the run goes on.


@hookspec
def stretto_run_configured(config: RunConfig) -> None:
    """The run file is composed and valid; nothing was started. Raise `ConfigError` to refuse it.
    Also called by `stretto check`."""


@hookspec
def stretto_run_started(config: RunConfig, context: Context) -> None:
    """Bus and workers are up, and the first ticket is about to be issued."""


@hookspec
def stretto_step_finished(context: Context, metrics: Mapping[str, Any]) -> None:
    """A train step is complete; `metrics` is its line of `metrics.jsonl`."""


@hookspec
def stretto_checkpoint_saved(context: Context, folder: Path) -> None:
    """A checkpoint is complete under its final name."""


@hookspec
def stretto_run_finished(context: Context, summary: Mapping[str, Any]) -> None:
    """The run has ended as planned or by request; `summary` is what `summary.json` holds."""


@hookspec
def stretto_run_failed(context: Context, summary: Mapping[str, Any], error: BaseException) -> None:
    """The run has ended by an error, after its workers were stopped."""
