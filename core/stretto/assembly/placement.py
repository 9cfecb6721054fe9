"""The placement of models in worker groups, and of a batch's rows on the processes of a group.

Private to the core. Kernel and trainers compute the same placement, so no message carries it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stretto.algorithm import Call
from stretto.assembly.dataflow import Graph
from stretto.config import RunConfig
from stretto.engine import TrainingConfig
from stretto.errors import ConfigError, offer
from stretto.launcher import worker_group

DEFAULT_GROUP = "training"

_UNEVEN = 1.25
"""Groups stay whole if the heaviest part then has at most this multiple of the mean weight. Above it, the
other ranks would wait longer for that part than a group's shared prompt saves."""


@dataclass(frozen=True)
class WorkerGroup:
    """The ranks that host some models."""

    name: str
    """`training`, or the group's key below `groups`."""
    section: TrainingConfig
    models: tuple[str, ...]

    @property
    def path(self) -> str:
        """Dotted key of the group's section."""
        return self.name if self.name == DEFAULT_GROUP else f"groups.{self.name}"

    @property
    def workers(self) -> list[str]:
        """Ids of the group's processes, by rank."""
        prefix = "trainer" if self.name == DEFAULT_GROUP else f"trainer-{self.name}"
        return [f"{prefix}-{rank}" for rank in range(self.section.processes)]

    @property
    def ranks_per_part(self) -> int:
        """Ranks that work together on one part of a batch."""
        return self.section.processes // self.section.data_parallel

    def unit_of(self, rank: int) -> str:
        """Return the name of the ranks that must run on one machine with this rank; empty if none must."""
        together = self.section.ranks_together
        return f"{self.name} {rank // together}" if together > 1 else ""

    def part_of(self, rank: int) -> int:
        """Return the part of a batch that a rank works on."""
        return rank // self.ranks_per_part

    def worker_of(self, part: int) -> str:
        """Return the worker that sends out the columns of a part of a batch: the part's first rank."""
        return self.workers[part * self.ranks_per_part]


class Placement:
    """The models of one run on its worker groups."""

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
        for name, section in known.items():
            if models := tuple(model for model in graph.models if self._group_name(model) == name):
                self.groups[name] = WorkerGroup(name, section, models)
            elif name != DEFAULT_GROUP:
                raise ConfigError(
                    f"no model is in this group; place one with `models: {{<name>: {{group: {name}}}}}`; "
                    f"models: {', '.join(graph.models)}",
                    path=f"groups.{name}",
                )

    @cached_property
    def lead(self) -> WorkerGroup:
        """The group of the lead model. Pure functions run there too, on its first process."""
        return self.groups[self._group_name(self.graph.lead)]

    def group_of(self, call: Call) -> WorkerGroup:
        """Return the worker group that runs a call of a train step."""
        return self.lead if call.model is None else self.groups[self._group_name(call.model)]

    def owners(self, key: str, lengths: Sequence[int], groups: Sequence[int]) -> list[str]:
        """Return, for each row, the worker that holds the value that a call of this step wrote to `key`."""
        call = self.graph.writers[key]
        group = self.group_of(call)
        owners = [group.workers[0]] * len(lengths)
        if call.op != "function":
            for part, rows in enumerate(split_groups(lengths, group.section.data_parallel, groups)):
                for row in rows:
                    owners[row] = group.worker_of(part)
        return owners

    def lack_of_rows(self, call: Call, groups: int, adjective: str = "") -> str:
        """Return why some data-parallel rank gets no rows of a call for so many groups; empty if each does.
        `adjective`: a word for the rows, with a space."""
        by_group, group = _keeps_groups(call), self.group_of(call)
        units = groups if by_group else groups * self.graph.source.samples
        if call.op == "function" or units >= (parts := group.section.data_parallel):
            return ""
        noun = f"{adjective}{'groups' if by_group else 'sequences'}"
        return (
            f"call {call.name!r} has {units} {noun} for the {parts} data-parallel ranks of {group.path!r}; "
            "expected at least one for each rank"
        )

    def _group_name(self, model: str) -> str:
        settings = self._config.models.get(model)
        return DEFAULT_GROUP if settings is None else settings.group


def sections(config: RunConfig) -> dict[str, TrainingConfig]:
    """Return the sections of all worker groups by name, also of groups without a model."""
    fields = config.groups.__struct_fields__
    return {DEFAULT_GROUP: config.training, **{name: getattr(config.groups, name) for name in fields}}


def group_of_worker(worker: str) -> tuple[str, int]:
    """Return the name of a trainer's worker group, and the trainer's rank in it."""
    return worker_group(worker), int(worker.rpartition("-")[2])


def model_folder(checkpoint: Path, model: str, graph: Graph) -> Path:
    """Return the folder of a model in a checkpoint; the lead model is at the top."""
    return checkpoint if model == graph.lead else checkpoint / "models" / model


def split_rows(weights: Sequence[int], parts: int, units: Iterable[int] | None = None) -> list[list[int]]:
    """Split indices 0 .. len(weights) - 1 into `parts` lists of about equal weight, each in ascending order.

    Each unit, heaviest first, is added to the part that is lightest so far. Every process computes the same
    result. `units` has the number of each index's unit. A unit stays in one part; default: each index is one.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(range(len(weights)) if units is None else units):
        members.setdefault(unit, []).append(index)
    unit_weights = {unit: sum(weights[index] for index in indices) for unit, indices in members.items()}
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0)] * parts
    for unit in sorted(members, key=lambda unit: (-unit_weights[unit], members[unit][0])):
        lightest = loads.index(min(loads))
        shares[lightest] += members[unit]
        weight, count = loads[lightest]
        loads[lightest] = (weight + unit_weights[unit], count + len(members[unit]))
    return [sorted(indices) for indices in shares]


def split_call(call: Call, weights: Sequence[int], parts: int, groups: Sequence[int]) -> list[list[int]]:
    """Split the rows of a call. Groups stay together if the call's loss must get them whole, or as
    `split_groups` does."""
    return (split_rows if _keeps_groups(call) else split_groups)(weights, parts, groups)


def _keeps_groups(call: Call) -> bool:
    return call.loss is not None and call.loss.unit == "group"


def split_groups(weights: Sequence[int], parts: int, groups: Sequence[int]) -> list[list[int]]:
    """Split like `split_rows`. Keep each group, which shares a prompt, in one part if parts stay even."""
    by_group = split_rows(weights, parts, groups)
    heaviest = max(sum(weights[index] for index in indices) for indices in by_group)
    is_even = all(by_group) and heaviest * parts <= _UNEVEN * sum(weights)
    return by_group if is_even else split_rows(weights, parts)
