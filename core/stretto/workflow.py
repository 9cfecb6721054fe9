"""The contract of workflows: how one prompt becomes trajectories.

A workflow runs inside a ticket, in a rollout worker's event loop, hundreds at once: it must not block
and holds no state between prompts. It reaches the engines and the rewards through its session only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from stretto.component import PositiveFloat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.engine import Finish, Sampling

__all__ = [
    "Answer",
    "Prompt",
    "Score",
    "Session",
    "Trajectory",
    "Workflow",
    "WorkflowConfig",
]


class WorkflowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every workflow's section."""

    use: str = "single_turn"
    """Name of the workflow."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one ticket, scoring included; the ticket then fails."""


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, ready to be answered."""

    row: Mapping[str, Any]
    """The row as the dataset has it."""
    ids: NDArray[np.int32]
    """(P,) its prompt, template applied."""


@dataclass(frozen=True)
class Answer:
    """One finished sample of the policy."""

    tokens: NDArray[np.int32]
    """(A,) sampled tokens, the end-of-sequence token included."""
    logprobs: NDArray[np.float32]
    """(A,) behaviour logprobs."""
    versions: NDArray[np.int32]
    """(A,) policy version of each token."""
    finish: Finish
    """`stop` or `length`."""
    text: str
    """The tokens as text, without special tokens."""
    engine: str
    """Id of the inference worker that gave the last token."""


@dataclass(frozen=True)
class Score:
    """A reward and whatever else the scorer reported."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Trajectory:
    """One sample to train on: L tokens, of which `loss_mask` marks those the policy wrote."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """Behaviour logprobs, 0 where `loss_mask` is False."""
    versions: NDArray[np.int32]
    """Policy versions, -1 where `loss_mask` is False."""
    score: Score
    finish: Finish
    engine: str
    """Who made it."""

    @classmethod
    def of(cls, prompt_ids: NDArray[np.int32], answer: Answer, score: Score) -> Trajectory:
        """The trajectory of one prompt and one answer."""
        blank = len(prompt_ids)
        return cls(
            tokens=np.concatenate([prompt_ids, answer.tokens]),
            loss_mask=np.arange(blank + len(answer.tokens)) >= blank,
            logprobs=np.concatenate([np.zeros(blank, np.float32), answer.logprobs]),
            versions=np.concatenate([np.full(blank, -1, np.int32), answer.versions]),
            score=score,
            finish=answer.finish,
            engine=answer.engine,
        )


class Session(Protocol):
    """A ticket's access to the run. Valid until the workflow returns."""

    @property
    def group_size(self) -> int:
        """Trajectories wanted of this prompt."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How the run samples, unless `generate` is told otherwise."""
        ...

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, n: int = 1, sampling: Sampling | None = None
    ) -> list[Answer]:
        """Sample n answers to a prompt.

        Raises:
            EngineError: if the engine cannot serve the request at all.
        """
        ...

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Score]:
        """Score answers to one prompt with the run's reward.

        Raises:
            RewardError: if the reward raised, took too long, or gave no number.
        """
        ...


class Workflow(Protocol):
    """Made once in each rollout worker."""

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Answer one prompt. Any exception fails the ticket, with its text as the reason."""
        ...
