"""The trainer: one rank of a worker group. Rank 0 gets the kernel's requests and passes them on. Each rank
reads the rows that it works on, and stores the columns that it computes; the kernel gets only names,
statistics and digests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio.to_thread
import msgspec
import numpy as np
import structlog

from stretto.algorithm import Call, Loss, Stateful
from stretto.assembly.contracts import expect_contract
from stretto.assembly.placement import group_of_worker, model_folder, split_call, split_groups
from stretto.assembly.run_memory import training_share
from stretto.bus.listening import url_host
from stretto.bus.messages import training as messages
from stretto.bus.messages.base import KernelMessage, Message
from stretto.bus.messages.inference import AskSharedRows, SharedRows
from stretto.bus.messages.membership import AskRanks, Heartbeat, Ranks
from stretto.bus.server import free_port
from stretto.engine import MeasuringEngine, TrainingEngine
from stretto.errors import ConfigError, EngineError, Refused, together
from stretto.machine import clock
from stretto.reward import plain_number
from stretto.training.config import ModelTrainingConfig
from stretto.weights import Publisher, WeightsNote
from stretto.workers.context import ComputeThread, WorkerContext
from stretto.workers.shared_rows import choose_rows, score_rows
from stretto.workers.training.batch_store import BatchStore
from stretto.workers.training.canary import probe_of
from stretto.workers.training.checkpoint_files import folder_to_load, folder_to_save
from stretto.workers.training.publication import DigestPublisher, Publication
from stretto.workers.training.step_recorder import ROW, RecordedStep, StepFigures, StepRecorder
from stretto.workers.weights_wire import BusWire

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

log = structlog.get_logger()

M = TypeVar("M", bound=KernelMessage)
A = TypeVar("A", bound=Message)

_STATE = "algorithm.json"
"""File in a checkpoint with the state of a `Stateful` algorithm."""
_START = "start_logprobs"  # column of the logprobs of the policy at the start of the train step
_SHARED_VERSIONS = 8
"""Keep the shared rows of this many newest versions: an engine's swap may take longer than a train step."""
_MEETING_S = 600.0  # until all ranks know where they meet: a cluster may start some ranks much later
_RANK_DEADLINE_S = 24 * 3600.0  # of a request to another rank; the kernel notices a dead rank long before


@dataclass(frozen=True)
class _Saving:
    version: int
    copied: Future[None]
    """Done when the models may change."""
    saved: Future[messages.Saved]


class TrainerWorker:
    """One rank of a worker group."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._thread = ComputeThread(context.process.executor("compute"))
        self._writer = ComputeThread(context.process.executor("checkpoint"))
        self._engines: dict[str, TrainingEngine] = {}
        self._publication: Publication | None = None
        """None except in the group of the lead model."""
        self._note: Future[WeightsNote | None] | None = None
        """The note of the present version, once it is published; None in a group that publishes nothing."""
        self._shared_rows: dict[int, Future[SharedRows]] = {}
        self._saving: _Saving | None = None
        self._version = -1
        self._incarnation = 0
        self._step = -1
        """Version at which the newest step began."""
        self._calls_done: dict[str, Future[messages.CallDone]] = {}
        self._ending = anyio.Lock()
        self._needed: dict[int, WeightsNote] = {}
        """Notes of published earlier versions that evaluations need."""
        self._busy_s = 0.0
        self._recorder = StepRecorder(context.bus, context.names, context.worker)

    async def run(self, ready: Callable[[], None]) -> None:
        """Make the engines, then serve requests of the kernel."""
        self._expect_folder()
        wire = BusWire(self._context)
        await self._join_group()
        await self._make_engines(wire)
        try:
            await wire.open()
            for store in self._stores:
                await store.open()
            await self._serve_requests()
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._recorder.run)
                ready()
        finally:
            for engine in self._engines.values():
                engine.stop()
            if self._publication is not None:
                self._publication.close()

    def _expect_folder(self) -> None:
        context = self._context
        if not context.component_context.folder and context.composed.config.checkpoint.store is None:
            raise ConfigError(
                f"{context.worker} on {socket.gethostname()} does not see the run's folder, where trainers "
                "keep checkpoints; set `checkpoint.store` to the URL of a store, or `out` to a folder on a "
                "disk that the machines of the trainers and the kernel share",
                path="out",
            )

    async def _join_group(self) -> None:
        """Find this rank's place, and the processes of all ranks, for which the kernel waits."""
        context = self._context
        self._algorithm, self._graph = context.assembly.algorithm, context.assembly.graph
        self._calls = {call.name: call for call in self._graph.calls}
        self._placement = context.assembly.placement
        name, self._rank = group_of_worker(context.worker)
        self._group = self._placement.groups[name]
        self._part = self._group.part_of(self._rank)
        self._leads = self._group is self._placement.lead
        subject = context.names.kernel("trainer", "ranks")
        ranks = await context.bus.request(subject, AskRanks(), Ranks, deadline_s=_MEETING_S)
        self._nonces: Mapping[str, str] = ranks.nonces
        self._rows = BatchStore(context, self._placement, self._nonces)
        self._held_out: BatchStore | None = None
        """The rows on which this group measures the loss; None if the run does not ask for it."""
        if context.composed.config.evaluates_loss:
            self._held_out = BatchStore(context, self._placement, self._nonces, "evaluation.dataset")
        self._stores = [self._rows, *([self._held_out] if self._held_out else [])]
        self._rendezvous = await self._meeting_place()

    async def _make_engines(self, wire: BusWire) -> None:
        """Make the engines of the group's models and, in the lead model's group, what publishes it."""
        context, config = self._context, self._context.composed.config
        for model in self._group.models:
            self._engines[model] = engine = await self._thread.run(self._make_engine, model)
            if self._held_out is not None and self._graph.models[model].trainable:
                label = context.composed.origin(self._group.path).label
                expect_contract(engine, MeasuringEngine, f"evaluation.measure wants a loss, but {label}")
        if self._leads:
            sampling = self._graph.samples or config.evaluates_answers
            probe = await anyio.to_thread.run_sync(probe_of, config) if sampling else ""
            publisher = self._make_publisher(wire, sampling=sampling) if self._rank == 0 else None
            writer = ComputeThread(context.process.executor("publish"))
            self._publication = Publication(
                self._engines[self._graph.lead], probe, publisher, self._thread, writer
            )

    async def _serve_requests(self) -> None:
        context = self._context
        await self._serve("load", messages.LoadCheckpoint, messages.Loaded, self._load)
        await self._serve("call", messages.RunCall, messages.CallDone, self._call)
        await self._serve("end", messages.EndStep, messages.StepEnded, self._end_step)
        await self._serve("save", messages.Save, messages.Copied, self._save)
        await self._serve("saved", messages.AskSaved, messages.Saved, self._send_saved, _join_saved)
        await context.bus.subscribe(context.subject("prefetch"), messages.Prefetch, self._prefetch)
        if self._rank == 0:
            await context.obey("state", messages.AskState, self._send_state)
        if self._leads and self._rank == 0:
            await context.obey("published", messages.AskPublished, self._send_note)
            await context.bus.serve(context.subject("shared_rows"), AskSharedRows, self._send_shared_rows)

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Add `busy_s`: seconds spent in calls."""
        return msgspec.structs.replace(heartbeat, busy_s=self._busy_s)

    async def drain(self) -> None:
        """Return at once: a trainer is not asked to drain, because the run ends without it."""

    async def _meeting_place(self) -> str:
        """Return how the ranks of this worker group find each other (see `Context.rendezvous`)."""
        context, name = self._context, self._group.name
        if self._group.section.processes == 1:
            return ""
        first = self._group.workers[0]  # a restarted rank 0 has another nonce, so another file
        if not context.many_machines and context.component_context.folder:
            return str(context.component_context.path("bus", f"{name}-{self._nonces[first]}.rendezvous"))
        if self._rank == 0:
            host = context.bus.local_address
            place = messages.MeetingPlace(f"tcp://{url_host(host)}:{free_port(host)}")

            async def send_place(_: messages.AskMeetingPlace) -> messages.MeetingPlace:
                return place

            await context.obey("meeting_place", messages.AskMeetingPlace, send_place)
            return place.rendezvous
        subject = context.names.worker("trainer", first, self._nonces[first], "meeting_place")
        asked, answer = messages.AskMeetingPlace(context.lease_epoch), messages.MeetingPlace
        return (await context.bus.request(subject, asked, answer, deadline_s=_MEETING_S)).rendezvous

    def _make_publisher(self, wire: BusWire, *, sampling: bool) -> Publisher:
        context = self._context
        publisher = context.make("weights").publisher(wire) if sampling else DigestPublisher()
        expect_contract(publisher, Publisher, context.composed.origin("weights").label)
        return publisher

    def _make_engine(self, name: str) -> TrainingEngine:
        context, group = self._context, self._group
        config, model = context.composed.config, self._graph.models[name]
        settings, source = config.models.get(name), config.source_of(name)
        section = msgspec.structs.replace(
            group.section, share=training_share(config, context.assembly.placement, group.section)
        )
        if settings is not None and settings.lr is not None:
            section = msgspec.structs.replace(section, lr=settings.lr)
        lora = section.lora if isinstance(section, ModelTrainingConfig) else None
        if lora is not None and source != config.source_of(self._graph.lead):  # it has no adapter to continue
            section = msgspec.structs.replace(section, lora=msgspec.structs.replace(lora, adapter=None))
        component_context = msgspec.structs.replace(
            context.component_context,
            model=source,
            head=model.head,
            trainable=model.trainable,
            rank=self._rank,
            rendezvous=self._rendezvous,
        )
        return context.composed.make(group.path, component_context, section)

    async def _serve(
        self,
        verb: str,
        kind: type[M],
        answer: type[A],
        handler: Callable[[M], Awaitable[A]],
        join: Callable[[A, list[A]], A] = lambda own, others: own,
    ) -> None:
        """Serve a request in all ranks at the same time. `join` combines the answers of all ranks."""
        other_workers = self._group.workers[1:] if self._rank == 0 else []

        async def run_on_all_ranks(message: M) -> A:
            # A pure function runs only on rank 0; the others ask for its columns later.
            alone = isinstance(message, messages.RunCall) and self._calls[message.name].op == "function"

            async def run_on(worker: str) -> A:
                if worker == self._context.worker:
                    return await handler(message)
                subject = self._context.names.worker("trainer", worker, self._nonces[worker], verb)
                bus = self._context.bus
                return await bus.request(subject, message, answer, deadline_s=_RANK_DEADLINE_S)

            own, *others = await together(run_on, [self._context.worker, *(() if alone else other_workers)])
            return join(own, others)

        await self._context.obey(verb, kind, run_on_all_ranks)

    # ----------------------------------------------------------------------------- kernel's requests

    async def _load(self, message: messages.LoadCheckpoint) -> messages.Loaded:
        async with folder_to_load(message, self._context.component_context) as folder:
            for name, engine in self._engines.items():
                from_checkpoint = bool(folder) and self._graph.models[name].trainable
                await self._thread.run(
                    engine.load, model_folder(Path(folder), name, self._graph) if from_checkpoint else None
                )
            if isinstance(self._algorithm, Stateful):
                state_file = Path(folder, _STATE)
                has_state = folder and state_file.exists()
                self._algorithm.restore(json.loads(state_file.read_bytes()) if has_state else {})
            for store in self._stores:
                store.end()
            self._version, self._shared_rows = message.version, {}
            if self._publication is None:
                return messages.Loaded(None, ())
            needed = await self._publication.publish_again(message.needed, folder)
        self._needed = {note.version: note for note in needed}
        versions = [note.version for note in needed]
        self._note = self._publication.begin(self._version, versions, loaded=True)
        return messages.Loaded(await asyncio.wrap_future(self._note), needed)

    async def _save(self, message: messages.Save) -> messages.Copied:
        self._expect(message.version)
        self._saving = saving = _Saving(message.version, Future(), Future())
        self._tasks.start_soon(self._save_beside, message, saving)
        await asyncio.wrap_future(saving.copied)
        return messages.Copied()

    async def _save_beside(self, message: messages.Save, saving: _Saving) -> None:
        start = clock.now()
        uploaded: dict[str, str] = {}
        try:
            async with folder_to_save(message, self._context.component_context, uploaded) as folder:
                writes = await self._copy(message, folder)
                saving.copied.set_result(None)
                for write in writes:
                    await self._writer.run(write)
            saving.saved.set_result(messages.Saved(clock.now() - start, uploaded))
        except Exception as error:  # noqa: BLE001 - the request fails with it
            log.error("checkpoint failed", version=message.version, error=str(error))
            (saving.saved if saving.copied.done() else saving.copied).set_exception(error)

    async def _copy(self, message: messages.Save, folder: str) -> list[Callable[[], object]]:
        """Copy the state of this rank's models, or write it now. Return functions that write the copies."""
        trained = [name for name in self._engines if self._graph.models[name].trainable]
        most_bytes = int(self._context.composed.config.checkpoint.copy_gb * 1e9) // max(1, len(trained))
        writes: list[Callable[[], object]] = []
        for name in trained:
            path = model_folder(Path(folder), name, self._graph)
            path.mkdir(parents=True, exist_ok=True)
            write = await self._thread.run(self._engines[name].save, path, most_bytes)
            writes += [write] if write else []
        if self._leads and self._rank == 0 and isinstance(self._algorithm, Stateful):
            state = {name: plain_number(value, name) for name, value in self._algorithm.state().items()}
            Path(folder, _STATE).write_text(json.dumps(state))
        if self._publication is not None:
            await self._publication.copy(message.needed, folder)
        return writes

    async def _send_saved(self, message: messages.AskSaved) -> messages.Saved:
        if self._saving is None or self._saving.version != message.version:
            raise Refused(self._context.worker, f"no checkpoint of version {message.version} is being saved")
        return await asyncio.wrap_future(self._saving.saved)

    async def _send_state(self, _: messages.AskState) -> messages.TrainerState:
        async with self._ending:
            return messages.TrainerState(self._version, self._incarnation, tuple(self._needed.values()))

    async def _call(self, message: messages.RunCall) -> messages.CallDone:
        """Run a call; if a former kernel has already requested it, return the same result."""
        result = self._calls_done.get(message.name) if message.version == self._step else None
        if result is None:
            self._expect(message.version)
            if message.version != self._step:
                self._step, self._calls_done = message.version, {}
            result = self._calls_done[message.name] = Future()
            try:
                result.set_result(await self._run(message))
            except Exception as error:  # noqa: BLE001 - the request fails with it
                result.set_exception(error)
        return await asyncio.wrap_future(result)

    async def _run(self, message: messages.RunCall) -> messages.CallDone:
        self._incarnation = message.incarnation
        call = self._calls[message.name]
        await self._rows.begin(message.version, message.rows)
        log.info("call", call=call.name, version=message.version)
        start = clock.now()
        statistics = dict(await self._run_call(call, self._rows))
        if self._held_out is not None and self._context.composed.config.measures_loss_of(message.version + 1):
            await self._held_out.begin(message.version, self._held_out.first_rows())
            statistics |= await self._run_call(call, self._held_out)
        seconds = clock.now() - start
        self._busy_s += seconds
        numbers = {key: plain_number(value, f"the statistic {key!r}") for key, value in statistics.items()}
        return messages.CallDone(numbers, seconds)

    async def _end_step(self, message: messages.EndStep) -> messages.StepEnded:
        async with self._ending:
            if message.version == self._step == self._version - 1:  # a former kernel has ended the step
                return messages.StepEnded()
            self._expect(message.version)
            if self._leads and self._bounds_divergence:
                self._shared_rows.pop(self._version - _SHARED_VERSIONS + 1, None)
                self._shared_rows[self._version + 1] = await self._score_shared_rows()
            for store in self._stores:
                store.end()
            self._keep_note(message.needed)
            self._version += 1
            if self._publication is not None:
                self._note = self._publication.begin(self._version, message.needed)
            if self._context.composed.config.inference.sleeps and self._group.section.gpus:
                import torch

                # Engines that wake on this device need the room. What began above is done before.
                await self._thread.run(torch.cuda.empty_cache)
            return messages.StepEnded()

    def _keep_note(self, needed: Sequence[int]) -> None:
        note = self._note
        if note is not None and note.done() and note.exception() is None and (published := note.result()):
            self._needed[self._version] = published
        self._needed = {version: self._needed[version] for version in needed if version in self._needed}

    async def _send_note(self, message: messages.AskPublished) -> messages.Published:
        """Return the note of a version, once the version is published and its shared rows are scored."""
        self._expect(message.version)
        assert self._note is not None
        note = await asyncio.wrap_future(self._note)
        assert note is not None, "rank 0 publishes"
        if shared_rows := self._shared_rows.get(message.version):
            await asyncio.wrap_future(shared_rows)
        return messages.Published(note)

    async def _prefetch(self, message: messages.Prefetch) -> None:
        await self._rows.prefetch(message.rows, complete=message.complete)

    @property
    def _bounds_divergence(self) -> bool:
        return self._graph.samples and self._context.composed.config.queue.max_divergence is not None

    async def _score_shared_rows(self) -> Future[SharedRows]:
        """Begin to score a few rows of this rank's part of the batch with the weights after the step."""
        if self._rows.has_images:
            return self._thread.submit(SharedRows, (), "the model reads images, but engines score only text")
        parts = split_groups(self._rows.lengths, self._group.section.data_parallel, self._rows.groups)
        batch = await self._rows.batch(choose_rows(parts[self._part]), (), media=False)
        engine = self._engines[self._graph.lead]
        return self._thread.submit(lambda: SharedRows(score_rows(engine, batch)))

    async def _send_shared_rows(self, message: AskSharedRows) -> SharedRows:
        rows = self._shared_rows.get(message.version)
        return SharedRows(()) if rows is None else await asyncio.wrap_future(rows)

    def _expect(self, version: int) -> None:
        if version != self._version:
            worker = self._context.worker
            raise Refused(worker, f"has version {self._version}, but the request is for version {version}")

    # ----------------------------------------------------------------------------------- the calls

    async def _run_call(self, call: Call, store: BatchStore) -> Mapping[str, float]:
        """Run a call for the rows of a step, or for held-out rows: there, train calls measure their loss."""
        temperature = self._context.composed.config.sampling.temperature
        if call.op == "function":
            assert call.function is not None
            all_rows = range(len(store.lengths))
            batch = await store.batch(all_rows, call.reads, media=False)
            columns = await self._thread.run(call.function, batch)
            for key, column in _expect_columns(call, columns).items():
                store.put(key, all_rows, column)
            return {}
        assert call.model is not None
        engine = self._engines[call.model]
        if call.op == "train" and store is self._rows:
            return await self._train(call, engine, temperature)
        parts = split_call(call, store.lengths, self._group.section.data_parallel, store.groups)
        rows = self._own(parts, call)
        batch = await store.batch(rows, call.reads, media=True, drawn=call.model == self._graph.lead)
        if call.op == "forward":
            column = await self._thread.run(engine.forward, batch, temperature=temperature)
            store.put(call.writes[0], rows, column)
            return {}
        assert call.loss is not None
        assert isinstance(engine, MeasuringEngine)
        measured = await self._thread.run(engine.measure, batch, call.loss, temperature=temperature)
        return {f"held_out/{name}": value for name, value in measured.items()}

    async def _start_logprobs(
        self, call: Call, engine: TrainingEngine, temperature: float
    ) -> list[Mapping[str, Tensor]]:
        """Return the column `_START` for each optimizer step of the first epoch: logprobs of the policy at
        the train step's start. One minibatch needs none: its only step computes them itself."""
        if call.minibatches == 1:
            return [{}]
        writers = self._graph.writers
        forward_keys = [
            key for key in call.reads if (writers[key].op, writers[key].model) == ("forward", call.model)
        ]
        starts: list[Mapping[str, Tensor]] = []
        for rows in islice(self._steps(call), call.minibatches):
            batch = await self._rows.batch(rows, call.reads, media=True, drawn=True)
            if forward_keys:
                column = batch[forward_keys[0]]
            else:
                column = await self._thread.run(engine.forward, batch, temperature=temperature)
            starts.append({_START: column})
        return starts

    def _steps(self, call: Call) -> Iterator[list[int]]:
        lengths, groups = self._rows.lengths, self._rows.groups
        seed = abs(self._context.composed.config.seed)
        for epoch in range(call.epochs):
            for rows in minibatches(groups, call.minibatches, [seed, self._version, epoch]):
                parts = split_call(
                    call,
                    [lengths[row] for row in rows],
                    self._group.section.data_parallel,
                    [groups[row] for row in rows],
                )
                yield [rows[index] for index in self._own(parts, call)]

    def _own(self, parts: list[list[int]], call: Call) -> list[int]:
        if not parts[self._part]:
            raise EngineError(
                f"call {call.name!r} has {sum(map(len, parts))} sequences for the {len(parts)} data-parallel "
                f"ranks of {self._group.path!r}: {self._context.worker} gets none"
            )
        return parts[self._part]

    async def _train(self, call: Call, engine: TrainingEngine, temperature: float) -> Mapping[str, float]:
        """Run the optimizer steps of a train call. The statistics are means over the steps, or maxima."""
        import torch

        assert call.loss is not None
        audit = _Audit(call.loss, self._version)
        leads = call.model == self._graph.lead
        audited = self._graph.samples and leads
        steps: list[Mapping[str, float]] = []
        figures: dict[str, float] = {}
        divergences: list[float] = []
        starts = (
            await self._start_logprobs(call, engine, temperature)
            if audited and self._bounds_divergence
            else []
        )
        watcher = StepFigures() if audited and self._context.composed.config.samples.keep != "none" else None
        for number, rows in enumerate(self._steps(call)):
            batch = await self._rows.batch(rows, call.reads, media=True, drawn=leads)
            loss = audit.loss if audited and not steps else call.loss
            if number < len(starts):
                loss, batch = _with_divergence(loss), batch.with_columns(starts[number])
            if watcher is not None and number < call.minibatches:  # the first epoch has every row once
                loss, batch = watcher.watch(loss, rows), batch.with_columns({ROW: torch.tensor(rows)})
            statistics = dict(await self._thread.run(engine.train, batch, loss, temperature=temperature))
            if audited and not steps:
                figures = audit.pop_figures(statistics)
            if "divergence" in statistics:
                divergences.append(statistics.pop("divergence"))
            steps.append(statistics)
        if watcher is not None:
            self._record(watcher)
        means = {name: _over_steps(name, [step[name] for step in steps]) for name in steps[0]}
        if divergences:
            figures["divergence"] = sum(divergences) / len(divergences)
        if not self._graph.samples:
            means["tokens"] = float(self._rows.trained_tokens)
        return {**means, **figures}

    def _record(self, kept: StepFigures) -> None:
        """Send the step's figures in the background. Of ranks that computed the same rows, one sends them."""
        is_last = (self._rank + 1) % self._group.ranks_per_part == 0  # this rank has the model's output
        ids, groups = self._rows.ids, self._rows.groups
        keeps = self._context.composed.config.samples.keeps
        shown = {id for id, group in zip(ids, groups, strict=True) if keeps(group)}
        if is_last and shown:
            self._recorder.add(RecordedStep(self._incarnation, self._version, kept, ids, shown))


def _join_saved(own: messages.Saved, others: Sequence[messages.Saved]) -> messages.Saved:
    uploaded = {name: value for each in (own, *others) for name, value in each.uploaded.items()}
    return messages.Saved(own.seconds, uploaded)


def _over_steps(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def _expect_columns(call: Call, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if sorted(columns) != sorted(call.writes):
        returned, expected = ", ".join(columns) or "nothing", ", ".join(call.writes) or "nothing"
        raise EngineError(
            f"the function of call {call.name!r} returned the columns {returned}; expected {expected}"
        )
    return columns


def minibatches(groups: Sequence[int], count: int, seed: list[int]) -> list[list[int]]:
    """Split rows into `count` parts of equally many random groups. A single part keeps the rows' order."""
    if count == 1:
        return [list(range(len(groups)))]
    names = np.random.default_rng(seed).permutation(np.unique(groups))
    return [np.flatnonzero(np.isin(groups, part)).tolist() for part in np.array_split(names, count)]


def _with_divergence(loss: Loss) -> Loss:
    """Add `divergence`: KL(behaviour || policy at step start), see `stretto.rl.functional.bounded_kl`."""

    def loss_with_divergence(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        from stretto.rl.functional import bounded_kl

        losses, statistics = loss.function(logprobs, batch)
        at_start = batch[_START] if _START in batch else logprobs.detach()
        return losses, {**statistics, "divergence": bounded_kl(at_start, batch["behaviour_logprobs"])}

    return replace(loss, function=loss_with_divergence)


class _Audit:
    """Compares engine and trainer: logprobs of tokens sampled by the version that is about to be trained.

    `mismatch_*` covers samples with tokens of that version only: the numerical difference between engine and
    trainer. `drift_*` covers tokens of that version in samples that an older version began: the additional
    difference from continuing on an old KV cache. Each has the share of such tokens, and over them the mean
    and the maximum of |Δ|, and a KL estimate (k3).
    """

    def __init__(self, loss: Loss, version: int) -> None:
        self.loss = replace(loss, function=self._audit)
        self._plain = loss.function
        self._version = version

    def _audit(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        import torch

        from stretto.rl.functional import kl_to_behaviour

        mask, versions = batch["loss_mask"], batch["versions"]
        index = batch.sequence_index().to(mask.device)
        older = torch.zeros(len(batch), dtype=torch.bool, device=mask.device)
        older[index[mask & (versions < self._version)]] = True
        fresh = mask & (versions == self._version)
        current, behaviour = logprobs.detach(), batch["behaviour_logprobs"]
        delta, kl = (current - behaviour).abs(), kl_to_behaviour(current, behaviour)
        figures: dict[str, Tensor] = {}
        for name, selection in (("mismatch", fresh & ~older[index]), ("drift", fresh & older[index])):
            figures |= {
                f"{name}_share": selection.float(),
                f"{name}_mean": torch.where(selection, delta, 0.0),
                f"{name}_max": torch.where(selection, delta, 0.0),
                f"{name}_kl": torch.where(selection, kl, 0.0),
            }
        loss, statistics = self._plain(logprobs, batch)
        return loss, {**statistics, **figures}

    def pop_figures(self, statistics: dict[str, float]) -> dict[str, float]:
        """Move the audit's figures out of a step's statistics; if no token was audited, only the share."""
        result: dict[str, float] = {}
        for name in ("mismatch", "drift"):
            figures = {key: statistics.pop(f"{name}_{key}", 0.0) for key in ("share", "mean", "max", "kl")}
            result[f"{name}_share"] = figures["share"]
            if figures["share"]:
                result[f"{name}_mean"] = figures["mean"] / figures["share"]
                result[f"{name}_max"] = figures["max"]
                result[f"{name}_kl"] = figures["kl"] / figures["share"]
        return result
