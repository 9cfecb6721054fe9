"""Which model lives in which worker group, and which process of a group works on which rows.

Private to the core. Kernel and trainers work it out alike, from the run file and the dataflow, so nobody has
to be told who holds what: a rank asks the owner of a row by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stretto.algorithm import Call
from stretto.assembly.dataflow import Graph
from stretto.config import RunConfig
from stretto.engine import TrainingConfig
from stretto.errors import ConfigError, offer

__all__ = [
    "DEFAULT_GROUP",
    "Placement",
    "WorkerGroup",
    "group_of_worker",
    "model_folder",
    "sections",
    "split_rows",
]

DEFAULT_GROUP = "training"


@dataclass(frozen=True)
class WorkerGroup:
    """The ranks that host some models."""

    name: str
    """`training`, or its key below `groups`."""
    section: TrainingConfig
    models: tuple[str, ...]

    @property
    def path(self) -> str:
        """Dotted key of its section."""
        return self.name if self.name == DEFAULT_GROUP else f"groups.{self.name}"

    @property
    def workers(self) -> list[str]:
        """Ids of its processes, by rank."""
        prefix = "trainer" if self.name == DEFAULT_GROUP else f"trainer-{self.name}"
        return [f"{prefix}-{rank}" for rank in range(self.section.processes)]

    @property
    def ranks_per_part(self) -> int:
        """Ranks that work together on one part of a batch."""
        return self.section.processes // self.section.data_parallel

    def part_of(self, rank: int) -> int:
        """The part of a batch that a rank works on."""
        return rank // self.ranks_per_part

    def worker_of(self, part: int) -> str:
        """The process that answers for a part of a batch."""
        return self.workers[part * self.ranks_per_part]


class Placement:
    """The models of one run on its worker groups.

    Raises:
        ConfigError: for a model that is placed and that the algorithm does not have, an unknown group, or
            a group without a model.
    """

    def __init__(self, config: RunConfig, graph: Graph) -> None:
        self.graph = graph
        self._config = config
        known = sections(config)
        for name, model in config.models.items():
            if name not in graph.models:
                hint = offer(name, graph.models, "models of this algorithm")
                raise ConfigError(f"the algorithm has no model {name!r}{hint}", path=f"models.{name}")
            if model.group not in known:
                hint = offer(model.group, known, "groups")
                raise ConfigError(f"no worker group {model.group!r}{hint}", path=f"models.{name}.group")
        self.groups: dict[str, WorkerGroup] = {}
        """Those that host a model, by name."""
        for name, section in known.items():
            if models := tuple(model for model in graph.models if self._group_name(model) == name):
                self.groups[name] = WorkerGroup(name, section, models)
            elif name != DEFAULT_GROUP:
                raise ConfigError(
                    f"no model lives in it; place one there: `models: {{<name>: {{group: {name}}}}}`, of "
                    f"{', '.join(graph.models)}",
                    path=f"groups.{name}",
                )

    @cached_property
    def lead(self) -> WorkerGroup:
        """The group of the lead model. Pure functions run there too, on its first process."""
        return self.groups[self._group_name(self.graph.lead)]

    def group_of(self, call: Call) -> WorkerGroup:
        """Where a call after the ticket runs."""
        return self.lead if call.model is None else self.groups[self._group_name(call.model)]

    def owners(self, key: str, lengths: Sequence[int]) -> list[str]:
        """For each row of the batch, the process that holds what a call of this step wrote for it."""
        call = self.graph.writers[key]
        group = self.group_of(call)
        owners = [group.workers[0]] * len(lengths)
        if call.op != "function":
            for part, rows in enumerate(split_rows(lengths, group.section.data_parallel)):
                for row in rows:
                    owners[row] = group.worker_of(part)
        return owners

    def _group_name(self, model: str) -> str:
        placed = self._config.models.get(model)
        return DEFAULT_GROUP if placed is None else placed.group


def sections(config: RunConfig) -> dict[str, TrainingConfig]:
    """The sections of all worker groups by name, hosts of a model or not."""
    fields = config.groups.__struct_fields__
    return {DEFAULT_GROUP: config.training, **{name: getattr(config.groups, name) for name in fields}}


def group_of_worker(worker: str) -> tuple[str, int]:
    """Name of a trainer's worker group, and its rank there."""
    prefix, _, rank = worker.rpartition("-")
    return prefix.removeprefix("trainer").removeprefix("-") or DEFAULT_GROUP, int(rank)


def model_folder(checkpoint: Path, model: str, graph: Graph) -> Path:
    """Where a model's part of a checkpoint lies: the lead model's at the top."""
    return checkpoint if model == graph.lead else checkpoint / "models" / model


def split_rows(weights: Sequence[int], parts: int, units: Iterable[int] | None = None) -> list[list[int]]:
    """Indices 0 .. len(weights) - 1 in so many parts of about equal weight, each in ascending order: the
    heaviest unit first, to the lightest part so far. The same everywhere for the same arguments.

    Args:
        units: for each index the number of what must stay together; by default each index is by itself.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    together: dict[int, list[int]] = {}
    for index, unit in enumerate(range(len(weights)) if units is None else units):
        together.setdefault(unit, []).append(index)
    total = {unit: sum(weights[index] for index in indices) for unit, indices in together.items()}
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0)] * parts
    for unit in sorted(together, key=lambda unit: (-total[unit], together[unit][0])):
        lightest = loads.index(min(loads))
        shares[lightest] += together[unit]
        weight, count = loads[lightest]
        loads[lightest] = (weight + total[unit], count + len(together[unit]))
    return [sorted(indices) for indices in shares]
