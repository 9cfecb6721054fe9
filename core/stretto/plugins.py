"""From names to components: finds plugins by entry point or by path, and loads them by need.

Listing names imports nothing. A plugin is imported when one of its components is wanted, so a missing
extra of one never breaks another. Private to the core; plugin authors need `hooks.py` only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

import msgspec
import pluggy

from stretto import hooks
from stretto.algorithm import AlgorithmConfig
from stretto.component import Component, Kind
from stretto.dataset import DatasetConfig
from stretto.engine import InferenceConfig, TrainingConfig
from stretto.errors import PluginError, nearest
from stretto.launcher import LauncherConfig
from stretto.reward import RewardConfig
from stretto.tracker import TrackerConfig
from stretto.weights import WeightsConfig
from stretto.workflow import WorkflowConfig

__all__ = ["BASES", "KINDS", "Listing", "Plugins"]

KINDS: tuple[Kind, ...] = get_args(Kind)

# The struct that every component's config of a kind must extend.
BASES: dict[Kind, type[msgspec.Struct]] = {
    "algorithm": AlgorithmConfig,
    "training": TrainingConfig,
    "inference": InferenceConfig,
    "workflow": WorkflowConfig,
    "reward": RewardConfig,
    "dataset": DatasetConfig,
    "launcher": LauncherConfig,
    "weights": WeightsConfig,
    "tracker": TrackerConfig,
}

# First-party plugins of later versions: they count for "did you mean", and are named as such.
_PLANNED: dict[Kind, tuple[str, ...]] = {
    "algorithm": (),
    "training": (),
    "inference": (),
    "workflow": (),
    "reward": ("code",),
    "dataset": (),
    "launcher": ("slurm", "ray"),
    "weights": (),
    "tracker": ("wandb", "tensorboard"),
}


@dataclass(frozen=True)
class Listing:
    """One line of `stretto plugins`."""

    kind: Kind
    name: str
    distribution: str
    version: str
    summary: str
    error: str = ""
    """Why it cannot be used, if it cannot."""


@dataclass(frozen=True)
class _Source:
    """Where a component of some name can be had: an entry point, or a module loaded by path."""

    name: str
    distribution: str
    version: str
    where: EntryPoint | ModuleType


class Plugins:
    """The plugins of one process. Made once, closed never."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("stretto")
        self._manager.add_hookspecs(hooks)
        self._paths: dict[Path, ModuleType] = {}
        self._offered: dict[tuple[Kind, str], list[Component[Any]]] = {}

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls a hook of all plugins loaded so far."""
        return self._manager.hook

    def life(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Exception]]:
        """Call a run-life hook of each loaded plugin; yields the plugins that raised, with what."""
        caller = getattr(self._manager.hook, hook)
        for implementation in caller.get_hookimpls():
            accepted = {name: arguments[name] for name in implementation.argnames}
            try:
                implementation.function(**accepted)
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the caller tells
                yield implementation.plugin_name, error

    def add_path(self, path: Path) -> None:
        """Load a plugin module by path; its components count from now on.

        Raises:
            PluginError: if it cannot be imported or is not a plugin.
        """
        if path in self._paths:
            return
        name = f"stretto_path_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PluginError(f"plugin {str(path)!r} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise PluginError(f"plugin {str(path)!r} does not load: {_reason(error)}") from error
        self._register(module, str(path))
        if not self._manager.get_hookcallers(module):
            raise PluginError(f"plugin {str(path)!r} is none: it has no function marked `@hookimpl`")
        self._paths[path] = module

    def names(self, kind: Kind) -> list[str]:
        """Names that `use:` accepts, without importing anything but modules given by path."""
        return sorted({source.name for source in self._sources(kind)})

    def get(self, kind: Kind, name: str) -> Component[Any]:
        """The component of this kind and name, `distribution:name` where two share one name.

        Raises:
            PluginError: if it is unknown, ambiguous, or its plugin does not load.
        """
        distribution, _, bare = name.rpartition(":")
        sources = [
            source
            for source in self._sources(kind)
            if source.name == bare and distribution in ("", source.distribution)
        ]
        if not sources:
            raise PluginError(self._unknown(kind, name), kind=kind, name=name)
        if len(sources) > 1:
            owners = " and ".join(sorted(repr(source.distribution) for source in sources))
            first = sorted(source.distribution for source in sources)[0]
            raise PluginError(
                f"{kind} {name!r} is offered by {owners}; pick one: `use: {first}:{bare}`",
                kind=kind,
                name=name,
            )
        return self._load(kind, sources[0])

    def listing(self) -> list[Listing]:
        """Every component installed or loaded by path; imports them all, and says which do not load."""
        lines: list[Listing] = []
        for kind in KINDS:
            sources = sorted(self._sources(kind), key=lambda source: (source.name, source.distribution))
            for source in sources:
                summary, error = "", ""
                try:
                    component = self._load(kind, source)
                    summary, error = component.summary, missing_extra(component)
                except PluginError as reason:
                    error = str(reason)
                lines.append(Listing(kind, source.name, source.distribution, source.version, summary, error))
        return lines

    # ------------------------------------------------------------------------------------ private

    def _sources(self, kind: Kind) -> Iterator[_Source]:
        for entry in entry_points(group=f"stretto.{kind}"):
            owner = entry.dist
            yield _Source(entry.name, owner.name if owner else "?", owner.version if owner else "?", entry)
        for path, module in self._paths.items():
            for component in self._components(kind, module):
                yield _Source(component.name, path.stem, "path", module)

    def _load(self, kind: Kind, source: _Source) -> Component[Any]:
        module = source.where
        label = f"{kind} {source.name!r} of {source.distribution!r}"
        if isinstance(module, EntryPoint):
            try:
                module = module.load()
            except Exception as error:
                reason = f"{label} does not load: {_reason(error)}"
                raise PluginError(reason, kind=kind, name=source.name) from error
            self._register(module, label)
        offered = {component.name: component for component in self._components(kind, module)}
        if source.name not in offered:
            raise PluginError(
                f"{label}: its module {module.__name__!r} implements stretto_{kind} for "
                f"{sorted(offered) or 'nothing'}, not for {source.name!r}",
                kind=kind,
                name=source.name,
            )
        component = offered[source.name]
        if not issubclass(component.config, BASES[kind]):
            raise PluginError(
                f"{label}: its config {component.config.__name__!r} must extend {BASES[kind].__name__}",
                kind=kind,
                name=source.name,
            )
        return component

    def _register(self, module: ModuleType, label: str) -> None:
        if self._manager.is_registered(module):
            return
        try:
            self._manager.register(module, name=module.__name__)
            # pluggy accepts a misspelt hook in silence until it is asked.
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(module)
            raise PluginError(f"{label}: {error}") from error

    def _components(self, kind: Kind, module: ModuleType) -> list[Component[Any]]:
        """What a registered module offers for a kind; its hook is called once."""
        key = (kind, module.__name__)
        if key not in self._offered:
            caller: pluggy.HookCaller = getattr(self._manager.hook, f"stretto_{kind}")
            offered: list[Component[Any]] = []
            for implementation in caller.get_hookimpls():
                if implementation.plugin is module:
                    try:
                        made = cast("Iterable[Component[Any]]", implementation.function())
                        offered.extend(made)
                    except Exception as error:
                        reason = f"stretto_{kind} of {module.__name__!r} failed: {_reason(error)}"
                        raise PluginError(reason, kind=kind) from error
            self._offered[key] = offered
        return self._offered[key]

    def _unknown(self, kind: Kind, name: str) -> str:
        installed = self.names(kind)
        planned = _PLANNED[kind]
        listed = f"installed: {', '.join(installed) or 'none'}"
        if name in planned:
            return f"no {kind} {name!r}: this version of stretto does not have it yet; {listed}"
        guess = nearest(name, [*installed, *planned])
        if any(f"{word!r}?" in guess for word in planned if word not in installed):
            guess += " (not in this version)"
        return f"no {kind} {name!r}{guess or ';'} {listed}"


def missing_extra(component: Component[Any]) -> str:
    """What has to be installed before the component can be made, or an empty string."""
    for module, requirement in component.requires.items():
        if importlib.util.find_spec(module) is None:
            return f"{component.name!r} needs {module!r}: pip install '{requirement}'"
    return ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
