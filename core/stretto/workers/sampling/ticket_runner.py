"""Turn a ticket into its outcome: read the prompt, run the workflow, write the trajectories to the log."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import anyio
import numpy as np
import structlog
from numpy.typing import NDArray

from stretto.assembly.variants import BASE
from stretto.bus.messages import tickets
from stretto.bus.messages.membership import Routes
from stretto.chat.prompts import with_own_turns
from stretto.config import RunConfig
from stretto.dataset import CurriculumDataset, Dataset, Row
from stretto.errors import ConfigError, EngineError, StrettoError, leaves
from stretto.machine import clock
from stretto.models.tokenizer import characters_of, fault_of, work_on_text
from stretto.records.samples.kept_sample import digest_of, kept_samples
from stretto.workers.context import WorkerContext
from stretto.workers.sampling.session import RolloutSession, VariantServices
from stretto.workers.sampling.ticket_record import record_of
from stretto.workers.sampling.trajectory_log import (
    append_bundles,
    expect_kept_tokens,
    members_of,
    wire_trajectories,
)
from stretto.workflow import Prompt, Trajectory

log = structlog.get_logger()

_SLOW = 10
"""Factor of the time limit for an engine of low priority: it gets a tenth of a core that others want."""
_CHARACTERS_PER_TOKEN = 4


class TicketRunner:
    """Runs the workflow on tickets. Any number of tickets can run at the same time."""

    def __init__(
        self,
        context: WorkerContext,
        variants: Mapping[str, VariantServices],
        datasets: Mapping[tickets.Purpose, Dataset],
    ) -> None:
        self._context = context
        self._variants = variants
        self._services = variants[BASE]
        self._datasets = datasets
        self._limits = _TicketLimits(context)

    async def outcome(self, ticket: tickets.Ticket) -> tickets.GroupDone | tickets.GroupFailed:
        """Run a ticket. After `GroupDone` the trajectories are in the log; those of an evaluation only if the
        run keeps samples. Every exception of a ticket is caught here and reported as a failed group."""
        context = self._context
        if ticket.variant not in self._variants:
            reason = f"the run of this worker has no variant {ticket.variant!r}"
            return tickets.GroupFailed(ticket.purpose, ticket.id, ticket.attempt, context.worker, reason)
        attempt = _RunningTicket(ticket, self._variants[ticket.variant])
        timeout_s = _timeout_s(ticket, attempt.services.config)
        try:
            with self._limits.of(ticket, timeout_s) as limit:
                await self._roll_out(attempt)
                members, images = await self._store(attempt)
                record, digest = await self._keep(attempt)
            if limit.cancelled_caught:  # a TimeoutError would be of another limit
                return await self._failed(attempt, f"took longer than {timeout_s:g} s (workflow.timeout_s)")
        except _Unfit as unfit:
            return await self._failed(attempt, str(unfit), filtered=True)
        except Exception as error:
            cause = leaves(error)[0]
            text = f"{type(cause).__name__}: {cause}"
            log.warning("ticket failed", error=text, exc_info=cause)
            reason = text if isinstance(cause, StrettoError) else context.explain(cause)
            return await self._failed(attempt, reason)
        session = attempt.session
        return tickets.GroupDone(
            ticket.purpose,
            ticket.id,
            ticket.attempt,
            context.worker,
            tuple(members),
            *attempt.seconds,
            tool_s=session.tool_clock.seconds,
            environment_s=session.environment_clock.seconds,
            own_s=attempt.own_s,
            record=record,
            digest=digest,
            images=tuple(images),
            missing=tuple(session.group.missing),
            penalized=tuple(session.group.penalized),
            retried=dict(session.group.retried),
            redrawn=session.group.redrawn,
            prompt=attempt.prompt_tokens,
        )

    async def _failed(
        self, attempt: _RunningTicket, reason: str, *, filtered: bool = False
    ) -> tickets.GroupFailed:
        ticket, worker = attempt.ticket, self._context.worker
        try:
            attempt.trajectories = attempt.trajectories or attempt.session.finished()
            record, _ = await self._keep(attempt, failed=True)
        except Exception as error:  # a workflow may have returned anything
            log.warning("samples of a failed ticket are not kept", exc_info=error)
            record = 0
        return tickets.GroupFailed(
            *(ticket.purpose, ticket.id, ticket.attempt, worker, reason[:500], filtered),
            record=record,
            prompt=attempt.prompt_tokens,
        )

    async def _roll_out(self, attempt: _RunningTicket) -> None:
        images = self._services.images
        with images.ticket() if images is not None else nullcontext() as attempt.session.images:
            prompt = await self._prompt(attempt)
            attempt.trajectories = await attempt.services.workflow.run(prompt, attempt.session)
            attempt.own_s = max(0.0, attempt.seconds[0] - attempt.session.away_clock.seconds)
            if not attempt.trajectories:
                raise EngineError("the workflow returned no trajectory")
            attempt.trajectories = attempt.session.group.complete(attempt.trajectories)
            if attempt.session.images is not None:
                for trajectory in attempt.trajectories:
                    await attempt.session.images.check(trajectory)

    async def _prompt(self, attempt: _RunningTicket) -> Prompt:
        ticket, config = attempt.ticket, self._services.config
        row = attempt.row = self._datasets[ticket.purpose][ticket.row]
        if fault := fault_of(row["prompt"]):
            raise ConfigError(f"row {ticket.row}: prompt: {fault}")
        row = attempt.row = {**row, "prompt": with_own_turns(row["prompt"], self._services.tokenizer)}
        attempt.session.see(row)
        section = config.dataset
        if ticket.purpose == "eval" and config.evaluation is not None:
            section = config.evaluation.dataset
        limit = section.max_prompt_tokens
        too_long = f"max_prompt_tokens={limit}" if limit is not None else "any that the model reads"
        characters = characters_of(row["prompt"])
        if characters > self._services.tokenizer.most_characters(limit):
            raise _Unfit(f"prompt longer than {too_long}")
        ids = await self._encode(attempt, characters)
        attempt.prompt_tokens = len(ids)
        if limit is not None and len(ids) > limit:
            raise _Unfit(f"prompt longer than {too_long}")
        if len(ids) == 0:
            raise _Unfit("prompt without a token")
        return Prompt(row, ids)

    async def _encode(self, attempt: _RunningTicket, characters: int) -> NDArray[np.int32]:
        row, tools, tokenizer = attempt.row, attempt.session.row_tools, self._services.tokenizer
        if attempt.session.images is not None:
            try:
                return await attempt.session.images.encode_row(row, tools)
            except ConfigError as error:
                raise ConfigError(f"row {attempt.ticket.row}: {error}") from error
        return await work_on_text(lambda: tokenizer.encode_prompt(row["prompt"], tools=tools), characters)

    async def _store(self, attempt: _RunningTicket) -> tuple[list[tickets.Member], list[int]]:
        """Write the trajectories to the log in a few messages, then the images that they name. Return the
        members, and the sequence numbers of the images. For an evaluation, write nothing: `_keep` does."""
        ticket, wires = attempt.ticket, attempt.wires()
        if ticket.purpose == "eval":
            return members_of([(0, wires)]), []
        if attempt.services.config.sampling.truncates:
            expect_kept_tokens(attempt.trajectories)
        store, subject = self._context.bus.store, self._context.names.trajectories
        members = members_of(await append_bundles(store, subject, ticket, wires))
        return members, await self._append_images(attempt, wires)

    async def _append_images(
        self, attempt: _RunningTicket, wires: Sequence[tickets.WireTrajectory]
    ) -> list[int]:
        """Write to the log, once each, the images that the workflow added. They follow the trajectories, and
        so stay at least as long. A failed ticket's trajectories may name images that the ticket never had."""
        images, names = attempt.session.images, self._context.names
        if images is None:
            return []
        added = dict.fromkeys(name for wire in wires for name in wire.added_images if name in images)
        return [
            await self._context.bus.store.append(
                names.image(digest), tickets.StoredImage(file), id=f"{attempt.ticket.name}/{digest}"
            )
            for digest, file in zip(added, images.files(list(added)), strict=True)
        ]

    async def _keep(self, attempt: _RunningTicket, *, failed: bool = False) -> tuple[int, str]:
        """Write an attempt's record to the log, and the trajectories that training does not read. Return
        the record's sequence number and the digest of all that is kept; 0 and "" if nothing is kept."""
        ticket, names = attempt.ticket, self._context.names
        config = self._services.config
        is_eval = ticket.purpose == "eval"
        if not (config.keeps_row(ticket.row) if is_eval else config.samples.keeps(ticket.id)):
            return 0, ""
        wires = attempt.wires()
        if failed or is_eval:
            await append_bundles(self._context.bus.store, names.kept_trajectories, ticket, wires)
            await self._append_images(attempt, wires)
        seconds, dataset = attempt.seconds, self._datasets[ticket.purpose]
        source = dataset.source_of(ticket.row) if isinstance(dataset, CurriculumDataset) else ""

        def make_record() -> tuple[tickets.TicketRecord, str]:
            worker, tokenizer = self._context.worker, self._services.tokenizer
            record = record_of(ticket, worker, attempt.row, attempt.trajectories, tokenizer, seconds, source)
            return record, digest_of(kept_samples(record, wires))

        tokens = sum(len(wire.tokens) for wire in wires)
        record, digest = await work_on_text(make_record, _CHARACTERS_PER_TOKEN * tokens)
        return await self._context.bus.store.append(names.records, record, id=f"{ticket.name}/record"), digest


class _RunningTicket:
    def __init__(self, ticket: tickets.Ticket, services: VariantServices) -> None:
        self.ticket = ticket
        self.services = services
        self.session = RolloutSession(services, ticket)
        self.row: Row = {}
        """The row of the dataset; empty before it is read."""
        self.trajectories: Sequence[Trajectory] = ()
        """The trajectories that the workflow returned; empty before."""
        self.prompt_tokens = 0
        """Number of tokens of the row's prompt; 0 before it is encoded."""
        self.own_s = 0.0
        """See `GroupDone.own_s`; known when the workflow has returned."""
        self._start = clock.now()

    def wires(self) -> list[tickets.WireTrajectory]:
        of_row = self.session.images.of_row if self.session.images is not None else ()
        return wire_trajectories(self.ticket, self.trajectories, of_row)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds since the start of the attempt, and those in generation and in scoring."""
        elapsed = clock.now() - self._start
        return elapsed, self.session.generate_clock.seconds, self.session.score_clock.seconds


class _TicketLimits:
    """Time limits of tickets. Time in which all engines are lent to other work does not count."""

    def __init__(self, context: WorkerContext) -> None:
        self._running: list[tuple[int | None, anyio.CancelScope]] = []
        """(`exact_version` of the ticket, its limit) of every running ticket."""
        self._routes_s = 0.0
        self._serving: set[int | None] = set()
        """`exact_version` of the engines in the latest routes. Routes have some engines for each of them."""
        context.on_routes(self._on_routes)

    @contextmanager
    def of(self, ticket: tickets.Ticket, timeout_s: float) -> Generator[anyio.CancelScope]:
        """Cancel the block if it takes longer than `timeout_s` and its extensions together."""
        with anyio.move_on_after(timeout_s) as limit:
            entry = (ticket.exact_version, limit)
            self._running.append(entry)
            try:
                yield limit
            finally:
                self._running.remove(entry)

    def _on_routes(self, routes: Routes) -> None:
        """Extend the limits. Routes come every second and at every change."""
        now = clock.now()
        elapsed, self._routes_s = now - self._routes_s, now
        for exact_version, limit in self._running:
            if self._serving and exact_version not in self._serving:
                limit.deadline += elapsed
        self._serving = {peer.exact_version for peer in routes.peers if peer.role == "inference"}


def _timeout_s(ticket: tickets.Ticket, config: RunConfig) -> float:
    """Return a ticket's time limit: the config's, and longer for an engine of low priority."""
    has_own_engine = config.evaluation is not None and config.evaluation.own_engine
    return config.workflow.limit_s * (_SLOW if ticket.purpose == "eval" and has_own_engine else 1)


class _Unfit(Exception):
    """The row's prompt is too long or empty, so the ticket is filtered."""
