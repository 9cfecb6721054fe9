"""The rollout worker: takes tickets and runs workflows, hundreds at once in one event loop. A ticket leaves
the work queue only after it has ended: its trajectories and then one `GroupDone` are in the log, or one
`GroupFailed`, or the kernel has aborted it."""

import math
import time
from collections.abc import Callable
from functools import partial

import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from stretto.assembly.logs import bound
from stretto.assembly.variants import runs_of
from stretto.bus.gathered import Gathered
from stretto.bus.messages import tickets
from stretto.bus.messages.membership import Heartbeat, Routes
from stretto.bus.store import Delivery
from stretto.config import RunConfig
from stretto.dataset import Dataset, DatasetConfig
from stretto.models.files import fetch_config, vocabulary_of
from stretto.models.tokenizer import load_tokenizer
from stretto.models.vision import Vision, is_vision_language, keep_torch_out
from stretto.workers.context import WorkerContext
from stretto.workers.images import RolloutImages
from stretto.workers.sampling.concurrency import Concurrency
from stretto.workers.sampling.generation import Generations
from stretto.workers.sampling.routing import Router
from stretto.workers.sampling.session import VariantServices
from stretto.workers.sampling.ticket_runner import TicketRunner
from stretto.workers.sampling.verifier_client import VerifierClient

_KEEP_ALIVE_S = 5.0  # shorter than the time after which the server delivers a ticket again
_PROGRESS_S = 0.05  # one message for many tickets
_DRAIN_POLL_S = 0.05


class RolloutWorker:
    """One rollout worker."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.composed.config
        self._context = context
        self._bus = context.bus
        is_fixed = config.inference.deterministic
        self._concurrency = Concurrency(config.rollout.most if is_fixed else config.rollout.concurrency)
        context.on_routes(self._concurrency.follow)
        self._verifiers = Router(context, "verifier")
        self._generations = Generations(context, Router(context, "inference"))
        self._running: dict[
            tuple[tickets.Purpose, int, int], tuple[anyio.CancelScope, Delivery[tickets.Ticket]]
        ] = {}
        self._draining = anyio.Event()
        self._takers = 0
        """Number of tasks that still take tickets."""
        self._starts = Gathered[tickets.TicketStarted](self._report_starts)
        self._progress = Gathered[tuple[int, int, int]](self._report_progress, _PROGRESS_S)
        context.held = self._held

    async def run(self, ready: Callable[[], None]) -> None:
        """Take tickets until cancelled."""
        context, config = self._context, self._context.composed.config
        datasets: dict[tickets.Purpose, Dataset] = {"train": await context.dataset("dataset")}
        if config.evaluation is not None:
            datasets["eval"] = await context.dataset("evaluation.dataset")
        model = context.component_context.model
        vision = await anyio.to_thread.run_sync(_vision_of, model, config.dataset)
        images = None if vision is None else RolloutImages(context, vision)
        runner = TicketRunner(context, await self._variants(images), datasets)
        await self._bus.subscribe(context.names.abort_ticket, tickets.AbortTicket, self._abort)
        await self._bus.subscribe(context.subject("routes"), Routes, context.receive_routes)
        if images is not None:
            await images.open()
        async with anyio.create_task_group() as tasks:
            await self._generations.open(tasks)
            tasks.start_soon(self._starts.run)
            tasks.start_soon(self._progress.run)
            tasks.start_soon(self._keep_alive)
            self._takers = len(datasets)
            for purpose in datasets:
                tasks.start_soon(self._take, purpose, runner, tasks)
            ready()

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Add the number of running tickets and, as seconds of work, the process time of the event loop."""
        return msgspec.structs.replace(heartbeat, tickets=len(self._running), busy_s=time.process_time())

    async def drain(self) -> None:
        """Take no more tickets, and wait until those in hand have ended."""
        self._draining.set()
        self._concurrency.close()
        while self._takers or self._running:
            await anyio.sleep(_DRAIN_POLL_S)

    def _held(self) -> tuple[tickets.TicketStarted, ...]:
        return tuple(tickets.TicketStarted(self._context.worker, *key) for key in self._running)

    async def _variants(self, images: RolloutImages | None) -> dict[str, VariantServices]:
        context = self._context
        if images is not None:
            tokenizer = images.vision.tokenizer
        else:
            rows = context.composed.config.dataset
            tokenizer = await anyio.to_thread.run_sync(load_tokenizer, context.component_context.model, rows)
        return {
            variant: VariantServices(
                composed.config,
                composed.make("workflow", context.component_context),
                self._generations,
                VerifierClient(context, self._verifiers, composed.config, variant),
                tokenizer,
                images,
                _smallest_vocabulary(composed.config),
                self._note_oldest_version,
            )
            for variant, composed in runs_of(context.composed).items()
        }

    async def _take(self, purpose: tickets.Purpose, runner: TicketRunner, tasks: TaskGroup) -> None:
        """Take tickets from the queue whenever more may run, until the worker drains. Each purpose is counted
        apart: training tickets count while their engine is lent, and must not delay an evaluation."""
        names = self._context.names
        deliveries = self._bus.store.take(
            *(names.tickets_stream, names.ticket(purpose), tickets.Ticket),
            room=partial(self._concurrency.room, purpose),
            until=self._draining,
        )
        async for delivery in deliveries:
            self._concurrency.begin(purpose)
            tasks.start_soon(self._work, delivery, runner)
        self._takers -= 1

    async def _work(self, delivery: Delivery[tickets.Ticket], runner: TicketRunner) -> None:
        ticket = delivery.message
        key = (ticket.purpose, ticket.id, ticket.attempt)
        if key in self._running:  # delivered again, for example because the server was killed
            self._running[key] = (self._running[key][0], delivery)
            self._concurrency.end(ticket.purpose)
            return
        with bound(ticket=ticket.name), anyio.CancelScope() as scope:
            self._running[key] = (scope, delivery)
            try:
                self._starts.add(tickets.TicketStarted(self._context.worker, *key))
                outcome = await runner.outcome(ticket)
                await self._bus.store.append(self._context.names.groups, outcome, id=f"{ticket.name}/end")
            finally:
                _, newest_delivery = self._running.pop(key)
                self._concurrency.end(ticket.purpose)
                if not self._context.leave.is_set():
                    with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                        await newest_delivery.acknowledge()

    def _abort(self, message: tickets.AbortTicket) -> None:
        if message.lease_epoch != self._context.kernel_epoch:
            return  # a kernel that was replaced does not know this attempt
        if running := self._running.get((message.purpose, message.ticket, message.attempt)):
            running[0].cancel()

    async def _keep_alive(self) -> None:
        """Report running tickets to the server, so that it does not deliver long ones again."""
        while True:
            await anyio.sleep(_KEEP_ALIVE_S)
            for _, delivery in list(self._running.values()):
                await delivery.in_progress()

    def _note_oldest_version(self, ticket: tickets.Ticket, version: int) -> None:
        """Report the version to the kernel, which may be able to use it before the ticket is done."""
        if ticket.purpose == "train":
            self._progress.add((ticket.id, ticket.attempt, version))

    async def _report_starts(self, started: tuple[tickets.TicketStarted, ...]) -> None:
        await self._bus.publish(self._context.names.tickets_started, tickets.TicketsStarted(started))

    async def _report_progress(self, oldest: tuple[tuple[int, int, int], ...]) -> None:
        await self._bus.publish(self._context.names.progress, tickets.Progress(self._context.worker, oldest))


def _smallest_vocabulary(config: RunConfig) -> tuple[float, str]:
    sizes = {path: vocabulary_of(path) for each in config.models.values() if (path := each.path)}
    return min(((size, path) for path, size in sizes.items() if size), default=(math.inf, ""))


def _vision_of(model: str | None, rows: DatasetConfig) -> Vision | None:
    if model is None or not is_vision_language(fetch_config(model)):
        return None
    keep_torch_out()
    return Vision(model, rows)
