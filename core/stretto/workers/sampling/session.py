"""The session of one ticket: how its workflow samples, scores, and calls tools and environments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.agents.conversation import Conversation, conversation_in
from stretto.array import Array
from stretto.bus.messages.tickets import Ticket
from stretto.chat.prompts import both_tools, tools_of
from stretto.config import RunConfig
from stretto.dataset import Message, Row
from stretto.engine import GenerateRequest, Sampling, sample_seed
from stretto.environment import Feedback, columns_of_turn
from stretto.errors import ConfigError, EngineError
from stretto.machine import clock
from stretto.models.images import IMAGE_COLUMNS
from stretto.models.tokenizer import answer_texts
from stretto.tokenizer import Tokenizer
from stretto.tools import ToolAnswer
from stretto.user_code.faults import SampleFault
from stretto.workers.images import RolloutImages, TicketImages
from stretto.workers.sampling.generation import Generations, VersionFloor
from stretto.workers.sampling.members import Members, member_number
from stretto.workers.sampling.transcript import Transcript
from stretto.workers.sampling.verifier_client import VerifierClient
from stretto.workflow import Answer, OnTokens, Prompt, Score, Trajectory, Workflow, texts_and_columns

T = TypeVar("T")


@dataclass(frozen=True)
class VariantServices:
    """What the tickets of one variant, or of the run's own sections, share in a rollout worker."""

    config: RunConfig
    workflow: Workflow
    generations: Generations
    verifiers: VerifierClient
    tokenizer: Tokenizer
    images: RolloutImages | None
    """None for a text model."""
    smallest: tuple[float, str]
    """Number of token ids that all models have, and the model with no more; inf if none has its own ids."""
    on_oldest_version: Callable[[Ticket, int], None]
    """Called when the version of a ticket's oldest token is known."""

    def sampling_of(self, ticket: Ticket) -> Sampling:
        """Return the sampling of a ticket whose workflow gives no sampling of its own."""
        if ticket.purpose == "eval" and self.config.evaluation is not None:
            return self.config.evaluation.sampling or self.config.sampling
        return self.config.sampling


class _Clock:
    """Measures seconds in which at least one of its `with` blocks runs, as a part of the clock `whole`."""

    def __init__(self, whole: _Clock | None = None) -> None:
        self.seconds = 0.0
        self._whole = whole
        self._running = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._whole is not None:
            self._whole.__enter__()
        if self._running == 0:
            self._since = clock.now()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self.seconds += clock.now() - self._since
        if self._whole is not None:
            self._whole.__exit__()


class RolloutSession:
    """The `stretto.workflow.Session` of one ticket; that protocol documents the contract."""

    def __init__(self, services: VariantServices, ticket: Ticket) -> None:
        self._services = services
        self._ticket = ticket
        self.away_clock = _Clock()
        self.generate_clock, self.score_clock = _Clock(self.away_clock), _Clock(self.away_clock)
        """The time that the ticket spends in generation, and at verifiers."""
        self.tool_clock, self.environment_clock = _Clock(self.score_clock), _Clock(self.score_clock)
        """Parts of the time at verifiers."""
        self._floor = VersionFloor(
            ticket.min_version, lambda version: services.on_oldest_version(ticket, version)
        )
        config = services.config
        least, retries = config.queue.least_members(ticket.samples), config.workflow.member_retries
        self.group = Members(
            ticket.samples,
            least=least,
            retries=retries,
            failure_reward=config.workflow.failure_reward,
            sampled=self._sampled_by,
            smallest=services.smallest if ticket.purpose == "train" else (math.inf, ""),
        )
        self.images: TicketImages | None = None
        self.row_tools: Sequence[Mapping[str, Any]] = ()
        self._turns: Counter[str] = Counter()
        self._conversations: Counter[int | None] = Counter()
        """Number of conversations of each sample of `members`; at None, of those outside of `members`."""
        self._transcripts: dict[str, Transcript] = {}
        self._members_of: dict[str, int | None] = {}
        """The sample of `members` that each conversation belongs to."""
        self._alone: list[tuple[NDArray[np.int32], Answer]] = []
        """Prompts, with their answers, that belong to no conversation."""

    @property
    def group_size(self) -> int:
        """Number of samples that the algorithm wants for the prompt."""
        return self._ticket.samples

    def see(self, row: Row) -> None:
        """Read the ticket's row. Called before the workflow begins."""
        self.row_tools = tools_of(row)

    @property
    def sampling(self) -> Sampling:
        """The default sampling. Answers also end at tokens that the chat template writes after a turn."""
        sampling, stops = self._services.sampling_of(self._ticket), self.tokenizer.form.stop_ids
        if not stops or sampling.ignore_eos:
            return sampling
        ids = (*sampling.stop_token_ids, *(id for id in stops if id not in sampling.stop_token_ids))
        return msgspec.structs.replace(sampling, stop_token_ids=ids)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._services.tokenizer

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
        """Sample n answers to a prompt."""
        ticket, services = self._ticket, self._services
        self._turns[conversation_id] += 1
        number = self._turns[conversation_id]
        turn = f"{conversation_id}.{number}" if conversation_id else str(number)
        sampling = sampling or self.sampling
        if ticket.purpose == "train" and sampling.shape != services.config.sampling.shape:
            raise ConfigError(
                "the workflow samples with other top_p, top_k, min_p, logit_bias or max_kept than "
                "`sampling`, and a train step computes all its logprobs as that says; change "
                "only lengths and stops"
            )
        wants_kept = ticket.purpose == "train" and sampling.truncates
        request = GenerateRequest(
            id=f"{ticket.name}/{turn}",
            prompt_ids=Array.of(prompt_ids, np.int32),
            seeds=tuple(sample_seed(self._seed_scope, turn, sample) for sample in range(n)),
            sampling=sampling.in_training() if wants_kept else sampling,
            min_version=self._floor.version,
            deadline_s=services.config.workflow.limit_s,
            images=self._images_of_row_in(prompt_ids) if images is None else tuple(images),
            wants_kept=wants_kept,
        )
        with self.generate_clock:
            samples = await services.generations.run(
                request,
                self._floor,
                exact_version=ticket.exact_version,
                affinity=f"{ticket.name}/{conversation_id}",
                on_tokens=on_tokens,
            )
        answers = [
            Answer(
                tokens=sample.tokens(),
                logprobs=sample.logprobs(),
                versions=sample.versions(),
                finish=sample.finish,
                engine=sample.engine,
                kept=sample.kept() if wants_kept else None,
                **answer_texts(prompt_ids, sample.tokens(), sample.finish, self.tokenizer),
            )
            for sample in samples
        ]
        if wants_kept and any(answer.kept is None for answer in answers):
            raise EngineError(f"{answers[0].engine} has not sent the tokens from which it drew an answer")
        if conversation_id:
            transcript = self._transcripts.setdefault(conversation_id, Transcript())
            for answer in answers:
                transcript.add(prompt_ids, answer, request.images)
        else:
            self._alone += [(prompt_ids, answer) for answer in answers]
        return answers

    def finished(self) -> list[Trajectory]:
        """Return trajectories of the tokens sampled so far, with the reward NaN."""
        alone = [Trajectory.of(prompt, answer, Score(math.nan)) for prompt, answer in self._alone]
        return [*self._sampled_in(self._transcripts), *alone]

    def conversation(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Conversation:
        """Begin a conversation. It has its own seeds, and its requests go to the same engine if possible."""
        member = member_number.get()
        self._conversations[member] += 1
        number = self._conversations[member]
        name = f"c{number}" if member is None else f"c{member + 1}n{number}"
        all_tools = both_tools(self.row_tools, tools)
        return conversation_in(self, name, prompt, tools=all_tools, limit=limit, on_tokens=on_tokens)

    def begin(self, conversation_id: str) -> None:
        """Begin a conversation again: its next request has the seeds of its first request."""
        self._turns.pop(conversation_id, None)
        self._transcripts.pop(conversation_id, None)
        self._members_of[conversation_id] = member_number.get()

    async def members(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        """Make a group of independent samples."""

        async def begin_again(number: int) -> T:
            self._conversations.pop(number, None)
            for conversation_id in [name for name, member in self._members_of.items() if member == number]:
                self._transcripts.pop(conversation_id, None)
            return await sample(number)

        return await self.group.run(begin_again)

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Score]:
        """Let the verifiers score answers to the prompt's row."""
        texts, all_columns = texts_and_columns(answers, columns or {})
        row = self._row(prompt)

        async def score_some(indices: list[int]) -> list[Score | SampleFault]:
            part = {name: [values[index] for index in indices] for name, values in all_columns.items()}
            with self.score_clock:
                scored = await self._services.verifiers.score(row, [texts[index] for index in indices], part)
            return [each if isinstance(each, SampleFault) else Score(*each) for each in scored]

        lengths = [0 if isinstance(answer, str) else len(answer.tokens) for answer in answers]
        return await self.group.score(lengths, score_some)

    async def tools(self) -> list[dict[str, Any]]:
        return await self._services.verifiers.tools()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        with self.tool_clock:
            return await self._services.verifiers.call(name, arguments, images=self.images is not None)

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        """Return the environment's reaction to the conversation's last answer."""
        with self.environment_clock:
            question = {**self._row(prompt), **columns_of_turn(conversation, state)}
            return await self._services.verifiers.feedback(question)

    def _sampled_by(self, number: int) -> list[Trajectory]:
        return self._sampled_in(name for name in self._transcripts if self._members_of.get(name) == number)

    def _sampled_in(self, conversations: Iterable[str]) -> list[Trajectory]:
        reads_images = self.images is not None
        return [
            trajectory
            for name in conversations
            for trajectory in self._transcripts[name].trajectories(reads_images=reads_images)
        ]

    @property
    def _seed_scope(self) -> str:
        """All attempts of a ticket have the same seeds: a repeated attempt draws the same random numbers."""
        ticket = self._ticket
        number = ticket.id if ticket.purpose == "train" else ticket.row
        return f"{self._services.config.seed}/{ticket.purpose}/{number}"

    def _images_of_row_in(self, prompt_ids: NDArray[np.int32]) -> tuple[str, ...]:
        return tuple(self.images.of_row) if self.images and self.images.tokens_in(prompt_ids) else ()

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the row that is sent to verifiers: without its images, if the model reads images."""
        hidden = IMAGE_COLUMNS if self._services.images is not None else ()
        return {name: value for name, value in prompt.row.items() if name not in hidden}
