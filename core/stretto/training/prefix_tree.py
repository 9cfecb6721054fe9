"""(torch) Sequences as a tree, in which tokens that several sequences begin with occur once.

A causal model computes the same hidden states for a group's prompt, or earlier turns, in every sequence. So
each token attends to its ancestors and to itself; the gradients of all sequences add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stretto.rl.batch import Batch

__all__ = [
    "BIAS_BYTES",
    "AttentionBlock",
    "AttentionPlan",
    "PrefixTree",
    "VarlenBounds",
    "common_length",
    "reads",
    "split_batch",
]

# T tokens of S sequences, U nodes of their tree. Q queries and K keys of a block.

Integers = NDArray[np.int64]

BIAS_BYTES = 1 << 26
"""Bytes of all biases of a row, at most."""
_CALL_PRODUCTS = 160_000
"""Fixed cost of an attention call on a CPU, in multiplications. Blocks are joined if that costs less."""


@dataclass(frozen=True)
class AttentionBlock:
    """Consecutive nodes whose attention is computed in one call."""

    queries: int
    keys: int
    """Number of nodes that the queries read, K: the ancestors of the first node, then the block's nodes."""
    bias: Tensor | None
    """(Q, K) float32: 0 where a query reads a key, else -inf. None for a chain, which is causal: the last
    query reads all keys. Only a varlen call computes a chain with ancestors."""
    tree: Tensor | None = None
    """(2, K) int64: the nodes that are keys, and the node after the subtree of each. Set where the row's
    biases would take more than `BIAS_BYTES`: they grow with the square of the length."""


class VarlenBounds(NamedTuple):
    """The bounds of B blocks, for `torch.nn.attention.varlen`. `queries`, (B + 1,) int32: the first query of
    each block, then the number of queries; `keys`: the same of keys."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, blocks: Sequence[AttentionBlock], device: torch.device) -> VarlenBounds:
        """Return the bounds of a row's blocks, on the device."""
        counts = torch.tensor([[block.queries for block in blocks], [block.keys for block in blocks]])
        bounds = F.pad(counts.cumsum(1, dtype=torch.int32), (1, 0)).to(device)
        return cls(bounds[0], bounds[1], *counts.amax(1).tolist())


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of attention for a row of tokens."""

    blocks: list[AttentionBlock]
    """The blocks in the order of the row; together they cover the row."""
    keys: Tensor | None
    """int64, the nodes that the blocks read, block after block. None if each block reads its own nodes."""
    varlen: VarlenBounds | None = None
    """Set if all blocks are chains, which one varlen call computes. None: a call for each block."""


class PrefixTree:
    """The tree of sequences, of which at least one is not empty. Nodes are tokens in depth-first order, so a
    subtree is a slice."""

    def __init__(self, sequences: Sequence[Integers]) -> None:
        self.nodes: list[Integers] = [np.empty(0, np.int64)] * len(sequences)
        """For each sequence the nodes of its tokens."""
        self._branches: list[_Branch] = []
        tokens: list[Integers] = []
        ended: list[Integers] = []
        previous, path, total = np.empty(0, np.int64), np.empty(0, np.int64), 0
        # In the order of their bytes, sequences that begin with the same tokens follow each other.
        for number in sorted(range(len(sequences)), key=lambda number: sequences[number].tobytes()):
            sequence = sequences[number]
            shared = common_length(previous, sequence)
            if shared < len(sequence):
                ended.append(path[shared:])  # no later node is below these
                self._branches.append(_Branch(total, len(sequence) - shared, path[:shared]))
                tokens.append(sequence[shared:])
                new = np.arange(total, total + len(sequence) - shared)
                previous, path, total = sequence, np.concatenate([path[:shared], new]), total + len(new)
            self.nodes[number] = path[: len(sequence)]
        self.tokens: Integers = np.concatenate(tokens)
        """(U,) the token of each node."""
        self.depths: Integers = np.concatenate([branch.depths() for branch in self._branches])
        """(U,) the position of each node in its sequences."""
        self._ends = np.full(total, total)  # (U,) the node after each node's subtree
        for branch, nodes in zip(self._branches, ended, strict=True):
            self._ends[nodes] = branch.start

    def plan(self, width: int, device: torch.device, *, varlen: bool = False) -> AttentionPlan:
        """Divide the nodes into blocks; join branches where that is faster. `width`: channels of all
        heads. With `varlen`, each branch is a block, for one varlen call."""
        blocks: list[AttentionBlock] = []
        keys: list[Integers] = []
        room = BIAS_BYTES
        # If a call costs nothing, branches stay separate: a joined block has more pairs.
        for branches in self._join_branches(0 if varlen else _CALL_PRODUCTS // width):
            nodes = np.arange(branches[0].start, branches[-1].start + branches[-1].size)
            keys.append(np.concatenate([branches[0].before, nodes]))
            bias = tree = None
            size = 4 * len(nodes) * len(keys[-1])
            if not varlen and (len(branches) > 1 or len(branches[0].before)):
                if size <= room:
                    bias = torch.from_numpy(self._bias(nodes, keys[-1])).to(device)
                    room -= size
                else:
                    tree = torch.from_numpy(np.stack([keys[-1], self._ends[keys[-1]]])).to(device)
            blocks.append(AttentionBlock(len(nodes), len(keys[-1]), bias, tree))
        own_only = sum(map(len, keys)) == len(self.tokens)
        nodes_read = None if own_only else torch.from_numpy(np.concatenate(keys)).to(device)
        return AttentionPlan(blocks, nodes_read, VarlenBounds.of(blocks, device) if varlen else None)

    def _bias(self, queries: Integers, keys: Integers) -> NDArray[np.float32]:
        """Return (Q, K): 0 where the key is the query or its ancestor, else -inf."""
        return np.where(reads(queries, keys, self._ends[keys]), np.float32(0), np.float32(-np.inf))

    def _join_branches(self, call_pairs: int) -> Iterator[list[_Branch]]:
        """Yield the branches of each block. `call_pairs`: cost of a call, in pairs of query and key."""
        branches: list[_Branch] = []
        queries = 0
        for branch in self._branches:
            if branches:
                ancestors, size = len(branches[0].before), queries + branch.size
                separate = queries * (ancestors + queries) + branch.size * (len(branch.before) + branch.size)
                if size * (ancestors + size) > separate + call_pairs:
                    yield branches
                    branches, queries = [], 0
            branches.append(branch)
            queries += branch.size
        yield branches


def reads(queries: Any, keys: Any, ends: Any) -> Any:
    """Return (Q, K) bool: whether the key is the query or its ancestor. `ends`: the node after the subtree of
    each key. Arrays, or tensors."""
    return (keys <= queries[:, None]) & (queries[:, None] < ends)


@dataclass(frozen=True)
class _Branch:
    """The chain of nodes that one sequence adds to the tree."""

    start: int
    size: int
    before: Integers  # the ancestors of the first node

    def depths(self) -> Integers:
        return np.arange(len(self.before), len(self.before) + self.size)


def common_length(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> int:
    """Return the number of tokens with which both texts begin."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def split_batch(batch: Batch, max_nodes: int, *, whole_groups: bool) -> list[Batch]:
    """Split into consecutive batches whose trees have at most `max_nodes` nodes each, or one sequence.
    Consecutive sequences of a `group` stay together if their tree fits; with `whole_groups`, always."""
    if batch.num_tokens <= max_nodes:
        return [batch]
    sequences = np.split(batch["tokens"].numpy(), np.cumsum(batch.lengths)[:-1])
    counts = [count for count, _ in batch.groups()] if "group" in batch else [1] * len(batch)
    sizes: list[int] = []
    tree = _GrowingTree()
    for numbers in np.split(np.arange(len(batch)), np.cumsum(counts)[:-1]):
        group = [sequences[number] for number in numbers]
        tokens = sum(map(len, group))
        fits = whole_groups or tokens <= max_nodes or _GrowingTree().add(group) <= max_nodes
        for part in [group] if fits else [[sequence] for sequence in group]:
            if not sizes or tree.add(part) > max_nodes:
                sizes.append(0)
                tree = _GrowingTree()
                tree.add(part)
            sizes[-1] += len(part)
    return batch.split(sizes)


class _GrowingTree:
    def __init__(self) -> None:
        self._size = 0
        self._sequences: list[tuple[bytes, Integers]] = []  # in the order of their bytes

    def add(self, sequences: Sequence[Integers]) -> int:
        for sequence in sequences:
            entry = sequence.tobytes()
            place = bisect_left(self._sequences, entry, key=itemgetter(0))
            # No sequence has more tokens in common with this one than its neighbours in the order.
            neighbours = self._sequences[max(0, place - 1) : place + 1]
            shared = max((common_length(neighbour, sequence) for _, neighbour in neighbours), default=0)
            self._size += len(sequence) - shared
            self._sequences.insert(place, (entry, sequence))
        return self._size
