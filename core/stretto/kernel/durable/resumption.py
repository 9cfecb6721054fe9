"""How a kernel continues a run: from the state of a former kernel to its own first event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import yaml

from stretto.bus.client import Bus
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import Trainers
from stretto.kernel.durable.changes import differences, values_file
from stretto.kernel.durable.checkpoint import checkpoint_name
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.durable.recovery import Living, OnRepeated, Recovered, Repetition, Stored, read_store
from stretto.kernel.ending import Ending
from stretto.kernel.schedule.commands import Command
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.kernel.setup import RunSetup
from stretto.records.metrics_file import MetricsFile

log = structlog.get_logger()


class Resumption:
    """The beginning of a kernel that continues a run, or trains the batches of a replay.

    Args:
        do: carries out a command.
        on_repeated: called after each repeated step; see `Repetition`.
    """

    def __init__(
        self,
        setup: RunSetup,
        bus: Bus,
        journal: JournalWriter,
        ending: Ending,
        *,
        trainers: Trainers,
        engines: Engines,
        tickets: TicketQueue,
        checkpointer: Checkpointer,
        do: Callable[[Command], Awaitable[None]],
        on_repeated: OnRepeated,
    ) -> None:
        assert setup.resumed is not None
        self._setup = setup
        self._folder, self._state = setup.resumed
        self._bus = bus
        self._journal = journal
        self._ending = ending
        self._trainers = trainers
        self._engines = engines
        self._tickets = tickets
        self._checkpointer = checkpointer
        self._do = do
        self._on_repeated = on_repeated
        journal.incarnation = self._state.incarnation

    async def read(self) -> Stored:
        """Find out what the store still holds, and report what is lost. A `ConfigError` says that nothing is
        left to continue from; no file has changed then."""
        state, setup = self._state, self._setup
        if setup.replays is not None:
            return Stored.of_replay(state, setup.replays)
        stored = await read_store(
            self._bus,
            setup.names,
            (self._folder, state),
            setup.new_scheduler(),
            values=setup.values,
            samples=setup.graph.samples,
            reached=max((line["step"] for line in MetricsFile(setup.folder).read()), default=0),
            epoch=self._journal.epoch,
        )
        if not stored.fits:
            former = yaml.safe_load(values_file(setup.folder, state.values).read_text())
            changes = differences(former, setup.composed.document)
            log.info(
                "values changed", version=state.version, **{key: new for key, (_, new) in changes.items()}
            )
        if stored.lost:
            setup.facts.add_loss(stored.lost, stored.lost_from, changed=not stored.fits)
        if stored.log_is_short:
            # The checkpoint names messages by number: new ones must not get the numbers of lost ones.
            await self._bus.store.purge(setup.names.log_stream, below=state.log_sequence + 1)
        self._journal.incarnation = stored.incarnation_at(state.version, state.incarnation)
        return stored

    async def living(self, stored: Stored) -> Living | None:
        """Return the state of the trainers that a former kernel has started; None if they have other weights
        than those to which the events lead."""
        before, is_training = stored.fold.end.version, stored.fold.version > stored.fold.end.version
        lead, *others = await self._trainers.states()
        versions = {state.version for state in (lead, *others)}
        if not stored.is_exact or not versions <= {before, before + is_training}:
            return None
        needed = set(stored.fold.end.evaluation.needed_versions) - {lead.version}
        notes = tuple(note for note in lead.notes if note.version in needed)
        if {note.version for note in notes} != needed:
            return None
        if lead.version > before:
            is_own = lead.incarnation == self._state.incarnation
            return Living(before, notes) if is_own else None
        note = await self._trainers.published(before)
        expected = self._state.digest if before == self._state.version else stored.journal.digests.get(before)
        if expected not in ("", None, note.digest):
            return None
        return Living(before, (*notes, note))

    async def repeat(self, stored: Stored, living: Living | None) -> Recovered:
        """Load the checkpoint, unless the trainers are `living`, and train the batches again that the later
        events start. Where new events cannot continue the stored ones, write a checkpoint."""
        setup = self._setup
        setup.facts.note = "repeating the journal" if setup.replays is None else "replaying the batches"
        repetition = Repetition(
            *(self._journal, setup.scheduler, self._trainers, (self._folder, self._state), stored),
            on_repeated=self._on_repeated,
            living=living,
        )
        await repetition.load()
        if setup.replays is None:
            recovered = await repetition.fold(expires_batch=setup.expires_batch)
            if setup.expires_batch and not repetition.has_expired:
                setup.facts.problems.append("--expire-batch: no batch was under way, so none has expired")
        else:
            self._journal.hear(setup.ownership(self._journal.incarnation, attempts_from=0))
            recovered = await repetition.replay(setup.replays)
        for command in recovered.retired:
            await self._do(command)
        self._journal.incarnation = recovered.incarnation
        self._tickets.continue_from(
            recovered.log_sequence,
            self._state.lowest_sequence,
            tickets=(id for id, ticket in setup.scheduler.tickets.open.items() if ticket.done is None),
            evaluating=setup.scheduler.evaluation.under_way is not None,
        )
        self._engines.remember(recovered.notes)
        newest, failure = recovered.notes[-1], setup.scheduler.failure  # the former kernel could not say it
        if not recovered.is_exact or failure or setup.replays is not None:
            name = None if stored.fits else checkpoint_name(newest.version, setup.values)
            await self._checkpointer.save_required(newest, name)
        if setup.replays is not None:
            self._ending.end("completed", "")
            return recovered
        log.info("resumed", version=newest.version, repeated=recovered.repeated)
        if failure:
            self._ending.end("failed", failure)
        return recovered
