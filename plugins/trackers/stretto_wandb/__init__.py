"""Tracker `wandb`: Weights & Biases, online or into files that `wandb sync` sends later."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from stretto import Component, Problem, TrackerConfig, hookimpl
from stretto.config import RunConfig

__all__ = ["WandbConfig"]


class WandbConfig(TrackerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the tracker `wandb`. The credentials come from `WANDB_API_KEY` in the environment, or from
    the file that `wandb login` writes."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes files in the run's folder, for machines without a network: `wandb sync` sends them
    later."""
    project: str = "stretto"
    """Project of the run."""
    entity: str | None = None
    """User or team; default: the user of the credentials."""
    run_name: str | None = None
    """Name of the run on its page; default: the name of the run's folder."""
    group: str | None = None
    """Group of runs that belong together, such as the seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""


def _check(config: WandbConfig, run: RunConfig) -> Iterator[Problem]:
    del run
    logins = (Path(os.environ.get("NETRC", "~/.netrc")), Path("~/_netrc"))
    if config.mode == "online" and not (
        "WANDB_API_KEY" in os.environ or any(file.expanduser().exists() for file in logins)
    ):
        yield Problem(
            "trackers",
            "wandb has no credentials here: set WANDB_API_KEY, run `wandb login`, or choose `mode: offline`",
            "warning",
        )


@hookimpl
def stretto_tracker() -> Iterator[Component[WandbConfig]]:
    yield Component(
        "wandb",
        "stretto_wandb.wandb_run:WandbTracker",
        WandbConfig,
        "Weights & Biases, online or offline",
        check=_check,
        requires={"wandb": "stretto[wandb]"},
    )
