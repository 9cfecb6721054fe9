"""Which row has which block of the pool.

A row has a block of the smallest capacity that holds it and moves to a larger one when that is full. Rows
of one capacity stand on a shelf: side by side in the pool and in the step, so that attention reads them as
one tensor. From the beginning of the pool stand the shelves of all capacities but the largest, longer ones
first; each divides those before it, so that blocks keep their places when a shelf before them grows or
shrinks by one, but for a few at the ends. The shelf of the largest, which is the slot's own length and may
be divided by none, stands at the end of the pool. What is between the two is free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from stretto_torch.kv import Block
from stretto_torch.shapes import Shapes

_CAPACITIES = (128, 512, 2048, 8192, 32768, 131072)
# Below so many rows a second call of attention costs more than it saves. Two numbers, so that a few rows
# more or less do not have all of them moved to and fro.
_FEWEST_TO_SPLIT = 16
_MOST_TO_JOIN = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Where rows shall stand."""

    order: list[int]
    """The row of now of each row to be."""
    blocks: list[Block]
    """Of each row to be; perhaps of some rows of padding after them."""
    shelves: list[tuple[int, int]]
    """Rows start..stop-1 whose blocks lie side by side and are of one capacity; in order, of all rows."""
    free: tuple[int, int]
    """Tokens start..stop-1 of the pool are in no block."""


class SizeClasses:
    """Plans for a pool of so many tokens.

    Args:
        shapes: the engine's.
        tokens: size of the pool.
        together: whether all rows of a step must stand on one shelf, those of its padding too.
    """

    def __init__(self, shapes: Shapes, tokens: int, *, together: bool) -> None:
        self._shapes = shapes
        self._tokens = tokens
        self._longest = shapes.length
        self._capacities = [*(c for c in _CAPACITIES if c < self._longest), self._longest]
        self._together = together or shapes.fixed
        self._split = False
        self._roomy = shapes.most_rows * self._longest <= tokens

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether the pool has room for rows of so many tokens, in any number up to the engine's slots."""
        if self._roomy or not needs:
            return True
        taken = self._joined(needs) if self._together else sum(map(self._capacity, needs))
        return taken <= self._tokens

    def plan(self, needs: Sequence[int], blocks: Sequence[Block | None]) -> Plan:
        """Order the rows and give each a block with room for so many tokens. What is there stays where it is
        if it can.

        Args:
            needs: of each row; all together must fit.
            blocks: that each row has now, if any.
        """
        by_capacity: dict[int, list[int]] = {}
        if self._splits(needs):
            for row, need in enumerate(needs):
                by_capacity.setdefault(self._capacity(need), []).append(row)
        elif needs:
            by_capacity[self._common(needs)] = [*range(len(needs))]
        order: list[int] = []
        placed: list[Block] = []
        shelves: list[tuple[int, int]] = []
        left, right = 0, self._tokens
        for capacity in sorted(by_capacity, reverse=True):
            rows = by_capacity[capacity]
            count = self._shapes.rows(len(needs)) if self._together else len(rows)
            if capacity == self._longest:
                start = right = self._tokens - count * capacity
            else:
                start, left = left, left + count * capacity
            shelf = [Block(start + i * capacity, capacity) for i in range(count)]
            shelves.append((len(order), len(order) + len(rows)))
            order += _in_place(rows, blocks, shelf)
            placed += shelf
        return Plan(order, placed, shelves, (left, right))

    def _splits(self, needs: Sequence[int]) -> bool:
        if self._together:
            return False
        live = len(needs)
        self._split = live >= _FEWEST_TO_SPLIT or (self._split and live > _MOST_TO_JOIN)
        return self._split or (not self._roomy and self._joined(needs) > self._tokens)

    def _joined(self, needs: Sequence[int]) -> int:
        """Tokens that rows on one shelf take."""
        rows = self._shapes.rows(len(needs)) if self._together else len(needs)
        return rows * self._common(needs)

    def _common(self, needs: Sequence[int]) -> int:
        return self._longest if self._shapes.fixed else self._capacity(max(needs, default=1))

    def _capacity(self, need: int) -> int:
        return self._capacities[bisect_left(self._capacities, need)]


def _in_place(rows: list[int], blocks: Sequence[Block | None], shelf: list[Block]) -> list[int]:
    """Rows of one shelf in an order that leaves those where they are that stand on it already."""
    at = {blocks[row]: row for row in rows}
    order = [at.get(block, -1) for block in shelf[: len(rows)]]
    stay = set(order)
    others = (row for row in rows if row not in stay)
    return [row if row >= 0 else next(others) for row in order]
