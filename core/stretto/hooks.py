"""The hook specifications: the page that a plugin author reads first.

A plugin is an importable module with functions marked `@hookimpl`. stretto finds it

- by entry point, in a group named after the kind of component it offers, under the component's name:

      [project.entry-points."stretto.reward"]
      length = "acme_rewards"

- or by path: `plugins: [./my_reward.py]` in the run file.

Each kind of component has one hook, which returns components. stretto calls it when it first needs a
component of that plugin: in the kernel to check a run, and in each worker that uses the component. Hooks must
be quick and must not import large libraries: import those in the factory. To follow a run, write a tracker.

    from stretto import Component, RewardConfig, hookimpl

    def make(config, context):
        return lambda prompt, completion, **columns: float(len(completion) < 100)

    @hookimpl
    def stretto_reward():
        yield Component("length", make, RewardConfig, "rewards short answers")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from stretto.component import Component

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("stretto")
hookimpl = pluggy.HookimplMarker("stretto")

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
    """Return trackers (`stretto.tracker.Tracker`). A child process of the kernel makes all of them."""
    ...
