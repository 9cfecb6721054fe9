"""How a kernel continues a run: from the state of a former kernel to its own first event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import yaml

from stretto.bus.client import Bus
from stretto.errors import RunError
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
from stretto.weights import WeightsNote

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
        """Find out what the store still holds. Report what is lost.

        Raises:
            ConfigError: if nothing is left to continue from. No file has changed.
        """
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
        if stored.lost:
            setup.facts.add_loss(stored.lost, stored.lost_from)
        if stored.log_is_short:
            # The checkpoint names messages by number: new ones must not get the numbers of lost ones.
            await self._bus.store.purge(setup.names.log_stream, below=state.log_sequence + 1)
        self._journal.incarnation = stored.incarnation_at(state.version, state.incarnation)
        return stored

    def hands_over(self, stored: Stored) -> bool:
        """Return whether this kernel has nothing to do, so that it needs no worker, because other values come
        next. The next kernel then gets the state after the events."""
        setup = self._setup
        if setup.continues or setup.replays is not None or not stored.is_only_read:
            return False
        self._ending.next_values = stored.fold.next_values
        self._ending.state = stored.fold.applied_to(self._state)
        self._ending.end("repeated", "")
        return True

    async def living(self, stored: Stored) -> Living | None:
        """Return the state of the trainers that a former kernel has started; None if they cannot go on: they
        have other weights than those to which the events lead, or others than they should.

        Raises:
            BusError: if they do not answer.
        """
        before, is_training = stored.fold.end.version, stored.fold.version > stored.fold.end.version
        lead, *others = await self._trainers.states()
        versions = {state.version for state in (lead, *others)}
        if not stored.is_exact or not stored.fits or not versions <= {before, before + is_training}:
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
        events start. Where the events that follow cannot continue the stored ones, write a checkpoint. If
        other values come next, end the run."""
        setup = self._setup
        setup.facts.note = "repeating the journal" if setup.replays is None else "replaying the batches"
        repetition = Repetition(
            *(self._journal, setup.scheduler, self._trainers, (self._folder, self._state), stored),
            on_repeated=self._on_repeated,
            living=living,
        )
        notes = await repetition.load()
        if not stored.fits:
            await self._change_values(notes)
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
        self._continue_tickets_from(recovered.log_sequence)
        self._engines.remember(recovered.notes)
        failure = setup.scheduler.failure  # the former kernel could not say it
        is_over = setup.continues and failure
        # Living trainers may be beyond the checkpoint without a repeated step.
        is_ahead = recovered.notes[-1].version > self._state.version
        has_news = is_ahead or (not stored.fits and stored.fold.events)
        if not recovered.is_exact or is_over or (has_news and not setup.continues):
            await self._checkpointer.save_required(recovered.notes[-1])
        if setup.continues:
            log.info("resumed", version=recovered.notes[-1].version, repeated=recovered.repeated)
        if is_over:
            self._ending.end("failed", failure)
        elif not setup.continues:
            self._ending.next_values = recovered.next_values
            self._ending.end("repeated" if setup.replays is None else "completed", "")
        return recovered

    def _continue_tickets_from(self, log_sequence: int) -> None:
        scheduler = self._setup.scheduler
        self._tickets.continue_from(
            log_sequence,
            self._state.lowest_sequence,
            tickets=(id for id, ticket in scheduler.tickets.open.items() if ticket.done is None),
            evaluating=scheduler.evaluation.under_way is not None,
        )

    async def _change_values(self, notes: tuple[WeightsNote, ...]) -> None:
        """Change to this kernel's values: write a checkpoint with them.

        Args:
            notes: notes of older versions that evaluations need, and last the note of the current weights.
        """
        setup, note = self._setup, notes[-1]
        if note.version > setup.config.steps:
            raise RunError(
                f"steps is {setup.config.steps}, but the run is already at version {note.version}: resume it "
                "with more steps"
            )
        former = yaml.safe_load(values_file(setup.folder, setup.values - 1).read_text())
        changes = differences(former, setup.composed.document)
        log.info("values changed", version=note.version, **{key: new for key, (_, new) in changes.items()})
        self._continue_tickets_from(self._state.log_sequence)
        self._engines.remember(notes)
        await self._checkpointer.save_required(note, checkpoint_name(note.version, setup.values))
