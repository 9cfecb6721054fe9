"""From a run file to typed structs: reads YAML, merges overrides, and checks every key of every section.

OmegaConf reads, merges and interpolates; nothing of it leaves this module. The result is a
`RunConfig` whose sections are the structs of the chosen components.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stretto.assembly.contracts import CONTRACTS, expect_contract
from stretto.assembly.plugins import BASES, Origin, Plugins
from stretto.component import Component, Context, Kind
from stretto.config import EvaluationConfig, Groups, RunConfig
from stretto.errors import ConfigError, PluginError, StrettoError, foreign_frames, nearest, offer, place_of

__all__ = [
    "Composed",
    "compose",
    "compose_mapping",
    "find_path",
    "kind_of",
]

# Sections that choose a component: dotted key -> kind.
SECTIONS: dict[str, Kind] = {
    "algorithm": "algorithm",
    "training": "training",
    "inference": "inference",
    "workflow": "workflow",
    "reward": "reward",
    "dataset": "dataset",
    "launcher": "launcher",
    "weights": "weights",
    "evaluation.dataset": "dataset",
}
LIST_SECTIONS: dict[str, Kind] = {"trackers": "tracker"}
# Sections with any number of named components.
NAMED_SECTIONS: dict[str, Kind] = {"groups": "training"}
_GROUP_NAME = r"[a-z][a-z0-9_]*"


def kind_of(path: str) -> Kind:
    """The kind of the component that the section at a dotted key chooses."""
    return SECTIONS.get(path) or (LIST_SECTIONS | NAMED_SECTIONS)[path.partition(".")[0]]


@dataclass(frozen=True)
class Composed:
    """A run file that has been read, merged and checked key by key."""

    config: RunConfig
    plugins: Plugins
    components: Mapping[str, Component[Any]]
    """By the dotted key of their section; `trackers.0` and so on in a list."""
    document: Mapping[str, Any]
    """The whole run with all defaults, as it is written to `config.yaml`: secrets from the
    environment stand there as the interpolations they came from."""
    notices: tuple[str, ...] = ()
    """What was decided for the user, to be shown."""
    place: Callable[[str], str] = str
    """Where a key comes from, for messages: `run.yaml:14: training.lr`, or `override training.lr`."""
    references: tuple[tuple[str, str], ...] = ()
    """Dotted keys that are written as a reference to another key, such as `${steps}`, with that text."""

    def section(self, path: str) -> Any:
        """The struct at a dotted key."""
        node: Any = self.config
        for part in path.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)
        return node

    def make(self, path: str, context: Context, section: Any = None) -> Any:
        """The object of the component that the section at `path` chose.

        Args:
            section: what the component is given instead of that section.

        Raises:
            ContractError: if the object does not keep the contract of its kind.
            PluginError: if its factory raised what is no `StrettoError`.
        """
        section = self.section(path) if section is None else section
        try:
            made = self.components[path].factory(section, context)
        except StrettoError:
            raise
        except Exception as error:
            raise PluginError(self.blame(error, path)) from error
        expect_contract(made, CONTRACTS[kind_of(path)], self.origin(path).label)
        return made

    def origin(self, path: str) -> Origin:
        """Whose code the component of a section is."""
        return self.plugins.origin(kind_of(path), self.section(path).use)

    def blame(self, error: BaseException, path: str = "") -> str:
        """`algorithm 'median' of acme 1.2 raised ValueError: … (median.py:23)`: the component whose code was
        the last on the way to an error.

        Args:
            path: of the section whose component was called; it is named where the error was in none's own
                files. Without it the text is then empty.
        """
        owners = {each: self.origin(each) for each in ([path] if path else []) + list(self.components)}
        for frame in reversed(foreign_frames(error)):
            for origin in owners.values():
                if frame.filename.startswith(origin.files):
                    return f"{origin.label} raised {place_of(error, origin.files)}"
        return f"{owners[path].label} raised {place_of(error)}" if path else ""

    def explain(self, error: BaseException, log: Path) -> str:
        """An error for those who do not see its traceback: if it is a plugin's, whose, and at which line.

        Args:
            log: the file that has the traceback of what is no `StrettoError`.
        """
        if isinstance(error, StrettoError):
            return str(error)
        return f"{self.blame(error) or f'{type(error).__name__}: {error}'}; traceback in {log}"


def compose(
    file: Path,
    overrides: Sequence[str] = (),
    plugins: Plugins | None = None,
    *,
    document: Mapping[str, Any] | None = None,
) -> Composed:
    """Read a run file, merge `key=value` overrides, and type every section.

    Args:
        document: what is taken instead of the file's content; the file is then what errors name.

    Raises:
        ConfigError: for a key, a type or a path that is wrong, with its place.
        PluginError: for a component that is not to be had.
    """
    source = _ConfigSource(file, overrides, document)
    notices: list[str] = []
    plain, secret = _read(source)
    composed = _Composer(source, plugins or Plugins()).run(deepcopy(plain), notices)
    whole = _overlay(msgspec.to_builtins(composed.config), secret, plain)
    return Composed(
        composed.config,
        composed.plugins,
        composed.components,
        whole,
        tuple(notices),
        source.place,
        tuple((path, text) for path, text in _references(source.written) if _at(whole, path) is not None),
    )


def compose_mapping(mapping: Mapping[str, Any]) -> Composed:
    """Type a run that was composed before, such as the one a worker gets from its kernel."""
    source = _ConfigSource(Path("config"), ())
    return _Composer(source, Plugins()).run(dict(mapping), [])


# ------------------------------------------------------------------------------ reading and merging


def _inherit_sampling(data: dict[str, Any]) -> None:
    """Give `evaluation.sampling` what it does not say of `sampling`."""
    sampling, evaluation = data.get("sampling"), data.get("evaluation")
    if isinstance(sampling, dict) and isinstance(evaluation, dict):
        evaluation = cast("dict[str, Any]", evaluation)
        if isinstance(own := evaluation.get("sampling"), dict):
            evaluation["sampling"] = sampling | own


class _ConfigSource:
    """Where the keys of a run come from, to say so in errors."""

    def __init__(
        self, file: Path, overrides: Sequence[str], document: Mapping[str, Any] | None = None
    ) -> None:
        self.file = file
        self._document = document
        self.items = [self._item(item) for item in overrides]
        self.overrides = _overrides(self.items)
        self._overridden = [".".join(path) for path in _leaves(_unresolved(self.overrides))]
        self.written: Mapping[str, Any] = {}
        """The file with the overrides merged in, before interpolations are resolved; `_read` puts it here."""

    def _item(self, item: str) -> str:
        key, equals, value = item.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
            raise ConfigError(f"override {item!r} is not of the form dotted.key=value", value=item)
        # `training=mock` swaps the component, and leaves the section's other keys where they are.
        is_section = re.fullmatch(rf"groups\.{_GROUP_NAME}", key) or key in SECTIONS
        names_component = is_section and not value.startswith(("{", "[")) and not _is_null(value)
        return f"{key}.use={value}" if names_component else item

    def load(self) -> Any:
        """What OmegaConf makes of the content, before overrides."""
        return OmegaConf.load(self.file) if self._document is None else OmegaConf.create(dict(self._document))

    def overridden(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{key}.") for key in self._overridden)

    def place(self, path: str) -> str:
        """`run.yaml:14: training.lr`, or `override training.lr`."""
        if self.overridden(path) or any(key.startswith(f"{path}.") for key in self._overridden):
            return f"override {path}"
        line = self._line(path)
        return f"{self.file}:{line}: {path}" if line else f"{self.file}: {path}"

    def error(self, path: str, message: str, value: Any = None) -> ConfigError:
        return ConfigError(f"{self.place(path)}: {message}", path=path, value=value)

    def _line(self, path: str) -> int:
        """Line of the deepest key of `path` that the file has; 0 if it has none."""
        try:
            node = yaml.compose(self.file.read_text(), Loader=yaml.SafeLoader)
        except (OSError, yaml.YAMLError):
            return 0
        line = 0
        for part in path.split("."):
            if not isinstance(node, yaml.MappingNode):
                break
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        return line


def _read(source: _ConfigSource) -> tuple[dict[str, Any], dict[str, Any]]:
    """The merged run file with all interpolations resolved, and again with those of the environment kept."""
    try:
        loaded = source.load()
    except FileNotFoundError:
        raise ConfigError(f"no run file {str(source.file)!r}", value=str(source.file)) from None
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source.file}: not readable as YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{source.file}: expected a mapping of keys, found {type(loaded).__name__}")
    try:
        merged = OmegaConf.merge(_shorts_expanded(loaded, source.overrides), source.overrides)
        merged = _shorts_expanded(cast("DictConfig", merged))  # those of the overrides
        source.written = _unresolved(merged)
        plain = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
        kept = OmegaConf.create(_escape_env(source.written))
        secret = cast("dict[str, Any]", OmegaConf.to_container(kept, resolve=True))
    except TypeError as error:  # a value where the other side has a mapping
        raise ConfigError(f"overrides {', '.join(source.items)} do not fit {source.file}: {error}") from error
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", "") or ""
        raise source.error(path, str(error).splitlines()[0]) from error
    return plain, secret


def _overrides(items: Sequence[str]) -> DictConfig:
    """What `dotted.key=value` says, each value in YAML."""
    merged = OmegaConf.create()
    for item in items:
        try:
            merged.merge_with_dotlist([item])
        except yaml.YAMLError as error:
            key, reason = item.partition("=")[0], " ".join(str(error).split())
            raise ConfigError(
                f"override {item!r}: its value is not readable as YAML ({reason}); quote text for YAML too: "
                f"{key}='\"…\"'"
            ) from error
    return merged


def _is_null(value: str) -> bool:
    return value in ("", "~", "null", "Null", "NULL")


def _unresolved(config: DictConfig) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the values of nested mappings are that are no mappings themselves, or empty ones."""
    if not isinstance(node, dict) or not node:
        yield path
        return
    for key, value in cast("dict[str, Any]", node).items():
        yield from _leaves(value, (*path, str(key)))


def _shorts_expanded(loaded: DictConfig, overrides: DictConfig | None = None) -> DictConfig:
    """`workflow: single_turn` is short for `workflow: {use: single_turn}`; `${…}` is a whole section.

    Args:
        overrides: a name that one of them has a key below is expanded too, wherever it stands, so that
            `algorithm.correction.cap=3` adds to `correction: token_tis` rather than replacing it.
    """
    whole = _unresolved(loaded)
    named = [f"{path}.{name}" for path in NAMED_SECTIONS for name in (whole.get(path) or {})]
    below = {
        ".".join(leaf[:depth])
        for leaf in _leaves(_unresolved(overrides) if overrides is not None else {})
        for depth in range(1, len(leaf))
    }
    for path in (*SECTIONS, *named, *sorted(below - {*SECTIONS, *named})):
        raw: Any = whole
        for part in path.split("."):
            raw = cast("dict[str, Any]", raw).get(part) if isinstance(raw, dict) else None
        if isinstance(raw, str) and not raw.startswith("${"):
            OmegaConf.update(loaded, path, {"use": raw}, merge=False)
    return loaded


def _escape_env(node: Any) -> Any:
    """The tree with every text that reads the environment turned into a literal."""
    if isinstance(node, dict):
        return {key: _escape_env(value) for key, value in cast("dict[str, Any]", node).items()}
    if isinstance(node, list):
        return [_escape_env(value) for value in cast("list[Any]", node)]
    if isinstance(node, str) and "oc.env" in node:
        return node.replace("${", r"\${")
    return node


def _references(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys whose whole value is `${another.key}`."""
    if isinstance(node, dict):
        for key, value in cast("dict[str, Any]", node).items():
            yield from _references(value, f"{path}.{key}" if path else key)
    elif isinstance(node, str) and re.fullmatch(r"\$\{[\w.]+\}", node):
        yield path, node


def _overlay(full: Any, secret: Any, plain: Any) -> Any:
    """`full`, with the texts of `secret` wherever those differ from `plain`."""
    if isinstance(full, dict) and isinstance(secret, dict):
        merged = dict(cast("dict[str, Any]", full))
        for key in merged.keys() & cast("dict[str, Any]", secret).keys():
            merged[key] = _overlay(merged[key], secret[key], plain[key])
        return merged
    if isinstance(full, (list, tuple)) and isinstance(secret, list):
        triples = zip(full, secret, plain, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return [_overlay(*triple) for triple in triples]
    return secret if secret != plain else full


# ------------------------------------------------------------------------------------------ typing


class _Composer:
    """Turns a plain mapping into a `RunConfig` whose sections are the chosen components' structs."""

    def __init__(self, source: _ConfigSource, plugins: Plugins) -> None:
        self.source = source
        self.plugins = plugins
        self.components: dict[str, Component[Any]] = {}

    def run(self, data: dict[str, Any], notices: list[str]) -> Composed:
        self._load_paths(data)
        sections: dict[str, type[msgspec.Struct]] = {}
        for path, kind in (SECTIONS | self._named(data)).items():
            if (section := self._section(data, path, kind)) is not None:
                component = self._component(kind, path, section)
                self._drop_stale_keys(kind, path, section, component, notices)
                sections[path] = component.config
        struct = self._struct(sections, self._lists(data))
        _expand_names(data, struct)
        self._refuse_unknown(data, struct, "")
        _inherit_sampling(data)
        config = self._convert(data, struct)
        config = cast("RunConfig", self._resolve_paths(config, ""))
        return Composed(config, self.plugins, self.components, msgspec.to_builtins(config))

    def _load_paths(self, data: dict[str, Any]) -> None:
        paths = data.get("plugins") or []
        if not isinstance(paths, (list, tuple)):
            raise self.source.error("plugins", f"expected a list of files, found {paths!r}", paths)
        for index, path in enumerate(cast("list[Any]", paths)):
            where = self._existing(f"plugins.{index}", str(path))
            try:
                self.plugins.add_path(where)
            except PluginError as error:
                raise PluginError(f"{self.source.place('plugins')}: {error}") from error
        if paths:
            data["plugins"] = [str(self._existing("plugins", str(path))) for path in cast("list[Any]", paths)]

    def _named(self, data: dict[str, Any]) -> dict[str, Kind]:
        """The sections that the run file names itself."""
        found: dict[str, Kind] = {}
        for path, kind in NAMED_SECTIONS.items():
            named = data.get(path) or {}
            if not isinstance(named, dict):
                raise self.source.error(path, f"expected a mapping of names, found {named!r}", named)
            for name in cast("dict[str, Any]", named):
                if not re.fullmatch(_GROUP_NAME, str(name)) or name in SECTIONS:
                    raise self.source.error(
                        f"{path}.{name}",
                        f"{name!r} cannot be the name of a worker group; expected a word of a-z, 0-9 and _ "
                        "that is no section",
                    )
                found[f"{path}.{name}"] = kind
        return found

    def _section(self, data: dict[str, Any], path: str, kind: Kind) -> dict[str, Any] | None:
        """The mapping at `path`, made if its component has a default; None where it may be left out."""
        owner, _, key = path.rpartition(".")
        parent = data.get(owner) if owner else data
        if not isinstance(parent, dict):
            return None
        parent = cast("dict[str, Any]", parent)
        if parent.get(key) is None:
            if _default_use(kind) is None:
                return None  # if it is required, the conversion below says that it is missing
            parent[key] = {}
        section = parent[key]
        if isinstance(section, str):
            section = parent[key] = {"use": section}
        if not isinstance(section, dict):
            raise self.source.error(
                path, f"expected a name or a mapping with `use`, found {section!r}", section
            )
        return cast("dict[str, Any]", section)

    def _component(self, kind: Kind, path: str, section: dict[str, Any]) -> Component[Any]:
        name = section.setdefault("use", _default_use(kind))
        where = f"{path}.use"
        if not isinstance(name, str):
            names = ", ".join(self.plugins.names(kind)) or "none"
            raise self.source.error(
                where, f"expected the name of a {kind}, found {name!r}; installed: {names}"
            )
        try:
            component = self.plugins.get(kind, name)
        except PluginError as error:
            raise PluginError(f"{self.source.place(where)}: {error}", kind=kind, name=name) from error
        self.components[path] = component
        return component

    def _drop_stale_keys(
        self, kind: Kind, path: str, section: dict[str, Any], component: Component[Any], notices: list[str]
    ) -> None:
        """When an override swaps a section's component, keys that only the former one had are left out."""
        if not self.source.overridden(f"{path}.use"):
            return
        accepted = {field.encode_name for field in msgspec.structs.fields(component.config)}
        unknown = [key for key in section if key not in accepted]
        stale = [key for key in unknown if not self.source.overridden(f"{path}.{key}")]
        former = self._former_keys(kind, path)
        stale = [key for key in stale if former is None or key in former]
        for key in stale:
            del section[key]
        if stale:
            notices.append(
                f"{path}: {component.name!r} does not use {', '.join(stale)} of {self.source.file}"
            )

    def _former_keys(self, kind: Kind, path: str) -> set[str] | None:
        """Keys of the component that the file itself names; None if that one cannot be loaded here."""
        raw: Any = OmegaConf.to_container(self.source.load(), resolve=False)
        for part in path.split("."):
            raw = cast("dict[str, Any]", raw).get(part, {}) if isinstance(raw, dict) else raw
        name = raw if isinstance(raw, str) else cast("dict[str, Any]", raw or {}).get("use", "")
        try:
            former = self.plugins.get(kind, str(name))
        except PluginError:
            return None
        return {field.encode_name for field in msgspec.structs.fields(former.config)}

    def _lists(self, data: dict[str, Any]) -> dict[str, list[type[msgspec.Struct]]]:
        chosen: dict[str, list[type[msgspec.Struct]]] = {}
        for path, kind in LIST_SECTIONS.items():
            items = data.get(path) or []
            if not isinstance(items, (list, tuple)):
                raise self.source.error(path, f"expected a list, found {items!r}", items)
            items = [{"use": item} if isinstance(item, str) else item for item in cast("list[Any]", items)]
            for index, item in enumerate(items):
                if not isinstance(item, dict):
                    raise self.source.error(
                        f"{path}.{index}", f"expected a name or a mapping with `use`, found {item!r}", item
                    )
            data[path] = items
            components = [
                self._component(kind, f"{path}.{index}", cast("dict[str, Any]", item))
                for index, item in enumerate(items)
            ]
            chosen[path] = [component.config for component in components]
        return chosen

    def _struct(
        self, sections: Mapping[str, type[msgspec.Struct]], lists: Mapping[str, list[type[msgspec.Struct]]]
    ) -> type[msgspec.Struct]:
        """`RunConfig` with the sections narrowed to the chosen structs."""
        narrowed: list[tuple[str, Any]] = []
        for path, struct in sections.items():
            if "." not in path:
                narrowed.append((path, struct))
        groups = [
            (path.removeprefix("groups."), struct)
            for path, struct in sections.items()
            if path.startswith("groups.")
        ]
        if groups:
            named = msgspec.defstruct("Groups", groups, bases=(Groups,), kw_only=True, frozen=True)
            narrowed.append(("groups", named))
        if "evaluation.dataset" in sections:
            fields = [("dataset", sections["evaluation.dataset"])]
            evaluation = msgspec.defstruct(
                "EvaluationConfig", fields, bases=(EvaluationConfig,), kw_only=True, frozen=True
            )
            narrowed.append(("evaluation", evaluation))
        for path, structs in lists.items():
            narrowed.append((path, tuple[tuple(structs)] if structs else tuple[()]))  # type: ignore[misc]
        return msgspec.defstruct("RunConfig", narrowed, bases=(RunConfig,), kw_only=True, frozen=True)

    def _refuse_unknown(self, data: Any, struct: type[msgspec.Struct], path: str) -> None:
        """msgspec names an unknown key, but not the nearest known one."""
        if not isinstance(data, dict):
            return
        known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
        for key, value in cast("dict[str, Any]", data).items():
            here = f"{path}.{key}" if path else str(key)
            if key not in known:
                hint = offer(str(key), known, "accepted here")
                raise self.source.error(here, f"unknown key {key!r}{hint}", value)
            for part, item in _structs_in(known[key].type, value, here):
                self._refuse_unknown(item[1], part, item[0])

    def _convert(self, data: dict[str, Any], struct: type[msgspec.Struct]) -> RunConfig:
        try:
            return cast("RunConfig", msgspec.convert(data, struct))
        except msgspec.ValidationError as error:
            message, path = _said_and_where(error)
            missing = re.match(r"Object missing required field `(\w+)`", message)
            if missing:
                path = f"{path}.{missing[1]}" if path else missing[1]
                raise self.source.error(path, "this key is required and not there") from error
            source = ""
            if origin := self._interpolated(path):
                try:
                    msgspec.convert(_at(data, origin), _annotation_at(struct, origin))
                    source = f", from ${{{origin}}}"
                except msgspec.ValidationError as wrong:  # the fault is where the value comes from
                    message, path = _said_and_where(wrong)[0], origin
            value = _at(data, path)
            text = _in_words(message, value, _annotation_at(struct, path))
            shown = "" if isinstance(value, dict) else f"; found {value!r}{source}"
            raise self.source.error(path, f"{text}{shown}", value) from error

    def _interpolated(self, path: str) -> str:
        """The key that the value at `path` is taken from by `${key}`, or an empty string."""
        found = re.fullmatch(r"\$\{([A-Za-z_][\w.]*)\}", str(_at(self.source.written, path)))
        return (self._interpolated(found[1]) or found[1]) if found else ""

    def _resolve_paths(self, struct: msgspec.Struct, path: str) -> msgspec.Struct:
        """The struct with every `LocalPath` made absolute, nested structs included."""
        changes: dict[str, Any] = {}
        for field in msgspec.structs.fields(type(struct)):
            value = getattr(struct, field.name)
            here = f"{path}.{field.name}" if path else field.name
            if isinstance(value, msgspec.Struct):
                changes[field.name] = self._resolve_paths(value, here)
            elif isinstance(value, dict):
                named = cast("dict[str, Any]", value)
                changes[field.name] = {
                    key: self._resolve_paths(item, f"{here}.{key}")
                    if isinstance(item, msgspec.Struct)
                    else item
                    for key, item in named.items()
                }
            elif isinstance(value, str):
                changes[field.name] = self._resolve_path(_marks(field.type), value, here)
            elif isinstance(value, tuple) and (marks := _marks_of_items(field.type)):
                items = cast("tuple[str, ...]", value)
                changes[field.name] = tuple(
                    self._resolve_path(marks, item, f"{here}.{index}") for index, item in enumerate(items)
                )
        return msgspec.structs.replace(struct, **changes) if changes else struct

    def _resolve_path(self, marks: set[str], value: str, path: str) -> str:
        if "local_path" in marks:
            return str(self._existing(path, value))
        if "model" in marks and (found := find_path(value, self.source.file)):
            return str(found)
        module, _, name = value.rpartition(":")
        if "importable" in marks and module.endswith(".py"):
            return f"{self._existing(path, module)}:{name}"
        return value

    def _existing(self, key: str, path: str) -> Path:
        found = find_path(path, self.source.file)
        if found is None:
            raise self.source.error(
                key,
                f"no such file or folder: {path!r} (looked in the working directory and beside the run file)",
                path,
            )
        return found


def _default_use(kind: Kind) -> str | None:
    """The component that a section stands for when it names none."""
    use = next(field for field in msgspec.structs.fields(BASES[kind]) if field.name == "use")
    return None if use.required else use.default


def find_path(path: str, run_file: Path) -> Path | None:
    """A path as written in a run file: from the working directory, else beside the file; None if neither."""
    for candidate in (Path(path).expanduser(), run_file.parent / path):
        if candidate.exists():
            return candidate.absolute()  # links as they are: a virtual environment's interpreter is one
    return None


def _structs_in(
    annotation: Any, value: Any, path: str
) -> Iterator[tuple[type[msgspec.Struct], tuple[str, Any]]]:
    """The struct types that a field's value has to match, each with the place and the value."""
    info = msgspec.inspect.type_info(annotation)
    for part in getattr(info, "types", (info,)):
        if isinstance(part, msgspec.inspect.StructType):
            yield part.cls, (path, value)
    if isinstance(info, msgspec.inspect.DictType) and isinstance(info.value_type, msgspec.inspect.StructType):
        for key, item in cast("dict[str, Any]", value).items() if isinstance(value, dict) else ():
            yield info.value_type.cls, (f"{path}.{key}", item)
    if isinstance(info, msgspec.inspect.TupleType) and isinstance(value, list):
        for index, (item_type, item) in enumerate(
            zip(info.item_types, cast("list[Any]", value), strict=False)
        ):
            if isinstance(item_type, msgspec.inspect.StructType):
                yield item_type.cls, (f"{path}.{index}", item)


def _marks(annotation: Any) -> set[str]:
    """The marks of `stretto.component` that a field's type carries, such as `local_path`."""
    info = msgspec.inspect.type_info(annotation)
    return {
        (part.extra or {}).get("stretto", "")
        for part in (info, *getattr(info, "types", ()))
        if isinstance(part, msgspec.inspect.Metadata)
    }


def _marks_of_items(annotation: Any) -> set[str]:
    """The marks of the items, where a field is a list of any length."""
    info = msgspec.inspect.type_info(annotation)
    item = info.item_type if isinstance(info, msgspec.inspect.VarTupleType) else None
    return {(item.extra or {}).get("stretto", "")} if isinstance(item, msgspec.inspect.Metadata) else set()


def _expand_names(data: Any, struct: type[msgspec.Struct]) -> None:
    """`correction: none` is short for `correction: {use: none}`, as is every struct with the key `use`."""
    if not isinstance(data, dict):
        return
    section, known = cast("dict[str, Any]", data), msgspec.structs.fields(struct)
    for field in known:
        structs = [part for part, _ in _structs_in(field.type, None, "")]
        if isinstance(section.get(field.name), str) and any(
            "use" in part.__struct_fields__ for part in structs
        ):
            section[field.name] = {"use": section[field.name]}
        for part, (_, value) in _structs_in(field.type, section.get(field.name), ""):
            _expand_names(value, part)


def _said_and_where(error: msgspec.ValidationError) -> tuple[str, str]:
    """msgspec's message, and the dotted path that it is about."""
    message, _, place = str(error).partition(" - at ")
    return message, place.strip("`").removeprefix("$").removeprefix(".").replace("[", ".").replace("]", "")


def _in_words(message: str, value: Any, annotation: Any) -> str:
    """What msgspec says of a value, as a writer of YAML would."""
    if "matching regex" in message:
        return f"expected {_description(annotation) or 'text of another form'}"
    if message.startswith("Invalid enum value"):
        info = msgspec.inspect.type_info(annotation)
        allowed = [
            str(choice)
            for part in getattr(info, "types", (info,))
            if isinstance(part, msgspec.inspect.LiteralType)
            for choice in part.values
        ]
        return f"expected one of {', '.join(allowed)}{nearest(str(value), allowed)}"
    text = message[0].lower() + message[1:].replace("`", "")
    return re.sub(r"\bobject\b", "a mapping", re.sub(r"\barray\b", "a list", text))


def _description(annotation: Any) -> str:
    """What `msgspec.Meta` describes a field, or the items of a list, with."""
    info = msgspec.inspect.type_info(annotation)
    parts = (info, *getattr(info, "types", ()), getattr(info, "item_type", None))
    metadata = [part for part in parts if isinstance(part, msgspec.inspect.Metadata)]
    return next((str((part.extra_json_schema or {}).get("description", "")) for part in metadata), "")


def _annotation_at(struct: Any, path: str) -> Any:
    """The annotation of the field at a dotted path (of the list, for its items); Any where there is none."""
    annotation: Any = struct
    for part in path.split("."):
        if part.isdigit():
            continue
        structs = [each for each, _ in _structs_in(annotation, None, "")]
        fields = {field.encode_name: field.type for each in structs for field in msgspec.structs.fields(each)}
        if part not in fields:
            return Any
        annotation = fields[part]
    return annotation


def _at(data: Any, path: str) -> Any:
    for part in path.split(".") if path else []:
        if isinstance(data, dict):
            data = cast("dict[str, Any]", data).get(part)
        elif isinstance(data, (list, tuple)) and part.isdigit():
            data = cast("list[Any]", data)[int(part)]
        else:
            return None
    return data
