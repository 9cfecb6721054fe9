"""Draws a row of the dataset for each training ticket; no I/O. Without a curriculum, rows come in epochs, in
an order that follows from the seed. A curriculum's choices depend on rewards, so the journal stores them
before the tickets are issued, and a resumed run reads them from there."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.bus.messages.events import Account
from stretto.dataset import Curriculum, TicketEnd
from stretto.errors import ContractError
from stretto.kernel.schedule.open_tickets import OpenTicket, rewards_of


class RecordedDraw(msgspec.Struct, frozen=True):
    """A draw that the journal records."""

    version: int
    """Training version when the row was drawn."""
    row: int


class Draw(msgspec.Struct, frozen=True):
    """The row of a new ticket."""

    row: int
    version: int
    drops: int
    """Number of earlier tickets with this row that expired because they were late."""


class DrawState(msgspec.Struct):
    """The state of the draws of a run with a curriculum."""

    pending: list[tuple[int, TicketEnd]]
    """Ends not passed to the curriculum yet, each with the version at which the ticket was drawn."""
    curriculum: dict[str, Any]
    """`Curriculum.state`."""
    recorded: dict[int, RecordedDraw] = {}
    """Draws of tickets that the run issued before a loss, and has not issued again yet."""


class Draws:
    """The draws of one scheduler.

    For a draw at version v, the curriculum has received the ends of all tickets that were drawn before v, in
    the order of the tickets. So with η = 0 the draws do not depend on the order in which groups finish.
    """

    def __init__(self, rows: int, *, shuffle: bool, seed: int, curriculum: Curriculum | None) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._curriculum = curriculum
        self.cursor = 0
        """Number of rows drawn in the order of the epochs."""
        self._order: tuple[int, list[int]] = (-1, [])
        self.repeats: deque[tuple[int, int]] = deque()
        """(row, number of drops) of the rows to draw again."""
        self._recorded: dict[int, RecordedDraw] = {}
        """Draws of tickets that a previous kernel may have issued."""
        self._unrecorded: list[tuple[int, int]] = []
        self._pending: dict[int, list[TicketEnd]] = {}
        """Ends not passed to the curriculum yet, by the version at which the ticket was drawn."""

    @property
    def by_curriculum(self) -> bool:
        return self._curriculum is not None

    def next(self, ticket: int, version: int) -> Draw:
        """Draw a ticket's row: the row that the journal records, else a row to draw again, else a new row."""
        recorded, drops = self._recorded.pop(ticket, None), 0
        if recorded is not None:
            # A run that has lost steps may be at an earlier version now.
            version, row = min(recorded.version, version), recorded.row % self._rows
            drops = next((row_drops for again_row, row_drops in self.repeats if again_row == row), 0)
            if (row, drops) in self.repeats:
                self.repeats.remove((row, drops))
            elif self._curriculum is not None:
                self._tell_ends(version)
        elif self.repeats:
            row, drops = self.repeats.popleft()
        else:
            row = self._next_in_epoch() if self._curriculum is None else self._choose(ticket, version)
        if self._curriculum is not None:
            if recorded is None:
                self._unrecorded.append((ticket, row))
            self._curriculum.drawn(ticket, row, version)
        return Draw(row, version, drops)

    def ended(self, ticket: OpenTicket, outcome: Account | Literal["trained"]) -> None:
        """Keep the end of a ticket for the curriculum."""
        if self._curriculum is not None:
            rewards = rewards_of(ticket.done) if ticket.done is not None else ()
            end = TicketEnd(ticket.id, ticket.row, outcome, rewards)
            self._pending.setdefault(ticket.drawn_at, []).append(end)

    def refusal(self, row: int, rewards: Sequence[float]) -> str:
        """Return why the curriculum does not admit a finished group to training; empty if it does."""
        if self._curriculum is None or not rewards:
            return ""
        return self._curriculum.refusal(row, tuple(rewards))

    def figures(self) -> dict[str, float]:
        """Return the curriculum's figures for the metrics."""
        return {} if self._curriculum is None else self._curriculum.figures()

    def take_unrecorded(self) -> tuple[tuple[int, int], ...]:
        """Return (ticket, row) of the draws that are not in the journal yet. Each draw is returned once."""
        unrecorded, self._unrecorded = tuple(self._unrecorded), []
        return unrecorded

    def snapshot(self) -> DrawState | None:
        """Return the state for `restore`, besides `cursor` and `again`; None without a curriculum."""
        if self._curriculum is None:
            return None
        pending = [(version, end) for version, ends in sorted(self._pending.items()) for end in ends]
        return DrawState(pending, self._curriculum.state(), dict(self._recorded))

    def restore(
        self,
        state: DrawState | None,
        *,
        cursor: int,
        again: Sequence[tuple[int, int]],
        recorded: Mapping[int, RecordedDraw],
    ) -> None:
        """Replace the state. `recorded` are the draws of tickets that were issued after this state."""
        self.cursor = cursor
        self.repeats = deque((row % self._rows, drops) for row, drops in again)  # the dataset may be shorter
        self._recorded = dict(recorded)
        self._unrecorded = []
        if self._curriculum is not None and state is not None:
            self._pending = {}
            for drawn_at, end in state.pending:
                if end.row < self._rows:
                    self._pending.setdefault(drawn_at, []).append(end)
            self._curriculum.restore(state.curriculum)
            self._recorded = state.recorded | self._recorded

    def _choose(self, ticket: int, version: int) -> int:
        assert self._curriculum is not None
        self._tell_ends(version)
        row = self._curriculum.choose(ticket, version)
        if not 0 <= row < self._rows:
            name = type(self._curriculum).__name__
            raise ContractError(f"{name} chose row {row} for ticket {ticket}; expected 0 to {self._rows - 1}")
        return row

    def _tell_ends(self, version: int) -> None:
        """Pass to the curriculum the ends of the tickets that were drawn before a version."""
        assert self._curriculum is not None
        earlier = [drawn_at for drawn_at in self._pending if drawn_at < version]
        ends = [end for drawn_at in earlier for end in self._pending.pop(drawn_at)]
        for end in sorted(ends, key=lambda end: end.ticket):
            self._curriculum.ended(end)

    def _next_in_epoch(self) -> int:
        epoch, place = divmod(self.cursor, self._rows)
        if self._order[0] != epoch:
            order = np.arange(self._rows)
            if self._shuffle:
                order = np.random.default_rng([abs(self._seed), epoch]).permutation(order)
            self._order = (epoch, order.tolist())
        self.cursor += 1
        return self._order[1][place]
