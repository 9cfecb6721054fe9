"""The allocator of the cache: it assigns a block of the pool to each row.

A row has a block of the smallest capacity that is enough, or of the next one if few rows have that capacity.
Rows of one capacity form a size class, adjacent in the pool and in the step: attention reads them as one
tensor. The class of the largest capacity, a whole slot, is at the end of the pool. The others are at the
start, larger capacities first. Each of their capacities divides those before it, so most blocks keep their
positions when a class before them changes by one block. The space between is free.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto_torch.kv import Block
from stretto_torch.shapes import Shapes

_CAPACITIES = (32, 64, 128, 512, 2048, 8192, 32768, 131072)
# One more call of attention costs as much as reading about this number of positions (measured with models of
# 0.2 M and 10 M parameters).
_CHEAP = 768


@dataclass(frozen=True, slots=True)
class Plan:
    """A new order of the rows, and their blocks."""

    order: list[int]  # for each new row, its current row
    blocks: list[Block]  # the block of each new row, possibly followed by blocks of padding rows
    size_classes: list[tuple[int, int]]
    """Rows start..stop-1 of each size class, in order. The blocks of a class are adjacent."""
    free: tuple[int, int]  # tokens start..stop-1 of the pool, which are in no block


class SizeClasses:
    """Plans the blocks of a pool. `one_size_class`: all rows of a step, padding too, must be in one class;
    `prefers_one`: they are if the pool has room for that."""

    def __init__(
        self, shapes: Shapes, tokens: int, *, one_size_class: bool, prefers_one: bool = False
    ) -> None:
        self._shapes = shapes
        self._tokens = tokens
        self._longest = shapes.length
        self._capacities = [
            *(capacity for capacity in _CAPACITIES if capacity < self._longest),
            self._longest,
        ]
        self._one_size_class = one_size_class or shapes.full
        self._prefers_one = prefers_one
        self._holds_all_rows = shapes.most_rows * self._longest <= tokens

    def fits(self, needs: Sequence[int]) -> bool:
        """Return True if the pool has room for rows of these numbers of tokens, at most `slots` rows."""
        if self._holds_all_rows or not needs:
            return True
        if self._one_size_class:
            return self._fits_one(needs)
        return sum(map(self._capacity, needs)) <= self._tokens

    def plan(self, needs: Sequence[int], blocks: Sequence[Block | None]) -> Plan:
        """Order the rows and assign a large enough block to each, its old one if possible. All must fit."""
        by_capacity: dict[int, list[int]] = {}
        one_size_class = self._one_size_class or (self._prefers_one and self._fits_one(needs))
        if one_size_class and needs:
            by_capacity[self._common(needs)] = [*range(len(needs))]
        else:
            for row, need in enumerate(needs):
                by_capacity.setdefault(self._capacity(need), []).append(row)
            self._join_small(by_capacity)
        order: list[int] = []
        row_blocks: list[Block] = []
        size_classes: list[tuple[int, int]] = []
        left, right = 0, self._tokens
        for capacity in sorted(by_capacity, reverse=True):
            rows = by_capacity[capacity]
            count = self._shapes.rows(len(needs)) if one_size_class else len(rows)
            if capacity == self._longest:
                start = right = self._tokens - count * capacity
            else:
                start, left = left, left + count * capacity
            new_blocks = [Block(start + i * capacity, capacity) for i in range(count)]
            size_classes.append((len(order), len(order) + len(rows)))
            order += _keep_in_place(rows, blocks, new_blocks)
            row_blocks += new_blocks
        return Plan(order, row_blocks, size_classes, (left, right))

    def _join_small(self, by_capacity: dict[int, list[int]]) -> None:
        """Join a class to the next larger one where that costs less than another call of attention."""
        room = self._tokens - sum(capacity * len(rows) for capacity, rows in by_capacity.items())
        for capacity, larger in pairwise(sorted(by_capacity)):
            cost = (larger - capacity) * len(by_capacity[capacity])
            if cost <= min(_CHEAP, room):
                by_capacity[larger] += by_capacity.pop(capacity)
                room -= cost

    def _fits_one(self, needs: Sequence[int]) -> bool:
        """Return True if the pool has room for all rows, padding too, in one class."""
        return self._shapes.rows(len(needs)) * self._common(needs) <= self._tokens

    def _common(self, needs: Sequence[int]) -> int:
        return self._longest if self._shapes.full else self._capacity(max(needs, default=1))

    def _capacity(self, need: int) -> int:
        return self._capacities[bisect_left(self._capacities, need)]


def _keep_in_place(rows: list[int], blocks: Sequence[Block | None], new_blocks: Sequence[Block]) -> list[int]:
    """Order the rows of one size class so that a row that has one of `new_blocks` already keeps it."""
    row_of_block = {blocks[row]: row for row in rows}
    order = [row_of_block.get(block, -1) for block in new_blocks[: len(rows)]]
    in_place = set(order)
    rest = (row for row in rows if row not in in_place)
    return [row if row >= 0 else next(rest) for row in order]
