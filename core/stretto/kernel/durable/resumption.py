"""How a kernel continues a run: from the state of a former kernel to its own first event."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
import yaml

from stretto.bus.client import Bus
from stretto.kernel.calls.engines import Engines
from stretto.kernel.calls.trainers import Trainers
from stretto.kernel.durable.changes import differences, values_file
from stretto.kernel.durable.checkpoint import checkpoint_name
from stretto.kernel.durable.checkpointer import Checkpointer
from stretto.kernel.durable.journal import JournalWriter
from stretto.kernel.durable.recovery import Living, Recovered, Repetition, Stored, read_store
from stretto.kernel.ending import Ending
from stretto.kernel.schedule.commands import Command
from stretto.kernel.schedule.tickets import TicketQueue
from stretto.kernel.setup import RunSetup
from stretto.kernel.steps import Steps
from stretto.records.metrics_file import MetricsFile

log = structlog.get_logger()


@dataclass(eq=False)
class Resumption:
    """The beginning of a kernel that continues a run, or trains the batches of a replay."""

    _setup: RunSetup
    _bus: Bus
    _journal: JournalWriter
    _ending: Ending
    _trainers: Trainers
    _engines: Engines
    _tickets: TicketQueue
    _checkpointer: Checkpointer
    _steps: Steps
    _do: Callable[[Command], Awaitable[None]]
    stored: Stored = field(init=False)
    """Set by `read`."""

    def __post_init__(self) -> None:
        assert self._setup.resumed is not None
        self._folder, self._state = self._setup.resumed
        self._journal.incarnation = self._state.incarnation

    async def read(self) -> None:
        """Read the store and report losses. Raise ConfigError, with no file changed, if nothing is left."""
        state, setup = self._state, self._setup
        if setup.replays is not None:
            self.stored = Stored.of_replay(state, setup.replays)
            return
        stored = self.stored = await read_store(
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
            # The checkpoint names messages by number: new messages must not get the numbers of lost ones.
            await self._bus.store.purge(setup.names.log_stream, below=state.log_sequence + 1)
        self._journal.incarnation = stored.incarnation_at(state.version, state.incarnation)

    async def living(self) -> Living | None:
        """Return the weights of the former kernel's trainers; None if the events lead to other weights."""
        stored = self.stored
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

    async def repeat(self, living: Living | None) -> Recovered:
        """Load the checkpoint, unless the trainers are `living`, and train again the batches that the later
        events start. If new events cannot continue the stored ones, write a checkpoint."""
        setup, stored = self._setup, self.stored
        setup.facts.note = "repeating the journal" if setup.replays is None else "replaying the batches"
        checkpoint = self._folder, self._state
        repetition = Repetition(
            self._journal, setup.scheduler, self._trainers, *checkpoint, stored, self._steps.report, living
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
        newest, failure = recovered.notes[-1], setup.scheduler.failure  # which no former kernel reported
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
