"""Read a run file, and merge overrides into it. No OmegaConf object leaves this module."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from stretto.assembly.sections import NAMED_SECTIONS, SECTIONS, KeySource, instead_of_list, names_component
from stretto.errors import ConfigError

_OTHER_BASE = re.compile(r"[-+]?0\d|.*:")
"""Numbers that YAML 1.1 reads with base 8 or 60."""
_LONG_VALUE = 6
"""`RunFile.redact` replaces values of at least this many characters also inside longer words."""


class RunFile(KeySource):
    """A run file with its overrides. `read` sets `raw` and `plain`."""

    def __init__(
        self, file: Path, overrides: Sequence[str], document: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(file)
        self.plain: Mapping[str, Any] = {}
        """`raw` with all interpolations resolved."""
        self._document = document
        self.items = [self._item(item) for item in overrides]
        self.overrides = _overrides(self.items)
        self._override_keys = [".".join(path) for path in _leaves(_to_plain(self.overrides))]

    def _item(self, item: str) -> str:
        key, equals, value = item.partition("=")
        if indexed := re.fullmatch(r"([A-Za-z_][\w.-]*)\[[^]]*\].*", key):
            raise ConfigError(
                f"override {item!r}: a list is written as a whole, such as {indexed[1]}=[…]", value=item
            )
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
            text = f"override {item!r} is not of the form dotted.key=value{_hint(item)}"
            raise ConfigError(text, value=item)
        if number := _unusual_number(value):
            raise ConfigError(f"override {item!r}: {number[1]}", value=item)
        # `training=mock` replaces the component and keeps the section's other keys.
        is_null = value in ("", "~", "null", "Null", "NULL")
        is_name = names_component(key) and not value.startswith(("{", "[")) and not is_null
        return f"{key}.use={value}" if is_name else item

    def load(self) -> Any:
        """Load the content with OmegaConf, without the overrides."""
        return OmegaConf.load(self.file) if self._document is None else OmegaConf.create(dict(self._document))

    def refuse_unusual_numbers(self) -> None:
        """Refuse numbers of the file that YAML reads in another base."""
        if self._document is None and (number := _unusual_number(self.file.read_text())):
            raise ConfigError(f"{self.file}:{number[0]}: {number[1]}")

    def is_overridden(self, path: str) -> bool:
        """See `KeySource`."""
        return any(f"{path}.".startswith(f"{key}.") for key in self._override_keys)

    def written(self) -> tuple[str, ...]:
        """Return the dotted keys that the file or an override sets. Call `read` before."""
        return tuple(".".join(path) for path in _leaves(self.raw))

    def place(self, path: str) -> str:
        """See `KeySource`."""
        if self.is_overridden(path) or any(key.startswith(f"{path}.") for key in self._override_keys):
            return f"override {path}"
        line = self._line(path)
        return f"{self.file}:{line}: {path}" if line else f"{self.file}: {path}"

    def redact(self, text: str) -> str:
        """Replace values from the environment by the interpolations that read them."""
        replacements = {
            form: interpolation
            for value, interpolation in _environment_values(self.raw, self.plain)
            for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1])
            if form
        }
        if not replacements:
            return text
        forms = [
            re.escape(form) if len(form) >= _LONG_VALUE else rf"(?<!\w){re.escape(form)}(?!\w)"
            for form in sorted(replacements, key=len, reverse=True)
        ]
        return re.sub("|".join(forms), lambda found: replacements[found[0]], text)

    def component_in_file(self, path: str) -> str:
        """See `KeySource`."""
        raw: Any = _to_plain(self.load())
        for part in path.split("."):
            raw = cast("dict[str, Any]", raw).get(part, {}) if isinstance(raw, dict) else raw
        return raw if isinstance(raw, str) else str(cast("dict[str, Any]", raw or {}).get("use", ""))

    def _line(self, path: str) -> int:
        """Return the line of the deepest key of `path` that is in the file; 0 if no key is."""
        try:
            node = yaml.compose(self.file.read_text(), Loader=yaml.SafeLoader)
        except (OSError, yaml.YAMLError):
            return 0
        line = 0
        for part in path.split("."):
            if not isinstance(node, yaml.MappingNode):
                break
            matches = [(key, value) for key, value in node.value if key.value == part]
            if not matches:
                break
            line, node = matches[0][0].start_mark.line + 1, matches[0][1]
        return line


def read(source: RunFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the merged run file twice: with all references resolved, and with all but the environment's."""
    try:
        loaded = source.load()
        source.refuse_unusual_numbers()
    except FileNotFoundError:
        raise ConfigError(f"no run file {str(source.file)!r}", value=str(source.file)) from None
    except IsADirectoryError:
        inside = source.file / "run.yaml"
        hint = f"; did you mean {str(inside)!r}?" if inside.is_file() else ""
        text = f"{str(source.file)!r} is a folder; expected a run file{hint}"
        raise ConfigError(text, value=str(source.file)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        text = (
            f"{source.file}:{line}: not UTF-8 (byte {error.object[error.start]:#x}); save the file as UTF-8"
        )
        raise ConfigError(text) from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        hint = "; look at the indentation of that line, and of those around it"
        reads = isinstance(error, ParserError | ScannerError)
        raise ConfigError(f"{source.file}: cannot be read as YAML: {error}{hint if reads else ''}") from error
    except RecursionError as error:
        raise nested_too_deeply(source.file) from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{source.file}: expected a mapping of keys, found a list")
    try:
        expanded = _expand_short_sections(loaded, source.overrides)
        for path, fault in _misfits(_to_plain(expanded), _to_plain(source.overrides)):
            raise source.error(path, fault)
        merged = OmegaConf.merge(expanded, source.overrides)
        merged = _expand_short_sections(cast("DictConfig", merged))  # those that overrides added
        source.raw = _to_plain(merged)
        source.plain = plain = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
        escaped = OmegaConf.create(_escape_env(source.raw))
        secret = cast("dict[str, Any]", OmegaConf.to_container(escaped, resolve=True))
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", "") or ""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        raise source.error(path, reason.strip('"')) from error
    return plain, secret


def _misfits(tree: Any, overrides: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, fault) where a file has a list and an override a mapping, or the other way round."""
    if isinstance(tree, dict) and isinstance(overrides, dict):
        in_file, in_overrides = cast("dict[str, Any]", tree), cast("dict[str, Any]", overrides)
        for key in in_file.keys() & in_overrides.keys():
            yield from _misfits(in_file[key], in_overrides[key], f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and isinstance(overrides, dict):
        yield path, f"is a list, which an override replaces as a whole; write {path}=[…]"
    elif isinstance(tree, dict) and isinstance(overrides, list):
        yield path, f"expected a mapping of keys, found {overrides!r}{instead_of_list(path)}"


def nested_too_deeply(file: Path) -> ConfigError:
    """Return the error for a run file, or an override, that Python cannot read without a stack overflow."""
    return ConfigError(f"{file}: its mappings and lists are nested too deeply")


def _overrides(items: Sequence[str]) -> DictConfig:
    merged = OmegaConf.create()
    for item in items:
        try:
            merged.merge_with_dotlist([item])
        except yaml.YAMLError as error:
            key, reason = item.partition("=")[0], " ".join(str(error).split())
            raise ConfigError(
                f"override {item!r}: its value cannot be read as YAML ({reason}); put quotes around "
                f"text, for YAML and for the shell: {key}='\"…\"'"
            ) from error
    return merged


def _hint(item: str) -> str:
    if "=" not in item and Path(item).suffix in (".yaml", ".yml"):
        return f"; the run file comes before the overrides: {item} KEY=VALUE …"
    return "" if re.search(r"\w=\S", item) else "; write no spaces around ="


def _unusual_number(text: str) -> tuple[int, str] | None:
    """Find a number that YAML reads in another base, such as 010 or 1:30. Return its line and a message."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None  # it is refused elsewhere
    nodes, seen = [node], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.CollectionNode):
            nodes += [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        elif node is not None and node.tag == "tag:yaml.org,2002:int" and _OTHER_BASE.match(node.value):
            number = yaml.safe_load(node.value)
            reads = f"YAML reads {node.value} as {number}"
            message = f"{reads}; write it without a leading 0 and without colons, or in quotes"
            return node.start_mark.line + 1, message
    return None


def _to_plain(config: DictConfig) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths to the values of nested mappings; an empty mapping counts as a value."""
    if not isinstance(node, dict) or not node:
        yield path
        return
    for key, value in cast("dict[str, Any]", node).items():
        yield from _leaves(value, (*path, str(key)))


def _expand_short_sections(config: DictConfig, overrides: DictConfig | None = None) -> DictConfig:
    """Expand `workflow: single_turn` to `workflow: {use: single_turn}`, but not `${…}`, a whole section.
    Also expand a name if an override sets a key in its section: `algorithm.correction.cap=3`."""
    tree = _to_plain(config)
    named = {path: tree[path] for path in NAMED_SECTIONS if isinstance(tree.get(path), dict)}
    named_sections = [f"{path}.{name}" for path, entries in named.items() for name in entries]
    overridden = {
        ".".join(leaf[:depth])
        for leaf in _leaves(_to_plain(overrides) if overrides is not None else {})
        for depth in range(1, len(leaf))
    }
    for path in (*SECTIONS, *named_sections, *sorted(overridden - {*SECTIONS, *named_sections})):
        raw: Any = tree
        for part in path.split("."):
            raw = cast("dict[str, Any]", raw).get(part) if isinstance(raw, dict) else None
        if isinstance(raw, str) and not raw.startswith("${"):
            OmegaConf.update(config, path, {"use": raw}, merge=False)
    return config


def _environment_values(raw: Any, plain: Any) -> Iterator[tuple[str, str]]:
    """Yield (value from the environment, its interpolation). `plain` is `raw` resolved, and may lack keys."""
    if isinstance(raw, dict):
        resolved = cast("dict[str, Any]", plain) if isinstance(plain, dict) else {}
        for key, value in cast("dict[str, Any]", raw).items():
            yield from _environment_values(value, resolved.get(key))
    elif isinstance(raw, list):
        items = cast("list[Any]", raw)
        resolved_items = cast("list[Any]", plain) if isinstance(plain, list) else [None] * len(items)
        for value, item in zip(items, resolved_items, strict=True):
            yield from _environment_values(value, item)
    elif isinstance(raw, str) and "oc.env" in raw:
        for path in _leaves(plain):
            value: Any = plain
            for key in path:
                value = value[key]
            yield str(value) if value is not None else "", raw
        for name in re.findall(r"oc\.env:\s*(\w+)", raw):
            yield os.environ.get(name, ""), f"${{oc.env:{name}}}"


def _escape_env(node: Any) -> Any:
    """Return the tree with every text that reads the environment escaped, so that it stays a literal."""
    if isinstance(node, dict):
        return {key: _escape_env(value) for key, value in cast("dict[str, Any]", node).items()}
    if isinstance(node, list):
        return [_escape_env(value) for value in cast("list[Any]", node)]
    if isinstance(node, str) and "oc.env" in node:
        return node.replace("${", r"\${")
    return node


def references(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys whose whole value is `${another.key}`, with that value."""
    if isinstance(node, dict):
        for key, value in cast("dict[str, Any]", node).items():
            yield from references(value, f"{path}.{key}" if path else key)
    elif isinstance(node, str) and re.fullmatch(r"\$\{[\w.]+\}", node):
        yield path, node


def overlay(full: Any, secret: Any, plain: Any) -> Any:
    """Return `full` with the values of `secret` wherever `secret` differs from `plain`."""
    if isinstance(full, dict) and isinstance(secret, dict):
        merged = dict(cast("dict[str, Any]", full))
        for key in merged.keys() & cast("dict[str, Any]", secret).keys():
            merged[key] = overlay(merged[key], secret[key], plain[key])
        return merged
    if isinstance(full, (list, tuple)) and isinstance(secret, list):
        triples = zip(full, secret, plain, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return [overlay(*triple) for triple in triples]
    return secret if secret != plain else full
