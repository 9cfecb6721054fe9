"""The hook specifications: the page that a plugin author reads first.

A plugin is an importable module with functions marked `@hookimpl`. stretto finds it

- by entry point, in a group named after the kind of component it offers, under the component's name:

      [project.entry-points."stretto.reward"]
      length = "acme_rewards"

- or by path: `plugins: [./my_reward.py]` in the run file.

Each kind of component has one hook, which returns components. A few more hooks follow the life of a run.
stretto calls the hook of a kind when it first needs a component of that plugin: in the kernel to check a
run, and in each worker that uses the component. These hooks must be quick and must not import large
libraries: import those in the factory.

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

# ------------------------------------------------------------------ components, one hook for each kind
#
# stretto calls each hook at most once per process, without arguments. The hook returns all components of its
# kind that the plugin offers, in any order. An exception makes the plugin unusable: `stretto plugins` shows
# the reason, and stretto refuses a run that names one of its components.


@hookspec
def stretto_algorithm() -> Iterable[Component[Any]]:
    """Return algorithms (`stretto.algorithm.Algorithm`). The kernel and every trainer make them."""
    ...


@hookspec
def stretto_training() -> Iterable[Component[Any]]:
    """Return training engines (`stretto.engine.TrainingEngine`). Every rank of a worker group makes one."""
    ...


@hookspec
def stretto_inference() -> Iterable[Component[Any]]:
    """Return inference engines (`stretto.engine.InferenceEngine`). Every inference worker makes one."""
    ...


@hookspec
def stretto_workflow() -> Iterable[Component[Any]]:
    """Return workflows (`stretto.workflow.Workflow`). Every rollout worker makes one."""
    ...


@hookspec
def stretto_reward() -> Iterable[Component[Any]]:
    """Return rewards (`stretto.reward`). Every scoring process of the verifier workers makes one."""
    ...


@hookspec
def stretto_dataset() -> Iterable[Component[Any]]:
    """Return datasets (`stretto.dataset.Dataset`). The kernel and every rollout worker make them."""
    ...


@hookspec
def stretto_launcher() -> Iterable[Component[Any]]:
    """Return launchers (`stretto.launcher.Launcher`). The kernel makes one."""
    ...


@hookspec
def stretto_weights() -> Iterable[Component[Any]]:
    """Return weight transports (`stretto.weights.WeightsTransport`). Trainers and inference workers make
    one."""
    ...


@hookspec
def stretto_tracker() -> Iterable[Component[Any]]:
    """Return trackers (`stretto.tracker.Tracker`). A child process of the kernel makes each."""
    ...


# ------------------------------------------------------------------------------------ a run's life
#
# The kernel calls these hooks on its event loop for every plugin that the run uses, in this order:
# configured, started, (step_finished | checkpoint_saved)*, then finished or failed, once. They must not
# block. The kernel calls all implementations. An exception in `configured` refuses the run. The kernel logs
# an exception in any other hook with the plugin's name, and the run goes on.


@hookspec
def stretto_run_configured(config: RunConfig) -> None:
    """The run file is composed and valid, and no process has started. Raise `ConfigError` to refuse the run.
    `stretto check` calls this hook too."""


@hookspec
def stretto_run_started(config: RunConfig, context: Context) -> None:
    """Bus and workers are running; the kernel is about to issue the first ticket."""


@hookspec
def stretto_step_finished(context: Context, metrics: Mapping[str, Any]) -> None:
    """A train step is complete; `metrics` is its line of `metrics.jsonl`."""


@hookspec
def stretto_checkpoint_saved(context: Context, folder: Path) -> None:
    """A checkpoint is complete under its final name. With `checkpoint.store`, `folder` has `store.json` with
    the URL of its files, its manifest and `kernel.json`."""


@hookspec
def stretto_run_finished(context: Context, summary: Mapping[str, Any]) -> None:
    """The run has ended as planned or by request. `summary` is the content of `summary.json`."""


@hookspec
def stretto_run_failed(context: Context, summary: Mapping[str, Any], error: BaseException) -> None:
    """The run has ended with `error`, and its workers have stopped. `summary` is the content of
    `summary.json`."""
