"""An algorithm's calls as a graph: infer the edges from keys, check them, and order the calls. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from stretto.algorithm import Call, Model, Reduction
from stretto.errors import ConfigError, nearest, offer

# Keys that a call may read although no call writes them.
INPUT_KEYS = ("prompt",)
# Calls that are complete before a batch is formed: rollout workers run them, or they only read rows.
SOURCE_OPS = ("generate", "score", "read")


@dataclass(frozen=True)
class Graph:
    """A checked dataflow."""

    calls: tuple[Call, ...]
    """In the algorithm's order, except where an edge requires another order."""
    edges: frozenset[tuple[str, str]]
    """(earlier call, later call)."""
    models: Mapping[str, Model]

    @property
    def step_calls(self) -> tuple[Call, ...]:
        """The calls that the kernel dispatches to worker groups after it has formed a batch."""
        return tuple(call for call in self.calls if call.op not in SOURCE_OPS)

    @property
    def source(self) -> Call:
        """The call that produces the sequences: `generate`, or `read`."""
        return next(call for call in self.calls if call.op in ("generate", "read"))

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples its sequences, rather than reading them from the dataset."""
        return self.source.op == "generate"

    @property
    def scores(self) -> bool:
        """Whether the algorithm needs a reward."""
        return any(call.op == "score" for call in self.calls)

    @cached_property
    def lead(self) -> str:
        """The name of the lead model: the model that samples, or without sampling the first trained model."""
        first_trained = next(call.model for call in self.calls if call.op == "train")
        lead = self.source.model if self.samples else first_trained
        assert lead is not None
        return lead

    @cached_property
    def writers(self) -> Mapping[str, Call]:
        """Key -> the call that writes it."""
        return {key: call for call in self.calls for key in call.writes}

    def before(self, call: Call) -> list[str]:
        """Return the names of the calls that a call waits for."""
        return sorted(earlier for earlier, later in self.edges if later == call.name)

    def levels(self) -> list[list[Call]]:
        """Return the calls in levels, by the longest path to a call. Calls of a level are independent."""
        depth: dict[str, int] = {}
        for call in self.calls:
            depth[call.name] = max((depth[earlier] for earlier in self.before(call)), default=-1) + 1
        return [
            [call for call in self.calls if depth[call.name] == level]
            for level in range(max(depth.values(), default=-1) + 1)
        ]

    def text(self) -> str:
        """Return the dataflow for a terminal: each call's level, the calls it waits for, and its keys."""
        lines: list[str] = []
        width = max(len(call.name) for call in self.calls)
        for number, level in enumerate(self.levels(), 1):
            for call in level:
                after = ", ".join(self.before(call)) or "nothing"
                lines.append(f"{number}  {call.name:{width}}  after {after}")
                lines.append(f"   {'':{width}}  {', '.join(call.reads)} -> {', '.join(call.writes) or '-'}")
        return "\n".join(lines)

    def mermaid(self) -> str:
        """Return the dataflow as a Mermaid flowchart. An arrow's label names the keys that the call reads."""
        node = {call.name: f"c{index}" for index, call in enumerate(self.calls)}
        lines = ["flowchart LR", "  prompt([prompt])"]
        lines += [f'  {node[call.name]}["{call.name}"]' for call in self.calls]
        for call in self.calls:
            keys: dict[str, list[str]] = {}
            for key in call.reads:
                source = "prompt" if key in INPUT_KEYS else node[self.writers[key].name]
                keys.setdefault(source, []).append(key)
            lines += [
                f'  {source} -- "{", ".join(names)}" --> {node[call.name]}' for source, names in keys.items()
            ]
            lines += [
                f"  {node[earlier]} -.-> {node[call.name]}"
                for earlier in self.before(call)
                if node[earlier] not in keys
            ]
        return "\n".join(lines)


def graph_of(calls: Sequence[Call], models: Mapping[str, Model]) -> Graph:
    """Infer the edges, refuse a dataflow that cannot run, and order the calls."""
    by_name: dict[str, Call] = {}
    for call in calls:
        if call.name in by_name:
            raise _error(f"two calls are named {call.name!r}; give one of them another name")
        by_name[call.name] = call
        _check_model(call, models)
        _check_loss(call)
    if not any(call.op == "train" for call in calls):
        raise _error("no call trains a model; expected a `train` call")
    if len(sources := [call.name for call in calls if call.op in ("generate", "read")]) != 1:
        names = ", ".join(sources) or "none"
        raise _error(f"exactly one call must produce sequences, `generate` or `read`; found {names}")
    if {"generate", "score"} & {call.op for call in calls} not in ({"generate", "score"}, set()):
        raise _error("sampled answers need scores: expected both `generate` and `score`, or neither")
    writers = _writers(calls)
    edges = {(writers[key], call.name) for call in calls for key in call.reads if key not in INPUT_KEYS}
    edges |= set(_weights_edges(calls))
    return Graph(_sort_calls(calls, edges), frozenset(edges), dict(models))


def _check_model(call: Call, models: Mapping[str, Model]) -> None:
    if call.model is None:
        return
    if call.model not in models:
        known = ", ".join(models) or "none"
        raise _error(
            f"call {call.name!r} runs on the unknown model {call.model!r}"
            f"{nearest(call.model, models)}; models: {known}"
        )
    if call.op == "train" and not models[call.model].trainable:
        raise _error(f"call {call.name!r} trains the model {call.model!r}, which is not trainable")


def _check_loss(call: Call) -> None:
    known: tuple[Reduction, ...] = get_args(Reduction)
    if call.loss is not None and call.loss.reduction not in known:
        hint = offer(call.loss.reduction, known, "reductions")
        raise _error(
            f"the loss of call {call.name!r} has the unknown reduction {call.loss.reduction!r}{hint}"
        )


def _writers(calls: Sequence[Call]) -> dict[str, str]:
    writers: dict[str, str] = {}
    for call in calls:
        for key in call.writes:
            if key in writers:
                raise _error(f"two calls write the key {key!r}: {writers[key]!r} and {call.name!r}")
            writers[key] = call.name
    for call in calls:
        for key in call.reads:
            if key not in writers and key not in INPUT_KEYS:
                raise _error(f"call {call.name!r} reads {key!r}, which no call writes{nearest(key, writers)}")
    return writers


def _weights_edges(calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """Yield edges from a model's other calls to its train call: they need the weights before the step."""
    for train_call in calls:
        if train_call.op == "train":
            for call in calls:
                if call.model == train_call.model and call.op != "train":
                    yield call.name, train_call.name


def _sort_calls(calls: Sequence[Call], edges: set[tuple[str, str]]) -> tuple[Call, ...]:
    order: list[Call] = []
    waiting = list(calls)
    while waiting:
        blocked = {later for earlier, later in edges if any(call.name == earlier for call in waiting)}
        free = next((call for call in waiting if call.name not in blocked), None)
        if free is None:
            names = ", ".join(call.name for call in waiting)
            raise _error(f"the calls {names} wait for each other in a cycle")
        order.append(free)
        waiting.remove(free)
    return tuple(order)


def _error(message: str) -> ConfigError:
    return ConfigError(f"algorithm: {message}", path="algorithm")
