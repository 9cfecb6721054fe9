"""The rollout worker: takes tickets, runs workflows, hundreds at once in one event loop, and writes the log.

A ticket ends here in one of three ways: its trajectories and then one `GroupDone` are in the log; one
`GroupFailed` is; or nobody waits for it any more. Only then is it taken off the work queue.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.client import Taken
from stretto.bus.messages import (
    Abort,
    AbortTicket,
    Beacon,
    ChunkBatch,
    Confirm,
    Generate,
    GroupDone,
    GroupFailed,
    Heartbeat,
    Member,
    Progress,
    Purpose,
    Score,
    Scored,
    Ticket,
    TicketStarted,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.dataset import Dataset
from stretto.engine import Finish, GenerateRequest, Sampling
from stretto.errors import ConfigError, EngineError, NoAnswer, RewardError, leaves
from stretto.launcher import Role
from stretto.logs import bound
from stretto.roles.setting import Setting
from stretto.tokenizer import Tokenizer, load_tokenizer
from stretto.workflow import Answer, Prompt, Trajectory, Workflow
from stretto.workflow import Score as SampleScore

__all__ = ["RolloutWork", "sample_seed"]

log = structlog.get_logger()

_BUNDLE_BYTES = 512 * 1024
_SILENCE_S = 10.0
"""After so long without a chunk of a request, its engine is asked again."""
_KEEP_ALIVE_S = 10.0


class RolloutWork:
    """One rollout worker."""

    def __init__(self, setting: Setting) -> None:
        config = setting.composed.config
        self._setting = setting
        self._bus = setting.bus
        self._slots = _Slots(config.rollout.concurrency)
        self._engines = _Pool(setting, "inference")
        self._verifiers = _Pool(setting, "verifier")
        self._generations = _Generations(setting, self._engines)
        self._running: dict[tuple[Purpose, int, int], tuple[anyio.CancelScope, Taken[Ticket]]] = {}
        self._progress: dict[tuple[int, int], int] = {}
        self._news = anyio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Take tickets until cancelled."""
        setting, config = self._setting, self._setting.composed.config
        self._tokenizer: Tokenizer = await anyio.to_thread.run_sync(load_tokenizer, setting.context.model)
        self._workflow: Workflow = setting.make("workflow")
        self._datasets: dict[Purpose, Dataset] = {"train": self._dataset("dataset")}
        if config.evaluation is not None:
            self._datasets["eval"] = self._dataset("evaluation.dataset")
        await self._bus.subscribe(setting.names.abort_ticket, AbortTicket, self._abort)
        await self._generations.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_progress)
            tasks.start_soon(self._keep_alive)
            for purpose in self._datasets:
                tasks.start_soon(self._take, purpose, tasks)
            ready()

    def beat(self, beat: Heartbeat) -> Heartbeat:
        """With the tickets in hand."""
        return Heartbeat(
            beat.worker, beat.nonce, beat.ready, tickets=len(self._running), refused=beat.refused
        )

    def _dataset(self, path: str) -> Dataset:
        dataset: Dataset = self._setting.make(path)
        if dataset.fingerprint != self._setting.fingerprints[path]:
            raise ConfigError(f"{path}: its rows here are not those that the kernel has", path=path)
        return dataset

    # --------------------------------------------------------------------------------- tickets

    async def _take(self, purpose: Purpose, tasks: TaskGroup) -> None:
        """Pull a ticket whenever a slot is free."""
        names = self._setting.names
        tickets = self._bus.take(names.tickets_stream, names.ticket(purpose), Ticket)
        while True:
            await self._slots.acquire(purpose)
            tasks.start_soon(self._work, await anext(tickets))

    async def _work(self, taken: Taken[Ticket]) -> None:
        """One ticket, to its end. Whatever goes wrong in it ends here, as a failed group."""
        ticket = taken.message
        key = (ticket.purpose, ticket.id, ticket.attempt)
        worker = self._setting.worker
        with bound(ticket=ticket.name), anyio.CancelScope() as scope:
            self._running[key] = (scope, taken)
            try:
                started = TicketStarted(worker, ticket.purpose, ticket.id, ticket.attempt)
                await self._bus.publish(self._setting.names.ticket_started, started)
                await self._end(ticket, await self._outcome(ticket))
            finally:
                del self._running[key]
                self._slots.release(ticket.purpose)
                if not self._setting.leave.is_set():
                    with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                        await taken.done()

    async def _outcome(self, ticket: Ticket) -> GroupDone | GroupFailed:
        began = anyio.current_time()
        timeout_s = self._setting.composed.config.workflow.timeout_s
        try:
            with anyio.fail_after(timeout_s):
                trajectories = await self._roll_out(ticket)
                members = await self._store(ticket, trajectories)
        except _Unfit as unfit:
            return self._failed(ticket, str(unfit), filtered=True)
        except TimeoutError:
            return self._failed(ticket, f"took longer than workflow.timeout_s={timeout_s:g}")
        except Exception as error:
            first = leaves(error)[0]
            log.warning("ticket failed", error=f"{type(first).__name__}: {first}", exc_info=first)
            return self._failed(ticket, f"{type(first).__name__}: {first}")
        seconds = anyio.current_time() - began
        return GroupDone(
            ticket.purpose, ticket.id, ticket.attempt, self._setting.worker, tuple(members), seconds
        )

    def _failed(self, ticket: Ticket, reason: str, *, filtered: bool = False) -> GroupFailed:
        worker = self._setting.worker
        return GroupFailed(ticket.purpose, ticket.id, ticket.attempt, worker, reason[:500], filtered)

    async def _roll_out(self, ticket: Ticket) -> Sequence[Trajectory]:
        dataset = self._datasets[ticket.purpose]
        row = dataset[ticket.row]
        ids = self._tokenizer.encode_prompt(row["prompt"])
        config = self._setting.composed.config
        section = config.dataset
        if ticket.purpose == "eval" and config.evaluation is not None:
            section = config.evaluation.dataset
        limit = section.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise _Unfit(f"prompt longer than max_prompt_tokens={limit}")
        if len(ids) == 0:
            raise _Unfit("prompt without a token")
        session = _Session(self, ticket)
        trajectories = await self._workflow.run(Prompt(row, ids), session)
        if not trajectories:
            raise EngineError("the workflow returned no trajectory")
        return trajectories

    async def _store(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> list[Member]:
        """Write the trajectories to the log, a few messages a group; those of evaluations are not kept."""
        wired = [_wire(ticket, index, trajectory) for index, trajectory in enumerate(trajectories)]
        if ticket.purpose == "eval":
            return [
                _member(trajectory, wire.id, 0, index)
                for index, (trajectory, wire) in enumerate(zip(trajectories, wired, strict=True))
            ]
        members: list[Member] = []
        for number, bundle in enumerate(_bundles(wired)):
            message = TrajectoryBundle(ticket.id, ticket.attempt, ticket.row, tuple(bundle))
            sequence = await self._bus.append(
                self._setting.names.trajectories, message, id=f"{ticket.name}/{number}"
            )
            for index, wire in enumerate(bundle):
                members.append(_member(trajectories[len(members)], wire.id, sequence, index))
        return members

    async def _end(self, ticket: Ticket, outcome: GroupDone | GroupFailed) -> None:
        await self._bus.append(self._setting.names.groups, outcome, id=f"{ticket.name}/end")

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

    def first_token(self, ticket: Ticket, version: int) -> None:
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
            await self._bus.publish(self._setting.names.progress, Progress(self._setting.worker, oldest))

    # ------------------------------------------------------------------- what sessions are made of

    async def generate(
        self, ticket: Ticket, turn: int, prompt_ids: NDArray[np.int32], n: int, sampling: Sampling | None
    ) -> list[Answer]:
        """n answers to a prompt, from whichever engines are there."""
        config = self._setting.composed.config
        plain = config.sampling
        if ticket.purpose == "eval" and config.evaluation is not None:
            plain = config.evaluation.sampling or plain
        # Attempts share their seeds: an answer that was interrupted is the same when it is repeated.
        of_ticket = f"{config.seed}/{ticket.purpose}/{ticket.id if ticket.purpose == 'train' else ticket.row}"
        request = GenerateRequest(
            id=f"{ticket.name}/{turn}",
            prompt_ids=Array.of(prompt_ids, np.int32),
            seeds=tuple(sample_seed(of_ticket, turn, sample) for sample in range(n)),
            sampling=sampling or plain,
            min_version=ticket.min_version,
            priority=0 if ticket.purpose == "train" else 1,
            deadline_s=config.workflow.timeout_s,
        )
        samples = await self._generations.run(request, lambda version: self.first_token(ticket, version))
        return [
            Answer(
                tokens=sample.tokens(),
                logprobs=sample.logprobs(),
                versions=sample.versions(),
                finish=sample.finish,
                text=self._tokenizer.decode(sample.tokens()),
                engine=sample.engine,
            )
            for sample in samples
        ]

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[SampleScore]:
        """Rewards of answers to one prompt, from whichever verifier is there."""
        message = Score(msgspec.msgpack.encode(dict(prompt.row)), tuple(answer.text for answer in answers))
        config = self._setting.composed.config
        while True:
            async with self._verifiers.member() as verifier:
                scored = await self._bus.request(
                    self._setting.names.worker("verifier", verifier, "score"),
                    message,
                    Scored,
                    who=verifier,
                    deadline_s=config.workflow.timeout_s,
                )
                if scored.error:
                    raise RewardError(scored.error)
                return [SampleScore(reward, metrics) for reward, metrics in scored.scores]


class _Unfit(Exception):
    """The row cannot be trained on."""


class _Session:
    """`stretto.workflow.Session` of one ticket."""

    def __init__(self, work: RolloutWork, ticket: Ticket) -> None:
        self._work = work
        self._ticket = ticket
        self._turn = 0

    @property
    def group_size(self) -> int:
        return self._ticket.samples

    @property
    def sampling(self) -> Sampling:
        return self._work._setting.composed.config.sampling  # pyright: ignore[reportPrivateUsage]

    async def generate(
        self, prompt_ids: NDArray[np.int32], *, n: int = 1, sampling: Sampling | None = None
    ) -> list[Answer]:
        self._turn += 1
        return await self._work.generate(self._ticket, self._turn, prompt_ids, n, sampling)

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[SampleScore]:
        return await self._work.score(prompt, answers)


# ------------------------------------------------------------------------------------ generations


@dataclass
class _Sample:
    """What has arrived of one sample."""

    parts: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]
    length: int = 0
    finish: Finish = ""
    error: str = ""
    engine: str = ""

    def tokens(self) -> NDArray[np.int32]:
        return _joined([part[0] for part in self.parts], np.int32)

    def logprobs(self) -> NDArray[np.float32]:
        return _joined([part[1] for part in self.parts], np.float32)

    def versions(self) -> NDArray[np.int32]:
        return _joined([part[2] for part in self.parts], np.int32)


class _Generation:
    """One request under way, on one engine after another if they die."""

    def __init__(self, request: GenerateRequest, on_first: Callable[[int], None]) -> None:
        self.request = request
        self.samples = [_Sample([]) for _ in request.seeds]
        self.news = anyio.Event()
        self._on_first: Callable[[int], None] | None = on_first

    @property
    def finished(self) -> bool:
        return all(sample.finish for sample in self.samples)

    def add(
        self,
        engine: str,
        sample: _Sample,
        position: int,
        columns: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
        finish: Finish,
        error: str,
    ) -> bool:
        """Take a chunk; False if something before it is missing."""
        if sample.finish:
            return True
        if position > sample.length:
            return False
        known = sample.length - position
        if known < len(columns[0]):
            tokens, logprobs, versions = (column[known:] for column in columns)
            sample.parts.append((tokens, logprobs, versions))
            sample.length += len(tokens)
            if self._on_first is not None:
                self._on_first(int(versions[0]))
                self._on_first = None
        sample.finish, sample.error, sample.engine = finish, error, engine
        self.news.set()
        return True


class _Generations:
    """The requests of this worker, and the subject on which their chunks arrive."""

    def __init__(self, setting: Setting, engines: _Pool) -> None:
        self._setting = setting
        self._bus = setting.bus
        self._engines = engines
        self._reply = f"{setting.bus.inbox}.chunks.in"
        self._under_way: dict[str, _Generation] = {}

    async def open(self) -> None:
        await self._bus.subscribe(self._reply, ChunkBatch, self._take)

    async def run(self, request: GenerateRequest, on_first: Callable[[int], None]) -> list[_Sample]:
        """Every sample of a request, finished.

        Raises:
            EngineError: if an engine refused it.
        """
        generation = self._under_way[request.id] = _Generation(request, on_first)
        try:
            while not generation.finished:
                async with self._engines.member() as engine:
                    await self._on(engine, generation)
        finally:
            del self._under_way[request.id]
        for sample in generation.samples:
            if sample.finish == "error":
                raise EngineError(f"{sample.engine}: {sample.error}")
            if sample.finish == "abort":
                raise EngineError(f"{sample.engine} ended the request unasked")
        return generation.samples

    async def _on(self, engine: str, generation: _Generation) -> None:
        """Let one engine finish what is left. Cancelled when the engine is lost."""
        names, request = self._setting.names, generation.request
        try:
            await self._ask(engine, generation)
            while not generation.finished:
                generation.news = anyio.Event()
                with anyio.move_on_after(_SILENCE_S):
                    await generation.news.wait()
                    continue
                await self._ask(engine, generation)  # the question or the answer was lost
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self._bus.publish(names.worker("inference", engine, "abort"), Abort(request.id))
            raise
        await self._bus.publish(names.worker("inference", engine, "confirm"), Confirm((request.id,)))

    async def _ask(self, engine: str, generation: _Generation) -> None:
        if self._setting.composed.config.inference.deterministic:
            request = generation.request
        else:
            begun = tuple(Array.of(sample.tokens()) for sample in generation.samples)
            request = msgspec.structs.replace(generation.request, begun=begun)
        have = tuple(-1 if sample.finish else sample.length for sample in generation.samples)
        request = msgspec.structs.replace(request, have=have)
        subject = self._setting.names.worker("inference", engine, "generate")
        await self._bus.publish(subject, Generate(request, self._reply))

    async def _take(self, batch: ChunkBatch) -> None:
        """Hand the chunks of a message to the requests they belong to."""
        tokens, logprobs, versions = batch.tokens.numpy(), batch.logprobs.numpy(), batch.versions.numpy()
        at = 0
        behind: set[str] = set()
        for head in batch.heads:
            span = slice(at, at + head.count)
            at += head.count
            generation = self._under_way.get(head.request)
            if generation is None or head.sample >= len(generation.samples):
                continue
            columns = (tokens[span], logprobs[span], versions[span])
            sample = generation.samples[head.sample]
            if not generation.add(batch.worker, sample, head.position, columns, head.finish, head.error):
                behind.add(head.request)
        for request in behind:
            await self._ask(batch.worker, self._under_way[request])


# ----------------------------------------------------------------------------------------- pools


class _Pool:
    """The workers of a role that can be called now, by the kernel's latest beacon."""

    def __init__(self, setting: Setting, role: Role) -> None:
        self._role = role
        self._calls: dict[str, int] = {}
        self._scopes: dict[str, set[anyio.CancelScope]] = {}
        self._changed = anyio.Event()
        setting.on_beacon(self._hear)
        if setting.beacon is not None:
            self._hear(setting.beacon)

    def _hear(self, beacon: Beacon) -> None:
        members = {peer.worker for peer in beacon.peers if peer.role == self._role}
        for worker in self._calls.keys() - members:
            del self._calls[worker]
            for scope in self._scopes.pop(worker, set()):
                scope.cancel()
        for worker in members - self._calls.keys():
            self._calls[worker] = 0
            self._scopes[worker] = set()
            self._changed.set()
            self._changed = anyio.Event()

    @asynccontextmanager
    async def member(self) -> AsyncGenerator[str]:
        """The least busy worker, waited for if there is none. If it is lost, the block is left silently:
        call it in a loop."""
        while not self._calls:
            await self._changed.wait()
        fewest = min(self._calls.values())
        worker = random.choice([name for name, calls in self._calls.items() if calls == fewest])
        scopes = self._scopes[worker]
        with anyio.CancelScope() as scope:
            scopes.add(scope)
            self._calls[worker] += 1
            try:
                yield worker
            except NoAnswer:
                log.warning("no answer", peer=worker)
                raise
            finally:
                scopes.discard(scope)
                if worker in self._calls:
                    self._calls[worker] -= 1


class _Slots:
    """Tickets in hand. Evaluation takes what training leaves, and always has a small part of its own."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._reserved = max(1, total // 8)
        self._used: dict[Purpose, int] = {"train": 0, "eval": 0}
        self._freed = anyio.Event()

    async def acquire(self, purpose: Purpose) -> None:
        while self._used[purpose] >= self._allowed(purpose):
            await self._freed.wait()
        self._used[purpose] += 1

    def release(self, purpose: Purpose) -> None:
        self._used[purpose] -= 1
        self._freed.set()
        self._freed = anyio.Event()

    def _allowed(self, purpose: Purpose) -> int:
        if purpose == "train":
            return self._total
        return max(self._reserved, self._total - self._used["train"])


# --------------------------------------------------------------------------------------- helpers


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def sample_seed(of_ticket: str, turn: int, sample: int) -> int:
    """The seed of one sample: the same in every attempt and every repetition of the run."""
    digest = hashlib.sha256(f"{of_ticket}/{turn}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _wire(ticket: Ticket, index: int, trajectory: Trajectory) -> WireTrajectory:
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
    )


def _member(trajectory: Trajectory, id: str, sequence: int, index: int) -> Member:
    """The trajectory as the kernel sees it.

    Raises:
        EngineError: if the policy sampled no token of it.
    """
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
