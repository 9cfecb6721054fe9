"""What a plugin offers: components. And what the framework tells a component when it makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = [
    "Component",
    "Context",
    "Head",
    "Importable",
    "Kind",
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
"""What a model says of each token, (T,) float32, to `forward` and to a loss:
`policy`: its logprob, 0 at the first token of a sequence;
`value`: the value of the state in which it was chosen, that is, after the tokens before it; 0 at the first;
`reward`: the score of the text up to and including it."""
SandboxMode = Literal["bubblewrap", "unsafe"]
"""What commands that are not stretto's own run in."""

# Field types for config structs, so that their bounds reach the JSON schema and the error messages.
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
# A file or folder that must exist. Looked up from the working directory, else beside the run file;
# the config that a component receives holds it absolute.
LocalPath = Annotated[str, msgspec.Meta(extra={"stretto": "local_path"})]
# A model: a folder, looked up in the same way, or a hub id.
ModelSource = Annotated[str, msgspec.Meta(extra={"stretto": "model"})]
# `path.py:name` or `module:name`. A path is found and made absolute like a `LocalPath`.
Importable = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^.+:\w+$",
        description="`file.py:function` or `module:function`",
        extra={"stretto": "importable"},
    ),
]

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The run a component is made for, as far as components need to know it."""

    run: str
    """Id of the run, unique on its bus."""
    name: str
    """The run's `name`, as the user wrote it."""
    seed: int
    """The run's seed."""
    model: str | None = None
    """Local folder or hub id of the initial model; None where the engines need none. A training engine is
    given that of the model it holds."""
    head: Head = "policy"
    """Of a training engine: what its model says of a token."""
    trainable: bool = True
    """Of a training engine: whether its model is to be trained, or only asked."""
    rank: int = 0
    """Of a training engine: its process's number in the worker group, below `config.processes`."""
    rendezvous: str = ""
    """Of a training engine in a group of several processes: a file for all of them to meet by, fresh for
    every start of the group. Engines of one process share its process group."""
    folder: str = ""
    """The run's folder; empty in a process that cannot see it."""
    sandbox: SandboxMode = "bubblewrap"
    """Where commands are to run that are not stretto's own (`stretto.user_code.sandbox`)."""
    worker: str = "kernel"
    """Id of the process the component lives in."""

    def path(self, *parts: str) -> Path:
        """A path inside the run's folder."""
        return Path(self.folder, *parts)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a composed run. A warning is printed; an error refuses the run; `environment` is
    an error of this machine rather than of the file: `check` only warns, so that a file can be checked
    anywhere."""

    path: str
    """Dotted path of the key in the run file."""
    message: str
    """What is wrong, what was expected, and what to do."""
    severity: Literal["error", "environment", "warning"] = "error"


@dataclass(frozen=True)
class Component(Generic[ConfigT]):
    """One named thing a plugin offers for one kind of task."""

    name: str
    """What stands after `use:`; equal to the entry point's name."""
    factory: Callable[[ConfigT, Context], Any]
    """Makes the object that keeps the kind's contract. Heavy imports belong in here. `stretto check` makes
    the object too, in a process of its own and with an empty `Context.folder`: side effects, such as opening
    a connection or a file, belong in the object's methods."""
    config: type[ConfigT]
    """Struct of the component's section: a subclass of the kind's base, such as `RewardConfig`."""
    summary: str
    """One line for `stretto plugins`."""
    check: Callable[[ConfigT, RunConfig], Iterable[Problem]] | None = None
    """What can be wrong beyond types, found before any process starts. May read other sections."""
    check_row: Callable[[ConfigT, Mapping[str, Any]], str] | None = None
    """Of a reward: what is wrong with a row's columns (all but `prompt`), empty if nothing. `check` calls it
    for rows of the dataset, in a process of its own that has not made the reward."""
    requires: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules that the factory imports, each with what to install for it: `{"torch": "stretto[torch]"}`."""
    needs_model: bool = True
    """Whether an engine needs the run's `model`; read for the kinds training and inference only."""
    reads_images: bool = False
    """Whether an inference engine takes vision-language models, and prompts in which image tokens stand for
    the images of a row; read for that kind only."""
    reward_columns: tuple[str, ...] | None = None
    """Of a workflow: the columns that it gives to the reward besides the row's. With none, `check` scores the
    first row; with some, it sees whether the reward can be called. None, the default: not known, and the
    reward is only made."""
