"""The contract of workflows: how one prompt becomes trajectories.

A workflow runs inside a ticket, in a rollout worker's event loop, hundreds at once: it must not block
and holds no state between prompts. It reaches the engines and the rewards through its session only.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import msgspec
import numpy as np

from stretto.component import PositiveFloat
from stretto.errors import one_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.agents.conversation import Conversation
    from stretto.engine import Finish, Sampling
    from stretto.environment import Feedback
    from stretto.models.tokenizer import Message, Tokenizer
    from stretto.tools import ToolAnswer

__all__ = [
    "Answer",
    "OnTokens",
    "Prompt",
    "Score",
    "Session",
    "Trajectory",
    "Workflow",
    "WorkflowConfig",
    "group_of",
    "parts_of_sample",
    "sample_numbers",
]

T = TypeVar("T")

# The index of a sample, and tokens (int32) of it that are new.
OnTokens = Callable[[int, "NDArray[np.int32]"], None]


class WorkflowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every workflow's section."""

    use: str = "single_turn"
    """Name of the workflow."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one ticket, scoring included; the ticket then fails. Time in which all engines are lent to
    others, to an evaluation or to training, does not count."""


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
    part: bool = False
    """Whether it is of the same sample as the trajectory before it: evaluations count the sample once."""

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


def parts_of_sample(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories that one sample became, marked as such."""
    return [replace(trajectory, part=index > 0) for index, trajectory in enumerate(trajectories)]


def sample_numbers(trajectories: Iterable[Trajectory]) -> list[int]:
    """Of each of a group's trajectories the sample, from 0, that it is, or is a part of."""
    return list(itertools.accumulate((not each.part for each in trajectories), initial=-1))[1:]


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

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's."""
        ...

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        conversation_id: str = "",
        on_tokens: OnTokens | None = None,
    ) -> list[Answer]:
        """Sample n answers to a prompt.

        Args:
            conversation_id: names one of several conversations that a workflow holds at once. Seeds are
                numbered within each, so that they do not depend on who asks first, and its requests go to
                the replica that has their prefix.
            on_tokens: called with (sample, new tokens) as they arrive, each position of an answer once.

        Raises:
            EngineError: if the engine cannot serve the request at all.
        """
        ...

    def conversation(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Conversation:
        """Begin a chat (see `stretto.agents.conversation`), a conversation of its own.

        Args:
            prompt: messages, or plain text.
            tools: JSON schemas of functions for the chat template to show.
            limit: most tokens of the whole.
            on_tokens: as of `generate`.
        """
        ...

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Score]:
        """Score answers to one prompt, or texts, with the run's reward.

        Args:
            columns: more that the reward gets by name, one value (plain data) for each answer.

        Raises:
            RewardError: if the reward raised, took too long, or gave no number.
        """
        ...

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools there are, for a workflow whose section is a `stretto.tools.ToolsConfig`.

        Raises:
            ConfigError: if it is not.
        """
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool, in the sandbox. Whatever goes wrong in it stands in the answer.

        Args:
            arguments: as the policy gave them.

        Raises:
            ConfigError: as of `tools`.
        """
        ...

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        """What the environment says of a conversation's last answer, for a workflow whose section is a
        `stretto.environment.EnvironmentConfig`.

        Args:
            state: what the feedback before had; at first, nothing.

        Raises:
            ConfigError: if it is not.
            RewardError: if the environment raised, took too long, or returned what none may.
        """
        ...


class Workflow(Protocol):
    """Made once in each rollout worker."""

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Answer one prompt. Any exception fails the ticket, with its text as the reason."""
        ...


async def group_of(session: Session, sample: Callable[[], Awaitable[T]]) -> list[T]:
    """One group: `sample` is called `session.group_size` times, all at once. An error ends them all."""
    made: list[T] = []

    async def one() -> None:
        made.append(await sample())

    with one_error():
        async with anyio.create_task_group() as tasks:
            for _ in range(session.group_size):
                tasks.start_soon(one)
    return made
