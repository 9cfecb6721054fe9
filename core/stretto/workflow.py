"""The contract of workflows: how one prompt becomes trajectories.

A workflow runs inside a ticket, in the event loop of a rollout worker, where hundreds of tickets run at once.
It must not block, and it keeps no state between prompts. It reaches engines and rewards only through its
session.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from stretto.array import KeptTokens
from stretto.component import Defaults, Known, NonNegativeInt, PositiveFloat
from stretto.reward import reasoning_end

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stretto.agents.conversation import Conversation
    from stretto.dataset import Message
    from stretto.engine import Finish, Sampling
    from stretto.environment import Feedback
    from stretto.tokenizer import Tokenizer
    from stretto.tools import ToolAnswer

__all__ = [
    "Answer",
    "Images",
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
    "texts_and_columns",
]

T = TypeVar("T")
FailureReward = float | Literal["missing"] | None

# Receives the index of a sample, and its new tokens (int32).
OnTokens = Callable[[int, "NDArray[np.int32]"], None]


_LEAST_LIMIT_S = 600.0
_SLOW_RATE = 10
"""Tokens per second of one sample while all slots are full. A lower limit would lose the longest answers."""


class WorkflowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every workflow's section."""

    gives_reward: ClassVar[bool] = False
    """Whether the workflow may give the reward itself, so that the run needs no `reward`."""

    use: str = "single_turn"
    """Name of the workflow."""
    timeout_s: PositiveFloat | None = None
    """Time limit of one ticket, in seconds, including scoring. A ticket that takes longer fails. Time during
    which all engines are lent to others, to an evaluation or to training, does not count. null: time for
    `max_tokens` at 10 tokens per second, at least 600 s; `config.yaml` has the number."""
    member_retries: NonNegativeInt = 2
    """How often a sample that fails is tried again, with the same seeds. Only the failed part is repeated:
    if the reward failed, the same answer is scored. A failure that all samples have in common is not
    repeated. Samples that still fail are missing in their group (`queue.min_members`)."""
    failure_reward: FailureReward = None
    """Reward of a sample whose own answer is at fault: something raised `PolicyError`, or an exception came
    at each try from the same place with the same answer, while other samples of the group got through. null:
    the lowest reward of the others, and at most 0. `missing`: such a sample is missing in its group,
    like other failed samples."""

    @property
    def limit_s(self) -> float:
        """`timeout_s`, or its least default."""
        return self.timeout_s or _LEAST_LIMIT_S

    def default_values(self, known: Known) -> Defaults:
        """See `Resources.default_values`."""
        if self.timeout_s is not None:
            return {}
        longest = max(sampling.max_tokens for _, sampling in known.run.samplings())
        if longest / _SLOW_RATE <= _LEAST_LIMIT_S:
            return {"timeout_s": (_LEAST_LIMIT_S, "")}
        why = f"an answer of {longest:,} tokens at {_SLOW_RATE} tokens per second"
        return {"timeout_s": (longest / _SLOW_RATE, why)}


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, with its prompt as tokens."""

    row: Mapping[str, Any]
    """The row, as the dataset returns it."""
    ids: NDArray[np.int32]
    """(P,) ids of the prompt, with the chat template applied."""


@dataclass(frozen=True)
class Answer:
    """One finished sample of the policy."""

    tokens: NDArray[np.int32]
    """(A,) sampled tokens, including the end-of-sequence token."""
    logprobs: NDArray[np.float32]
    """(A,) behaviour logprobs."""
    versions: NDArray[np.int32]
    """(A,) policy version of each token."""
    finish: Finish
    """`stop` or `length`."""
    text: str
    """The tokens as text, without special tokens and without what the chat template writes before the content
    of an answer."""
    engine: str
    """Id of the inference worker that sampled the last token."""
    kept: KeptTokens | None = None
    """The tokens from which each token was drawn, in training with top_p, top_k or min_p; None otherwise."""
    opened: str = ""
    """The start of the answer that its prompt contains, such as `<think>`."""
    reasoning_end: int | None = 0
    """Index in `text` behind the reasoning: 0 without reasoning, None if the reasoning never ended."""


@dataclass(frozen=True)
class Score:
    """A reward, and the other metrics that the scorer reported."""

    reward: float
    """NaN if the scoring failed: then the sample is missing in its group."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Trajectory:
    """One sample to train on: L tokens. `loss_mask` marks the tokens that the policy sampled."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """Behaviour logprobs, 0 where `loss_mask` is False."""
    versions: NDArray[np.int32]
    """Policy versions, -1 where `loss_mask` is False."""
    score: Score
    finish: Finish
    engine: str
    """Id of the inference worker that sampled the last token."""
    part: bool = False
    """Whether this trajectory belongs to the same sample as the one before it. Evaluations count a sample
    once."""
    messages: Sequence[Message] | None = None
    """The conversation with its tool calls, for people who look at the sample; None if there was none."""
    images: Sequence[str] | None = None
    """SHA-256 of the file of each image, in the order of their places in the tokens. Each is an image of the
    row, or one that `Session.images` has. None: the images of the row."""
    kept: KeptTokens | None = None
    """The tokens from which each sampled token was drawn (see `Answer.kept`); no ids for other tokens."""

    @classmethod
    def of(cls, prompt_ids: NDArray[np.int32], answer: Answer, score: Score) -> Trajectory:
        """Make the trajectory of one prompt and one answer."""
        blank = len(prompt_ids)
        return cls(
            tokens=np.concatenate([prompt_ids, answer.tokens]),
            loss_mask=np.arange(blank + len(answer.tokens)) >= blank,
            logprobs=np.concatenate([np.zeros(blank, np.float32), answer.logprobs]),
            versions=np.concatenate([np.full(blank, -1, np.int32), answer.versions]),
            score=score,
            finish=answer.finish,
            engine=answer.engine,
            kept=None if answer.kept is None else KeptTokens.concat([KeptTokens.none(blank), answer.kept]),
        )


def parts_of_sample(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Mark trajectories as parts of one sample: set `part` in all but the first."""
    return [replace(trajectory, part=index > 0) for index, trajectory in enumerate(trajectories)]


def sample_numbers(trajectories: Iterable[Trajectory]) -> list[int]:
    """Return, for each trajectory of a group, the number of its sample, from 0."""
    return list(itertools.accumulate((not trajectory.part for trajectory in trajectories), initial=-1))[1:]


def texts_and_columns(
    answers: Sequence[Answer | str], columns: Mapping[str, Sequence[Any]]
) -> tuple[list[str], dict[str, Sequence[Any]]]:
    """Return the texts that a reward scores, and the columns that it gets besides the columns of the row:
    `columns`, `prompt_opened`, `reasoning_end`, and `completion_tokens` if all answers are `Answer`s."""
    texts = [answer if isinstance(answer, str) else answer.text for answer in answers]
    sampled = [answer for answer in answers if not isinstance(answer, str)]
    opened = columns.get("prompt_opened") or [getattr(answer, "opened", "") for answer in answers]
    ends = [
        reasoning_end(answer, start) if isinstance(answer, str) else answer.reasoning_end
        for answer, start in zip(answers, opened, strict=True)
    ]
    lengths = {"completion_tokens": [len(answer.tokens) for answer in sampled]}
    found = {"prompt_opened": opened, "reasoning_end": ends}
    return texts, {**found, **(lengths if len(sampled) == len(answers) else {}), **columns}


class Images(Protocol):
    """The images of one ticket: those of its row, and those that its workflow adds. Each is named by the
    SHA-256 of its file."""

    @property
    def of_row(self) -> Sequence[str]:
        """The images of the row."""
        ...

    def add(self, files: Sequence[bytes]) -> list[str]:
        """Add images, given as files, and return their names.

        Raises:
            RequestError: if a file is too large, or the ticket's files are too large together.
        """
        ...

    async def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return chat messages as text, with the model's own placeholder for each image. An image is a part
        `{"type": "image", "sha256": name}` of a message's content."""
        ...

    async def encode(self, text: str, names: Sequence[str], *, plain: bool = False) -> NDArray[np.int32]:
        """Return (L,) ids of a part of a text with images at their placeholders.

        Args:
            plain: the text is a whole prompt without chat messages.

        Raises:
            ConfigError: if an image cannot be read, or the text has another number of placeholders.
            RequestError: if the ticket has no image of such a name.
        """
        ...


class Session(Protocol):
    """The access of one ticket to the run. Valid until the workflow returns."""

    @property
    def group_size(self) -> int:
        """Number of samples to make for this prompt."""
        ...

    @property
    def sampling(self) -> Sampling:
        """The sampling options of the run; `generate` uses them by default."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the policy."""
        ...

    @property
    def images(self) -> Images | None:
        """The ticket's images; None if the policy reads no images."""
        ...

    @property
    def row_tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in the row's column `tools`. `Prompt.ids` and conversations show them."""
        ...

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        conversation_id: str = "",
        on_tokens: OnTokens | None = None,
        images: Sequence[str] | None = None,
    ) -> list[Answer]:
        """Sample n answers to a prompt.

        Args:
            images: names of the images in the prompt, in order; None for the images of the row, if the
                prompt has image tokens.
            conversation_id: name of the conversation, when a workflow has several at once. Each conversation
                numbers its own seeds, so seeds do not depend on which conversation calls first. Its requests
                go to the replica that has their prefix in its cache.
            on_tokens: called with (sample index, new tokens) when tokens arrive; each position of an answer
                comes once.

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
        """Begin a new chat (see `stretto.agents.conversation`). It is a separate conversation.

        Args:
            prompt: messages, or plain text.
            tools: JSON schemas of the functions that the chat template shows to the policy, besides those of
                the row.
            limit: maximum number of tokens of the whole chat.
            on_tokens: as in `generate`.

        Raises:
            ConfigError: if two tools have the same name.
        """
        ...

    async def members(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        """Make one group: call `sample` with each number below `group_size`, all concurrently and
        independently. A call that fails is repeated (`WorkflowConfig.member_retries`), and its conversations
        have the seeds of the first time. Return the results in the order of the numbers, without those of
        calls that still fail: these samples are missing in the group. If the answer itself is at fault, what
        was sampled is trained with `WorkflowConfig.failure_reward`.

        Raises:
            MembersError: if too few samples are left (`queue.min_members`).
            Exception: the exception that all calls have raised at the same place.
        """
        ...

    def begin(self, conversation_id: str) -> None:
        """Begin a conversation, or begin it again because its sample is repeated: its requests get the seeds
        from the first seed on. `conversation` calls it."""
        ...

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Score]:
        """Score answers (or texts) to one prompt with the run's reward. An answer whose scoring fails has a
        score with the reward NaN, or `WorkflowConfig.failure_reward` if the answer itself is at fault.

        Args:
            columns: additional columns that the reward receives by name, with one value (plain data) for each
                answer. If all answers are `Answer`s, `completion_tokens` is one of them: their lengths in
                tokens. With a text that continues its prompt, give `prompt_opened`, as `Answer.opened`.

        Raises:
            RewardError: if the reward raised, took too long, or gave no number for all answers.
        """
        ...

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools, for a workflow whose section is a
        `stretto.tools.ToolsConfig`.

        Raises:
            ConfigError: if the section of the workflow is not a `ToolsConfig`.
        """
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool in the sandbox. Errors of the call are reported in the answer, not raised.

        Args:
            arguments: the arguments, as the policy wrote them.

        Raises:
            ConfigError: as for `tools`.
        """
        ...

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        """Return the environment's feedback on the last answer of a conversation, for a workflow whose
        section is a `stretto.environment.EnvironmentConfig`.

        Args:
            state: the `state` of the previous feedback; empty at first.

        Raises:
            ConfigError: if the section of the workflow is not an `EnvironmentConfig`.
            RewardError: if the environment raised, took too long, or returned an invalid value.
            PolicyError: if the environment raised it.
        """
        ...


class Workflow(Protocol):
    """A workflow. Each rollout worker makes it once."""

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Answer one prompt and return its trajectories. Any exception fails the ticket; its text is the
        reason. A sample whose reward is NaN is missing in the group, and the others are trained."""
        ...


async def group_of(session: Session, sample: Callable[[], Awaitable[T]]) -> list[T]:
    """Make one group: `Session.members` for a function that needs no number."""
    return await session.members(lambda number: sample())
