"""Components, which plugins offer, and the context that stretto passes to a component's factory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = [
    "Component",
    "ComponentParts",
    "Context",
    "Head",
    "Importable",
    "Kind",
    "Known",
    "LocalPath",
    "ModelSource",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Problem",
    "SandboxMode",
    "Share",
]

Kind = Literal[
    "algorithm",
    "training",
    "inference",
    "workflow",
    "reward",
    "dataset",
    "launcher",
    "weights",
    "tracker",
]

Head = Literal["policy", "value", "reward"]
"""The output of a model for each token, (T,) float32, in `forward` and in a loss:
`policy`: the logprob of the token; 0 at the first token of a sequence;
`value`: the value of the state before the token, that is, after all earlier tokens; 0 at the first token;
`reward`: the score of the text up to and including the token."""
SandboxMode = Literal["bubblewrap", "unsafe"]
"""How commands of users and agents run: in bubblewrap, or without a sandbox."""

# Field types for config structs. Their bounds appear in the JSON schema and in error messages.
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
# A file or folder that must exist. stretto looks it up in the working directory, then beside the run file.
# The config that a component receives contains the absolute path.
LocalPath = Annotated[str, msgspec.Meta(extra={"stretto": "local_path"})]
# A model: a folder, which is looked up in the same way, or a hub id.
ModelSource = Annotated[str, msgspec.Meta(extra={"stretto": "model"})]
# `path.py:name` or `module:name`. A path is looked up and made absolute like a `LocalPath`.
Importable = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[\s\S]+:\w+$(?!\n)",
        description="`file.py:function` or `module:function`",
        extra={"stretto": "importable"},
    ),
]

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


class ComponentParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The type of a section's key `parts`: components that a component is made of, each under its own name.
    Each part has the kind of the section and is written like such a section. The component's factory gets the
    objects of the parts, by name, as its third argument."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the run that a component may need."""

    run: str
    """Id of the run, unique on its bus."""
    name: str
    """The run's `name`, as the user wrote it."""
    seed: int
    """The run's seed."""
    model: str | None = None
    """Local folder or hub id of the initial model; None when the engines need none. A training engine
    receives the source of its own model."""
    head: Head = "policy"
    """For a training engine: the output of its model for each token."""
    trainable: bool = True
    """For a training engine: whether the run trains its model, or only calls `forward`."""
    rank: int = 0
    """For a training engine: rank of its process in the worker group, below `config.processes`."""
    rendezvous: str = ""
    """For a training engine in a group of several processes: how the processes find each other. Either the
    path of a file that all of them see, or `tcp://HOST:PORT`, where rank 0 listens. Each start of the group
    has a new value. The engines in one process share its process group."""
    folder: str = ""
    """The run's folder; empty in a process that has no access to it."""
    sandbox: SandboxMode = "bubblewrap"
    """How to run commands of users and agents (see `stretto.user_code.sandbox`)."""
    worker: str = "kernel"
    """Id of the worker that the component lives in, or `kernel`."""
    samples_in_flight: int = 0
    """For an inference engine: maximum number of training samples that it has at once, its share of the
    samples that `queue.max_staleness` admits; 0 if it serves no training."""

    def path(self, *parts: str) -> Path:
        """Return a path inside the run's folder."""
        return Path(self.folder, *parts)


class Known(NamedTuple):
    """What is known of a run when the null keys of a section become numbers (`default_values`)."""

    run: RunConfig
    memory: Callable[[Any], float]
    """Section of a role (`Resources`) -> bytes of its device that a process of it may use; infinite if not
    known. Asking a GPU's driver takes seconds."""
    samples_in_flight: Callable[[], int]
    """Returns the maximum number of samples that one inference engine has at the same time; 0: not known."""
    dtype: str
    """dtype of the run's trainers and engines."""
    why: str
    """The reason for `dtype`."""


Defaults = Mapping[str, tuple[object, str]]
"""Key -> (value, the reason)."""


@dataclass(frozen=True)
class Problem:
    """One problem of a composed run.

    A `warning` is printed. An `error` refuses the run. `environment` is an error of this machine, not of the
    run file: `stretto check` only warns about it, so that a user can check a file on any machine."""

    path: str
    """Dotted path of the key in the run file."""
    message: str
    """What is wrong, what stretto expected, and what to do."""
    severity: Literal["error", "environment", "warning"] = "error"


@dataclass(frozen=True)
class Component(Generic[ConfigT]):
    """One named implementation of a kind, such as a reward, that a plugin offers."""

    name: str
    """The name that users write after `use:`; equal to the name of the entry point."""
    factory: Callable[..., Any] | str
    """`factory(config, context)` makes the object that implements the contract of the kind, and
    `factory(config, context, parts)` does if the section has `parts` (see `ComponentParts`). Import large
    libraries here, or give the factory's name, as in `"acme.engine:AcmeEngine"`: its module is then imported
    when the object is made. `stretto check` makes the object too, in a separate process and with an empty
    `Context.folder`, so side effects, such as opening a connection or a file, belong in the object's
    methods."""
    config: type[ConfigT]
    """Struct of the component's section: a subclass of the kind's base, such as `RewardConfig`."""
    summary: str
    """One line for `stretto plugins`."""
    check: Callable[[ConfigT, RunConfig], Iterable[Problem]] | None = None
    """Finds problems that types cannot express, before the run starts a worker. May read other sections."""
    check_row: Callable[[ConfigT, Mapping[str, Any]], str] | None = None
    """For a reward or a workflow: returns what is wrong with the columns of a row (all but `prompt`), or an
    empty text. `stretto check` calls it for rows of the dataset, in a separate process that has not made the
    component."""
    requires: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules that the factory imports, each with the package to install: `{"torch": "stretto[torch]"}`."""
    imports: Callable[[ConfigT, RunConfig], Iterable[str]] | None = None
    """Names modules that take long to import and that the factory, or the object that it makes, imports. A
    process from which workers are forked imports them first, so they must start no thread and use no GPU."""
    needs_model: bool = True
    """Whether an engine needs the run's `model`. Used for the kinds training and inference only."""
    reads_images: bool = False
    """Whether an inference engine supports vision-language models, and prompts in which image tokens
    represent the images of a row. Used for inference engines only."""
    api: str | None = None
    """Version of stretto's API that the component was made for, such as `"1.0"` (see `stretto.api`).
    `stretto doctor` warns if this version may not fit that of stretto. None: not known."""
    reward_columns: tuple[str, ...] | None = None
    """For a workflow: the columns that it passes to the reward in addition to those of the row, such as
    `completion_tokens` if it passes whole answers to `Session.score`. If this names no other column, `stretto
    check` scores the first row. If it does, `check` tests whether the reward accepts the call. None, the
    default, means unknown: `check` only makes the reward."""

    def make(self, config: ConfigT, context: Context, *parts: Mapping[str, Any]) -> Any:
        """Call the factory."""
        factory = resolve_name(self.factory) if isinstance(self.factory, str) else self.factory
        return factory(config, context, *parts)
