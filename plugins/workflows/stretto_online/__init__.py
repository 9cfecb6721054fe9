"""Workflow `online`: outside programs start a session for each sample, and post its reward later.

A program gets the row's prompt, and an address and key for clients of OpenAI and Anthropic. It may post the
reward until `session_timeout_s`; docs/agents.md describes the requests.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar

import msgspec

from stretto import Component, Problem, hookimpl
from stretto.agents.config import AgentCallsConfig
from stretto.component import PositiveFloat
from stretto.config import RunConfig

__all__ = ["OnlineConfig"]


class OnlineConfig(AgentCallsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the workflow `online`."""

    gives_reward: ClassVar[bool] = True

    timeout_s: PositiveFloat = 86400.0
    """Time limit of one ticket, in seconds, which includes the wait for programs that start its sessions. A
    ticket that takes longer fails."""
    session_timeout_s: PositiveFloat = 1800.0
    """Seconds from the start of a session until it has ended and has a reward. A session that takes longer
    fails its sample; the others continue. Must be less than `timeout_s`."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """Port of loopback on which the rollout worker listens; null for any free port. With a port, the run can
    have only one rollout worker."""

    def __post_init__(self) -> None:
        if self.session_timeout_s >= self.limit_s:
            raise ValueError(
                f"session_timeout_s={self.session_timeout_s:g} must be less than "
                f"timeout_s={self.limit_s:g}, which includes the wait for a program"
            )


def check(config: OnlineConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that no reward and no variants are set, and that no two workers share a port."""
    if run.reward is not None:
        yield Problem("reward", "the sessions of the workflow 'online' post their rewards; leave it out")
    if config.port is not None and run.rollout.processes > 1:
        message = f"{run.rollout.processes} rollout workers cannot listen on one port; leave it out"
        yield Problem("workflow.port", message)
    if run.variants.__struct_fields__:
        yield Problem("variants", "programs cannot distinguish them; the workflow 'online' allows none")


@hookimpl
def stretto_workflow() -> Iterator[Component[OnlineConfig]]:
    yield Component(
        "online",
        "stretto_online.workflow:OnlineWorkflow",
        OnlineConfig,
        "sessions of outside programs, which post rewards over HTTP",
        check,
    )
