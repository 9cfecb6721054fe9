"""The curriculum of `mix`: which row comes next, by the parts' weights and the rewards of earlier groups.

The next ticket goes to the part that is furthest behind its share, so no part is ever a whole ticket ahead.
In this part, a pool is drawn by weight times number of rows, then the pool's row with the fewest draws;
the seed breaks ties. Rows whose tickets are in flight are drawn only if there are no other rows.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.dataset import TicketEnd

if TYPE_CHECKING:
    from stretto_mix import GateConfig

Weight = float | Mapping[int, float]
UNSEEN = "unseen"
"""Name of the pool of rows without a result."""


def weight_at(weight: Weight, step: int) -> float:
    """Return a weight at a step: linear between two steps of a schedule, constant before and after."""
    if not isinstance(weight, Mapping):
        return weight
    knots = sorted(weight.items())
    return float(np.interp(step, [knot for knot, _ in knots], [value for _, value in knots]))


@dataclass(frozen=True)
class Pool:
    """Rows whose newest mean reward is at most `max`, and above the `max` of the pool before."""

    name: str
    max: float
    weight: float


@dataclass
class _Row:
    draws: int = 0
    in_flight: int = 0
    ticket: int = -1
    """The newest ticket of the row whose rewards are known; -1 for none."""
    reward: float | None = None
    """Mean reward of the group of `ticket`."""
    unfit: bool = False
    """True if the row cannot be trained on."""

    @property
    def can_be_drawn(self) -> bool:
        return not self.in_flight and not self.unfit


@dataclass
class _PartRows:
    """The rows of one part that can be drawn now, by pool."""

    rows: range
    order: Sequence[int]
    """The order of the first draws of all rows."""
    fresh: int = 0
    """Index in `order` before which all rows have been drawn."""
    seen: defaultdict[str, list[tuple[int, float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Pool -> heap of (draws, tie-break, row) of rows that were drawn. Entries may be outdated."""
    sizes: Counter[str] = field(default_factory=Counter[str])
    """Pool -> number of rows that can be drawn."""


class MixCurriculum:
    """A curriculum (`stretto.dataset.Curriculum`) over parts of a dataset. `pools`: by rising `max`, which is
    infinite in the last; `unseen` is the weight of rows without a result."""

    def __init__(
        self,
        parts: Mapping[str, tuple[range, Weight]],
        pools: Sequence[Pool],
        *,
        unseen: float,
        gates: Mapping[str, GateConfig],
        shuffle: bool,
        seed: int,
    ) -> None:
        self._weights = {name: weight for name, (_, weight) in parts.items()}
        self._pools = pools
        self._pool_weights = {UNSEEN: unseen if pools else 1.0, **{pool.name: pool.weight for pool in pools}}
        self._gates = gates
        self._shuffle = shuffle
        self._seed = seed
        self._rows: dict[int, _Row] = {}
        self._credits = dict.fromkeys(parts, 0.0)
        """Part -> number of tickets due to it by its weight, minus those that it got."""
        self._pooled = Counter[str]()
        self._parts = {
            name: _PartRows(rows, self._first_order(number, rows), sizes=Counter({UNSEEN: len(rows)}))
            for number, (name, (rows, _)) in enumerate(parts.items())
        }

    def choose(self, ticket: int, version: int) -> int:
        shares = self._shares(version)
        name = max(
            (each for each in shares if shares[each]), key=lambda each: self._credits[each] + shares[each]
        )
        part = self._parts[name]
        weights = {
            pool: weight * part.sizes[pool]
            for pool, weight in self._pool_weights.items()
            if weight and part.sizes[pool]
        }
        if not weights:
            return self._least_drawn(part)
        rng = random.Random(f"{self._seed}/pool/{ticket}")
        [pool] = rng.choices(list(weights), list(weights.values()))
        return self._first_of(part, pool)

    def drawn(self, ticket: int, row: int, version: int) -> None:
        del ticket
        for name, share in self._shares(version).items():
            self._credits[name] += share
        name = self._name_of(row)
        self._credits[name] -= 1
        with self._changed(row) as record:
            record.draws += 1
            record.in_flight += 1

    def ended(self, end: TicketEnd) -> None:
        """Record the end of a ticket, with its group's rewards."""
        with self._changed(end.row) as record:
            record.in_flight = max(0, record.in_flight - 1)
            if end.rewards and end.ticket > record.ticket:
                record.ticket, record.reward = end.ticket, fmean(end.rewards)
            record.unfit |= end.outcome == "filtered" and not end.rewards

    def refusal(self, row: int, rewards: tuple[float, ...]) -> str:
        """Return which gate rejects a group with these rewards; empty for none."""
        del row
        return next(
            (f"by the gate {name}" for name, gate in self._gates.items() if gate.rejects(rewards)), ""
        )

    def figures(self) -> dict[str, float]:
        """Return each pool's number of rows and its share of all rows; nothing without pools."""
        if not self._pools:
            return {}
        total = sum(len(part.rows) for part in self._parts.values())
        rows = {pool.name: self._pooled[pool.name] for pool in self._pools}
        rows[UNSEEN] = total - sum(rows.values())
        return {f"pool/{name}/rows": count for name, count in rows.items()} | {
            f"pool/{name}/share": count / total for name, count in rows.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the credits, and the record of each drawn row."""
        rows = [
            [row, record.draws, record.in_flight, record.ticket, record.reward, record.unfit]
            for row, record in sorted(self._rows.items())
        ]
        return {"credits": dict(self._credits), "rows": rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. Parts that are not in the state begin with credit 0."""
        self._credits |= {name: value for name, value in state["credits"].items() if name in self._credits}
        num_rows = max(part.rows.stop for part in self._parts.values())
        for row, *facts in state["rows"]:
            if row < num_rows:
                with self._changed(row) as record:
                    record.draws, record.in_flight, record.ticket, record.reward, record.unfit = facts

    def _shares(self, version: int) -> dict[str, float]:
        weights = {name: weight_at(weight, version) for name, weight in self._weights.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def _first_order(self, number: int, rows: range) -> Sequence[int]:
        if not self._shuffle:
            return rows
        return (np.random.default_rng([abs(self._seed), number]).permutation(len(rows)) + rows.start).tolist()

    def _name_of(self, row: int) -> str:
        return next(name for name, part in self._parts.items() if row in part.rows)

    def _pool_of(self, known: _Row) -> str:
        if known.reward is None or not self._pools:
            return UNSEEN
        return next(pool.name for pool in self._pools if known.reward <= pool.max)

    def _key(self, row: int, draws: int) -> tuple[int, float, int]:
        tie = random.Random(f"{self._seed}/row/{row}/{draws}").random() if self._shuffle else 0.0
        return draws, tie, row

    def _first_of(self, part: _PartRows, pool: str) -> int:
        if pool == UNSEEN:
            while part.fresh < len(part.order) and part.order[part.fresh] in self._rows:
                part.fresh += 1
            if part.fresh < len(part.order):
                return part.order[part.fresh]
        heap = part.seen[pool]
        while not self._is_current(heap[0], pool):
            heapq.heappop(heap)
        return heap[0][2]

    def _is_current(self, entry: tuple[int, float, int], pool: str) -> bool:
        record = self._rows[entry[2]]
        return record.can_be_drawn and record.draws == entry[0] and self._pool_of(record) == pool

    def _least_drawn(self, part: _PartRows) -> int:
        """Return the least drawn row of a part whose rows are all in flight, unfit, or of weight 0."""
        new_record = _Row()

        def key(row: int) -> tuple[bool, int, int]:
            record = self._rows.get(row, new_record)
            return record.unfit, record.in_flight, record.draws

        return min(part.rows, key=key)

    @contextmanager
    def _changed(self, row: int) -> Generator[_Row]:
        """Yield a row's record for changes in the `with` block, and update the pools before and after."""
        part, record = self._parts[self._name_of(row)], self._rows.setdefault(row, _Row())
        self._count(part, record, -1)
        yield record
        self._count(part, record, 1)
        if record.can_be_drawn:
            heapq.heappush(part.seen[self._pool_of(record)], self._key(row, record.draws))

    def _count(self, part: _PartRows, known: _Row, by: int) -> None:
        pool = self._pool_of(known)
        part.sizes[pool] += by * known.can_be_drawn
        self._pooled[pool] += by * (known.reward is not None)
