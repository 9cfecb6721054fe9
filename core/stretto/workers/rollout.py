"""The rollout worker: takes tickets, runs workflows, hundreds at once in one event loop, and writes the log.

A ticket ends here in one of three ways: its trajectories and then one `GroupDone` are in the log; one
`GroupFailed` is; or nobody waits for it any more. Only then is it taken off the work queue.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.agents.conversation import Conversation
from stretto.array import Array
from stretto.assembly.logs import bound
from stretto.bus.client import Taken
from stretto.bus.messages import (
    AbortTicket,
    Beacon,
    GroupDone,
    GroupFailed,
    Heartbeat,
    Member,
    Progress,
    Purpose,
    Ticket,
    TicketStarted,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.dataset import Dataset, Row
from stretto.engine import GenerateRequest, Sampling
from stretto.environment import Feedback
from stretto.errors import ConfigError, EngineError, RewardError, StrettoError, leaves
from stretto.models.files import fetched_config
from stretto.models.tokenizer import Message, Tokenizer, fault_of, load_tokenizer
from stretto.models.vision import IMAGE_COLUMNS, Vision, is_vision_language, keep_torch_out
from stretto.reward import is_number
from stretto.tools import ToolAnswer
from stretto.workers.answers import answers_of
from stretto.workers.context import WorkerContext
from stretto.workers.generation import Generations, VersionFloor
from stretto.workers.routing import Router
from stretto.workers.verifier_client import VerifierClient
from stretto.workflow import Answer, OnTokens, Prompt, Trajectory, Workflow, sample_numbers
from stretto.workflow import Score as SampleScore

__all__ = ["RolloutWorker", "sample_seed"]

log = structlog.get_logger()

_BUNDLE_BYTES = 512 * 1024
_KEEP_ALIVE_S = 10.0


class _TicketLimits:
    """The time limits of tickets. They stand still while all engines are lent to others."""

    def __init__(self, context: WorkerContext) -> None:
        self._running: set[tuple[int | None, anyio.CancelScope]] = set()
        """(`exact_version` of the ticket, its limit)."""
        self._heard_s = 0.0
        self._serving: set[int | None] = set()
        """`exact_version` of each engine, by the latest beacon."""
        context.on_beacon(self._hear)

    @contextmanager
    def of(self, ticket: Ticket, timeout_s: float) -> Generator[None]:
        """Raise TimeoutError where the block takes longer."""
        with anyio.fail_after(timeout_s) as limit:
            entry = (ticket.exact_version, limit)
            self._running.add(entry)
            try:
                yield
            finally:
                self._running.discard(entry)

    def _hear(self, beacon: Beacon) -> None:
        """Beacons come every second and at every change."""
        now = anyio.current_time()
        passed, self._heard_s = now - self._heard_s, now
        for exact_version, limit in self._running:
            if self._serving and exact_version not in self._serving:
                limit.deadline += passed
        self._serving = {peer.exact_version for peer in beacon.peers if peer.role == "inference"}


class RolloutWorker:
    """One rollout worker."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.composed.config
        self._context = context
        self._bus = context.bus
        self._slots: dict[Purpose, anyio.Semaphore] = {
            # Of each its own: those of training keep theirs while their engine is lent to an evaluation.
            purpose: anyio.Semaphore(config.rollout.concurrency)
            for purpose in ("train", "eval")
        }
        self._engines = Router(context, "inference")
        self.verifiers = VerifierClient(context)
        self._generations = Generations(context, self._engines)
        self._running: dict[tuple[Purpose, int, int], tuple[anyio.CancelScope, Taken[Ticket]]] = {}
        self._limits = _TicketLimits(context)
        self._progress: dict[tuple[int, int], int] = {}
        self._news = anyio.Event()
        self._vision: Vision | None = None
        self._looking = anyio.CapacityLimiter(1)

    async def run(self, ready: Callable[[], None]) -> None:
        """Take tickets until cancelled."""
        context, config = self._context, self._context.composed.config
        self._vision = await anyio.to_thread.run_sync(_vision_of, context.component_context.model)
        self.tokenizer: Tokenizer = (
            await anyio.to_thread.run_sync(load_tokenizer, context.component_context.model)
            if self._vision is None
            else self._vision.tokenizer
        )
        self._workflow: Workflow = context.make("workflow")
        self._datasets: dict[Purpose, Dataset] = {"train": await self._dataset("dataset")}
        if config.evaluation is not None:
            self._datasets["eval"] = await self._dataset("evaluation.dataset")
        await self._bus.subscribe(context.names.abort_ticket, AbortTicket, self._abort)
        await self._generations.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_progress)
            tasks.start_soon(self._keep_alive)
            for purpose in self._datasets:
                tasks.start_soon(self._take, purpose, tasks)
            ready()

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """With the tickets in hand."""
        return msgspec.structs.replace(heartbeat, tickets=len(self._running))

    async def _dataset(self, path: str) -> Dataset:
        dataset: Dataset = await anyio.to_thread.run_sync(self._context.make, path)
        if dataset.fingerprint != self._context.fingerprints[path]:
            raise ConfigError(f"{path}: its rows here are not those that the kernel has", path=path)
        return dataset

    # --------------------------------------------------------------------------------- tickets

    async def _take(self, purpose: Purpose, tasks: TaskGroup) -> None:
        """Pull a ticket whenever a slot is free."""
        names = self._context.names
        tickets = self._bus.take(names.tickets_stream, names.ticket(purpose), Ticket)
        while True:
            await self._slots[purpose].acquire()
            tasks.start_soon(self._work, await anext(tickets))

    async def _work(self, taken: Taken[Ticket]) -> None:
        """One ticket, to its end. Whatever goes wrong in it ends here, as a failed group."""
        ticket = taken.message
        key = (ticket.purpose, ticket.id, ticket.attempt)
        worker = self._context.worker
        if key in self._running:  # delivered again, such as by a server that was killed: it is in hand
            self._running[key] = (self._running[key][0], taken)
            self._slots[ticket.purpose].release()
            return
        with bound(ticket=ticket.name), anyio.CancelScope() as scope:
            self._running[key] = (scope, taken)
            try:
                started = TicketStarted(worker, ticket.purpose, ticket.id, ticket.attempt)
                await self._bus.publish(self._context.names.ticket_started, started)
                await self._end(ticket, await self._outcome(ticket))
            finally:
                _, newest = self._running.pop(key)
                self._slots[ticket.purpose].release()
                if not self._context.leave.is_set():
                    with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                        await newest.done()

    async def _outcome(self, ticket: Ticket) -> GroupDone | GroupFailed:
        context, began, clocks = self._context, anyio.current_time(), _Clocks()
        timeout_s = context.composed.config.workflow.timeout_s
        try:
            with self._limits.of(ticket, timeout_s):
                trajectories = await self._roll_out(ticket, clocks)
                members = await self._store(ticket, trajectories)
        except _Unfit as unfit:
            return self._failed(ticket, str(unfit), filtered=True)
        except TimeoutError:
            return self._failed(ticket, f"took longer than workflow.timeout_s={timeout_s:g}")
        except Exception as error:
            first = leaves(error)[0]
            log.warning("ticket failed", error=f"{type(first).__name__}: {first}", exc_info=first)
            named = f"{type(first).__name__}: {first}"
            return self._failed(ticket, named if isinstance(first, StrettoError) else context.explain(first))
        seconds = anyio.current_time() - began
        return GroupDone(
            ticket.purpose,
            ticket.id,
            ticket.attempt,
            self._context.worker,
            tuple(members),
            seconds,
            generate_s=clocks.generate.seconds,
            score_s=clocks.score.seconds,
        )

    def _failed(self, ticket: Ticket, reason: str, *, filtered: bool = False) -> GroupFailed:
        worker = self._context.worker
        return GroupFailed(ticket.purpose, ticket.id, ticket.attempt, worker, reason[:500], filtered)

    async def _roll_out(self, ticket: Ticket, clocks: _Clocks) -> Sequence[Trajectory]:
        dataset = self._datasets[ticket.purpose]
        row = dataset[ticket.row]
        if fault := fault_of(row["prompt"]):
            raise ConfigError(f"row {ticket.row}: prompt: {fault}")
        ids = await self._encoded(row)
        config = self._context.composed.config
        section = config.dataset
        if ticket.purpose == "eval" and config.evaluation is not None:
            section = config.evaluation.dataset
        limit = section.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise _Unfit(f"prompt longer than max_prompt_tokens={limit}")
        if len(ids) == 0:
            raise _Unfit("prompt without a token")
        session = RolloutSession(self, ticket, clocks)
        trajectories = await self._workflow.run(Prompt(row, ids), session)
        if not trajectories:
            raise EngineError("the workflow returned no trajectory")
        if self._vision is not None:
            _check_image_tokens(self._vision.image_token, ids, trajectories)
        return trajectories

    async def _encoded(self, row: Row) -> NDArray[np.int32]:
        """The prompt's ids. Images take a while: they are looked at in a thread, one row at a time."""
        if self._vision is None:
            return self.tokenizer.encode_prompt(row["prompt"])
        return await anyio.to_thread.run_sync(_seen, self._vision, row, limiter=self._looking)

    async def _store(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> list[Member]:
        """Write the trajectories to the log, a few messages a group; of evaluations, text if it is kept."""
        wired = _wired(ticket, trajectories)
        if ticket.purpose == "eval":
            kept = await self._keep_answers(ticket, trajectories)
            return [
                _member(trajectory, wire.id, kept, index)
                for index, (trajectory, wire) in enumerate(zip(trajectories, wired, strict=True))
            ]
        members: list[Member] = []
        for number, bundle in enumerate(_bundles(wired)):
            message = TrajectoryBundle(ticket.id, ticket.attempt, ticket.row, tuple(bundle))
            sequence = await self._bus.append(
                self._context.names.trajectories, message, id=f"{ticket.name}/{number}"
            )
            for index, wire in enumerate(bundle):
                members.append(_member(trajectories[len(members)], wire.id, sequence, index))
        return members

    async def _keep_answers(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> int:
        """The sequence number of an evaluation ticket's answers in the log; 0 where they are not kept."""
        evaluation = self._context.composed.config.evaluation
        if evaluation is None or not evaluation.keep_answers:
            return 0
        answers = answers_of(ticket, self._datasets["eval"][ticket.row], trajectories, self.tokenizer)
        return await self._bus.append(self._context.names.kept_answers, answers, id=f"{ticket.name}/answers")

    async def _end(self, ticket: Ticket, outcome: GroupDone | GroupFailed) -> None:
        await self._bus.append(self._context.names.groups, outcome, id=f"{ticket.name}/end")

    def _abort(self, message: AbortTicket) -> None:
        if running := self._running.get((message.purpose, message.ticket, message.attempt)):
            running[0].cancel()

    async def _keep_alive(self) -> None:
        """Long tickets are not delivered again while somebody works on them."""
        while True:
            await anyio.sleep(_KEEP_ALIVE_S)
            for _, taken in list(self._running.values()):
                await taken.in_progress()

    # -------------------------------------------------------------------------------- progress

    def oldest_known(self, ticket: Ticket, version: int) -> None:
        """A ticket's oldest token is known; the kernel may be able to use it."""
        if ticket.purpose == "train":
            self._progress[ticket.id, ticket.attempt] = version
            self._news.set()

    async def _tell_progress(self) -> None:
        while True:
            await self._news.wait()
            await anyio.sleep(0.05)
            self._news = anyio.Event()
            progress, self._progress = self._progress, {}
            oldest = tuple((ticket, attempt, version) for (ticket, attempt), version in progress.items())
            await self._bus.publish(self._context.names.progress, Progress(self._context.worker, oldest))

    # ------------------------------------------------------------------- what sessions are made of

    def sampling_of(self, ticket: Ticket) -> Sampling:
        """How a ticket's tokens are drawn unless the workflow says otherwise."""
        config = self._context.composed.config
        if ticket.purpose == "eval" and config.evaluation is not None:
            return config.evaluation.sampling or config.sampling
        return config.sampling

    async def generate(
        self,
        ticket: Ticket,
        floor: VersionFloor,
        turn: str,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: Sampling,
        conversation_id: str,
        on_tokens: OnTokens | None,
    ) -> list[Answer]:
        """n answers to a prompt, from whichever engines are there."""
        config = self._context.composed.config
        # Attempts share their seeds: an answer that was interrupted is the same when it is repeated.
        of_ticket = f"{config.seed}/{ticket.purpose}/{ticket.id if ticket.purpose == 'train' else ticket.row}"
        request = GenerateRequest(
            id=f"{ticket.name}/{turn}",
            prompt_ids=Array.of(prompt_ids, np.int32),
            seeds=tuple(sample_seed(of_ticket, turn, sample) for sample in range(n)),
            sampling=sampling,
            min_version=floor.version,
            deadline_s=config.workflow.timeout_s,
        )
        affinity = f"{ticket.name}/{conversation_id}"
        samples = await self._generations.run(
            request, floor, exact_version=ticket.exact_version, affinity=affinity, on_tokens=on_tokens
        )
        return [
            Answer(
                tokens=sample.tokens(),
                logprobs=sample.logprobs(),
                versions=sample.versions(),
                finish=sample.finish,
                text=self.tokenizer.decode(sample.tokens()),
                engine=sample.engine,
            )
            for sample in samples
        ]

    async def score(
        self, prompt: Prompt, texts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[SampleScore]:
        """Rewards of answers to one prompt, from whichever verifier is there."""
        scored = await self.verifiers.score(self._row(prompt), texts, columns)
        return [SampleScore(reward, metrics) for reward, metrics in scored]

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        """What the environment says of the conversation's last answer."""
        own = {
            "completion": conversation.answers[-1].text,
            "messages": conversation.history,
            "turn": len(conversation.answers),
            "state": state,
        }
        return await self.verifiers.feedback({**self._row(prompt), **own})

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """The row as verifiers see it: pixels do not travel."""
        hidden = IMAGE_COLUMNS if self._vision is not None else ()
        return {name: value for name, value in prompt.row.items() if name not in hidden}


class _Unfit(Exception):
    """The row cannot be trained on."""


class RolloutSession:
    """`stretto.workflow.Session` of one ticket."""

    def __init__(self, work: RolloutWorker, ticket: Ticket, clocks: _Clocks) -> None:
        self._work = work
        self._ticket = ticket
        self._clocks = clocks
        self._floor = VersionFloor(ticket.min_version, lambda version: work.oldest_known(ticket, version))
        self._turns: Counter[str] = Counter()
        """Requests made in each conversation_id."""
        self._conversations = 0

    @property
    def group_size(self) -> int:
        return self._ticket.samples

    @property
    def sampling(self) -> Sampling:
        return self._work.sampling_of(self._ticket)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._work.tokenizer

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        conversation_id: str = "",
        on_tokens: OnTokens | None = None,
    ) -> list[Answer]:
        self._turns[conversation_id] += 1
        turn = (
            f"{conversation_id}.{self._turns[conversation_id]}"
            if conversation_id
            else str(self._turns[conversation_id])
        )
        sampling = sampling or self.sampling
        with self._clocks.generate:
            return await self._work.generate(
                self._ticket, self._floor, turn, prompt_ids, n, sampling, conversation_id, on_tokens
            )

    def conversation(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Conversation:
        self._conversations += 1
        conversation_id = f"c{self._conversations}"

        async def one(ids: NDArray[np.int32], sampling: Sampling) -> Answer:
            [answer] = await self.generate(
                ids, sampling=sampling, conversation_id=conversation_id, on_tokens=on_tokens
            )
            return answer

        return Conversation(one, self.tokenizer, self.sampling, prompt, tools=tools, limit=limit)

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[SampleScore]:
        texts = [answer if isinstance(answer, str) else answer.text for answer in answers]
        with self._clocks.score:
            return await self._work.score(prompt, texts, columns or {})

    async def tools(self) -> list[dict[str, Any]]:
        return await self._work.verifiers.tools()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        with self._clocks.score:
            return await self._work.verifiers.call(name, arguments)

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        with self._clocks.score:
            return await self._work.feedback(prompt, conversation, state)


class _Clock:
    """Measures the seconds in which at least one of the blocks that it guards is running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = anyio.current_time()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self.seconds += anyio.current_time() - self._since


@dataclass(frozen=True)
class _Clocks:
    """Where the time of one ticket goes."""

    generate: _Clock = field(default_factory=_Clock)
    score: _Clock = field(default_factory=_Clock)


# --------------------------------------------------------------------------------------- helpers


def sample_seed(of_ticket: str, turn: str, sample: int) -> int:
    """The seed of one sample: the same in every attempt and every repetition of the run."""
    digest = hashlib.sha256(f"{of_ticket}/{turn}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _vision_of(model: str | None) -> Vision | None:
    """The processor of the run's model, if that reads images."""
    if model is None or not is_vision_language(fetched_config(model)):
        return None
    keep_torch_out()
    return Vision(model)


def _seen(vision: Vision, row: Row) -> NDArray[np.int32]:
    return vision.of(row).encode_prompt(row["prompt"])


def _check_image_tokens(image_token: int, ids: NDArray[np.int32], trajectories: Sequence[Trajectory]) -> None:
    """Raise EngineError where a trajectory has more image tokens than its prompt: there is no image for them,
    and no model could be given it."""
    wanted = np.count_nonzero(ids == image_token)
    for trajectory in trajectories:
        found = np.count_nonzero(trajectory.tokens == image_token)
        if found != wanted:
            raise EngineError(
                f"a trajectory has {found} image tokens (id {image_token}), and the row's images make "
                f"{wanted}: the engine must not sample that token, nor a workflow add it"
            )


def _wired(ticket: Ticket, trajectories: Sequence[Trajectory]) -> list[WireTrajectory]:
    numbered = zip(sample_numbers(trajectories), trajectories, strict=True)
    return [_wire(ticket, index, trajectory, sample) for index, (sample, trajectory) in enumerate(numbered)]


def _wire(ticket: Ticket, index: int, trajectory: Trajectory, sample: int) -> WireTrajectory:
    return WireTrajectory(
        id=f"{ticket.name}/{index}",
        tokens=Array.of(trajectory.tokens, np.int32),
        loss_mask=Array.of(trajectory.loss_mask, np.bool_),
        logprobs=Array.of(trajectory.logprobs, np.float32),
        versions=Array.of(trajectory.versions, np.int32),
        reward=trajectory.score.reward,
        metrics=dict(trajectory.score.metrics),
        finish=trajectory.finish,
        engine=trajectory.engine,
        sample=sample,
    )


def _member(trajectory: Trajectory, id: str, sequence: int, index: int) -> Member:
    """The trajectory as the kernel sees it.

    Raises:
        EngineError: if the policy sampled no token of it.
        RewardError: if its score is not finite, which no later step could use.
    """
    if not all(map(is_number, (trajectory.score.reward, *trajectory.score.metrics.values()))):
        raise RewardError(f"the score is not finite: {trajectory.score}")
    versions = trajectory.versions[trajectory.loss_mask]
    if not len(versions):
        raise EngineError("a trajectory without a sampled token")
    return Member(
        id=id,
        sequence=sequence,
        index=index,
        length=len(trajectory.tokens),
        sampled=len(versions),
        oldest=int(versions.min()),
        newest=int(versions.max()),
        reward=trajectory.score.reward,
        metrics=dict(trajectory.score.metrics),
        finish=trajectory.finish,
        part=trajectory.part,
    )


def _bundles(trajectories: list[WireTrajectory]) -> list[list[WireTrajectory]]:
    """The trajectories in messages of a moderate size: a reader that wants one row gets few others."""
    bundles: list[list[WireTrajectory]] = []
    room = 0
    for trajectory in trajectories:
        size = 13 * len(trajectory.tokens) + 200
        if not bundles or size > room:
            bundles.append([])
            room = _BUNDLE_BYTES
        bundles[-1].append(trajectory)
        room -= size
    return bundles
