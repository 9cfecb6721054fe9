"""Make the run file of a universe: a user's run file, with simulated parts for those of a machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.assembly.plugins import Plugins
from stretto.component import Kind
from stretto.errors import ConfigError
from stretto.launcher import LauncherConfig

_OUTSIDE = ("agent", "online", "verifiers")
"""Workflows that need servers or libraries of their own."""
_NOWHERE = ("trackers", "metrics", "groups")  # sections that no simulated run has
_KEPT_OF_BUS = ("grace_s", "outage_s", "max_payload_mb")  # keys of the section `bus`


def simulated(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the run file of a universe in `folder`, from one with absolute paths. Engines are `mock`, or
    those of the run's plugin files whose config extends that of `mock`. Launcher, bus and weights are
    simulated; trackers, metrics and kept samples are off.

    Raises ConfigError if the workflow cannot be simulated.
    """
    sections = {key: value for key, value in document.items() if key not in _NOWHERE and value is not None}
    workflow = _section(sections, "workflow")
    if workflow.get("use") in _OUTSIDE or "tools" in workflow:
        raise ConfigError(
            f"the workflow {workflow.get('use')!r} cannot be simulated: it needs HTTP servers or tools; "
            "`single_turn`, `multi_turn` and workflows of your own without tools can",
            path="workflow",
        )
    models = {name: {**model, "group": "training"} for name, model in sections.get("models", {}).items()}
    return {
        **sections,
        "models": models,
        "out": str(folder / "run"),
        "plugins": [*sections.get("plugins", ()), str(Path(__file__).with_name("plugin.py"))],
        "training": _with("mock", sections, "training") | {"processes": 1},
        "inference": _with("mock", sections, "inference"),
        "launcher": _known(_section(sections, "launcher"), LauncherConfig) | {"use": "simulated"},
        "weights": _with("file", sections, "weights") | {"folder": str(folder / "weights")},
        "samples": {"keep": "none"},
        "bus": {
            "url": "nats://simulated:4222",
            **{key: value for key, value in sections.get("bus", {}).items() if key in _KEPT_OF_BUS},
        },
    }


def _section(sections: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = sections.get(key, {})
    return {"use": section} if isinstance(section, str) else dict(section)


def _with(default: str, sections: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    section, plugins = _section(sections, kind), Plugins()
    config = plugins.get(kind, default).config
    name = section.get("use", default)
    if name not in plugins.names(kind):
        for path in sections.get("plugins", ()):
            plugins.add_path(Path(path))
        if issubclass(plugins.get(kind, name).config, config):
            return section
    return _known(section, config) | {"use": default}


def _known(section: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the keys that the config `kind` has too, without None, for which it computes a value itself."""
    known = kind.__struct_fields__
    return {key: value for key, value in section.items() if key in known and value is not None}
