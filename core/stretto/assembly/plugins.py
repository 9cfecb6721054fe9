"""From names to components: find plugins by entry point or by path, and load them when they are needed.

Listing names imports no installed plugin. A plugin is imported when a run needs one of its components, so a
missing extra of one plugin never breaks another. Private to the core; plugin authors need only `hooks.py`.
"""

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast, get_args

import msgspec
import pluggy

from stretto import hooks
from stretto.algorithm import AlgorithmConfig
from stretto.component import Component, Kind
from stretto.dataset import DatasetConfig
from stretto.engine import InferenceConfig, TrainingConfig
from stretto.errors import PluginError, nearest, place_of
from stretto.launcher import LauncherConfig
from stretto.reward import RewardConfig
from stretto.tracker import TrackerConfig
from stretto.weights import WeightsConfig
from stretto.workflow import WorkflowConfig

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


@dataclass(frozen=True)
class Listing:
    """One line of `stretto plugins`."""

    kind: Kind
    name: str
    distribution: str
    version: str
    summary: str
    error: str = ""
    """Why the component cannot be used; empty if it can."""


@dataclass(frozen=True)
class Origin:
    """The plugin that a component comes from, for messages."""

    label: str
    """`reward 'brevity' of acme 1.2`, or `… of my_reward.py` for a plugin loaded by path."""
    files: str
    """Prefix of the paths of the plugin's source files: its package's folder, or its only file."""
    distribution: str
    """Name of the installed package, or of the module if the module was loaded by path."""


@dataclass(frozen=True)
class _PluginSource:
    """The source of a named component: an entry point, or a module loaded by path."""

    kind: Kind
    name: str
    provider: EntryPoint | ModuleType
    path: Path | None = None

    @property
    def distribution(self) -> str:
        return self._package[0]

    @property
    def version(self) -> str:
        return self._package[1]

    @property
    def _package(self) -> tuple[str, str]:
        if self.path is not None:
            return self.path.stem, "path"
        return _name_and_version(None if isinstance(self.provider, ModuleType) else self.provider.dist)

    @property
    def label(self) -> str:
        if isinstance(self.provider, ModuleType):
            return f"{self.kind} {self.name!r} of {Path(self.provider.__file__ or self.distribution).name}"
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"


class Plugins:
    """The plugins of one process. Create it once; it needs no closing."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("stretto")
        self._manager.add_hookspecs(hooks)
        self._paths: dict[Path, ModuleType] = {}
        self._offers: dict[tuple[Kind, str], list[Component[Any]]] = {}
        self._origins: dict[tuple[Kind, str], Origin] = {}

    def add_path(self, path: Path) -> None:
        """Load a plugin module by path. Raise PluginError if it cannot be imported or is not a plugin."""
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
            raise PluginError(f"plugin {str(path)!r} does not load: {place_of(error, str(path))}") from error
        self._register(module, f"plugin {str(path)!r}")
        if not self._manager.get_hookcallers(module):
            raise PluginError(f"{str(path)!r} is not a plugin: it has no function marked `@hookimpl`")
        self._paths[path] = module

    def names(self, kind: Kind) -> list[str]:
        """Return the names that `use:` accepts. Import no plugin except modules loaded by path."""
        return sorted({source.name for source in self._sources(kind)})

    def get(self, kind: Kind, name: str) -> Component[Any]:
        """Return the component of this kind and name. Use `distribution:name` if two plugins share the name.
        Raise PluginError if the name is unknown or ambiguous, or the plugin does not load."""
        distribution, _, bare = name.rpartition(":")
        sources = [
            source
            for source in self._sources(kind)
            if source.name == bare and (not distribution or distribution == source.distribution)
        ]
        if not sources:
            raise PluginError(self._unknown(kind, name), kind=kind, name=name)
        if len(sources) > 1:
            owners = sorted(source.distribution for source in sources)
            raise PluginError(
                f"{' and '.join(map(repr, owners))} offer {kind} {name!r}; choose one, for example `use: "
                f"{owners[0]}:{bare}`",
                kind=kind,
                name=name,
            )
        [source] = sources
        component = self._load(source)
        module = (
            source.provider
            if isinstance(source.provider, ModuleType)
            else sys.modules[source.provider.module]
        )
        self._origins[kind, name] = Origin(source.label, _files_of(module), source.distribution)
        return component

    def origin(self, kind: Kind, name: str) -> Origin:
        """Return the origin of a component that `get` has returned."""
        return self._origins[kind, name]

    def listing(self) -> list[Listing]:
        """Import all plugins and return all components, with the error of a plugin that does not load."""
        lines: list[Listing] = []
        for kind in KINDS:
            sources = sorted(self._sources(kind), key=lambda source: (source.name, source.distribution))
            for source in sources:
                summary, error = "", ""
                try:
                    component = self._load(source)
                    summary, error = component.summary, missing_extra(component)
                except PluginError as reason:
                    error = str(reason)
                lines.append(Listing(kind, source.name, source.distribution, source.version, summary, error))
        return lines

    def _sources(self, kind: Kind) -> Iterator[_PluginSource]:
        for entry in _installed_of(f"stretto.{kind}", tuple(sys.path)):
            yield _PluginSource(kind, entry.name, entry)
        for path, module in self._paths.items():
            for component in self._components(kind, module):
                yield _PluginSource(kind, component.name, module, path)

    def _load(self, source: _PluginSource) -> Component[Any]:
        kind, module = source.kind, source.provider

        def fault(reason: str) -> PluginError:
            return PluginError(f"{source.label}{reason}", kind=kind, name=source.name)

        # Do not test for EntryPoint: a library that imports importlib_metadata changes the class.
        if not isinstance(module, ModuleType):
            try:
                module = module.load()
            except Exception as error:
                raise fault(f" does not load: {place_of(error)}") from error
            self._register(module, source.label)
        components = {component.name: component for component in self._components(kind, module)}
        if source.name not in components:
            raise fault(
                f": its module {module.__name__!r} implements stretto_{kind} for "
                f"{sorted(components) or 'nothing'}, not for {source.name!r}"
            )
        component = components[source.name]
        if not issubclass(component.config, BASES[kind]):
            expected = BASES[kind].__name__
            raise fault(f": its config {component.config.__name__!r} must extend {expected}")
        return component

    def _register(self, module: ModuleType, label: str) -> None:
        if self._manager.is_registered(module):
            return
        for function in vars(module).values():
            if inspect.isfunction(function) and hasattr(function, "stretto_impl"):
                _refuse_unknown_hook(function, label)
        self._manager.register(module, name=module.__name__)

    def _components(self, kind: Kind, module: ModuleType) -> list[Component[Any]]:
        """Return the components of a kind that a registered module offers. Call its hook only once."""
        key = (kind, module.__name__)
        if key not in self._offers:
            caller: pluggy.HookCaller = getattr(self._manager.hook, f"stretto_{kind}")
            components: list[Component[Any]] = []
            for implementation in caller.get_hookimpls():
                if implementation.plugin is module:
                    components += _components_of_hook(implementation.function, kind, module)
            self._offers[key] = components
        return self._offers[key]

    def _unknown(self, kind: Kind, name: str) -> str:
        installed = self.names(kind)
        if kind == "reward" and re.search(r"\.py:\w+$", name):
            return f"{name!r} is a function; write reward: {{use: function, function: {name}}}"
        guess = nearest(name, installed)
        return f"no {kind} {name!r}{guess or ';'} installed: {', '.join(installed) or 'none'}"


@cache
def _installed_of(group: str, search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(_installed(search_path).select(group=group))


@cache
def _installed(search_path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages that are installed on this path. A process reads them once."""
    del search_path  # `entry_points` reads `sys.path`
    return cast("EntryPoints", entry_points())  # Python 3.11 returns another class with the same `select`


@cache
def _name_and_version(package: Distribution | None) -> tuple[str, str]:
    """Return the name and the version of a package. Cached: either of them reads the whole metadata file."""
    return ("?", "?") if package is None else (package.name, package.version)


def missing_extra(component: Component[Any]) -> str:
    """Return what has to be installed before the component can be made; empty if nothing is missing."""
    for module, requirement in component.requires.items():
        if importlib.util.find_spec(module) is None:
            return f"{component.name!r} needs {module!r}: pip install '{requirement}'"
    return ""


def _refuse_unknown_hook(function: FunctionType, label: str) -> None:
    """Refuse a misspelt hook, which pluggy accepts, and arguments, for which pluggy shows a traceback."""
    name = function.__name__
    location = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    hook_names = [hook for hook in vars(hooks) if hook.startswith("stretto_")]
    if name not in hook_names:
        raise PluginError(f"{label}: there is no hook {name!r}{nearest(name, hook_names)} ({location})")
    for argument in inspect.signature(function).parameters:
        raise PluginError(
            f"{label}: hook {name!r} has no argument {argument!r} ({location}); stretto calls it without "
            "arguments"
        )


def _components_of_hook(hook: Callable[[], Any], kind: Kind, module: ModuleType) -> list[Component[Any]]:
    label = f"stretto_{kind} of {module.__file__ or module.__name__!r}"
    try:
        result = hook()
        components: Any = result if isinstance(result, Component) else list(result)
    except Exception as error:
        raise PluginError(f"{label} failed: {place_of(error, _files_of(module))}", kind=kind) from error
    if isinstance(components, Component):
        raise PluginError(f"{label} returns a Component; expected it to yield each Component", kind=kind)
    for component in components:
        if not isinstance(component, Component):
            raise PluginError(f"{label} yields {component!r}; expected a Component", kind=kind)
    return cast("list[Component[Any]]", components)


def _files_of(module: ModuleType) -> str:
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    file = Path(top.__file__ or module.__file__ or "")
    return f"{file.parent}{os.sep}" if file.name == "__init__.py" else str(file)
