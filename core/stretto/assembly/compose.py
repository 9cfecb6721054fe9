"""Turn a run file into a `RunConfig` with the structs of the chosen components, and check every key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from stretto.assembly import sections
from stretto.assembly.contracts import CONTRACTS, expect_contract
from stretto.assembly.plugins import BASES, Origin, Plugins
from stretto.component import Component, ComponentParts, Context, Kind
from stretto.config import EvaluationConfig, Groups, RunConfig, VariantConfig, Variants
from stretto.errors import PluginError, StrettoError, error_text, foreign_frames, nearest, offer, place_of

_PARTS = "parts"
"""Key of a section whose type may be `ComponentParts`."""
_LOGIN = re.compile(r"://[^/\s@]*@")
"""The login in a URL. Messages show `<login>` instead."""


@dataclass(frozen=True)
class Composed:
    """A run file that has been read, merged with overrides and checked key by key."""

    config: RunConfig
    plugins: Plugins
    components: Mapping[str, Component[Any]]
    """Dotted key of a section -> its component. The keys in a list are `trackers.0`, `trackers.1`, ..."""
    document: Mapping[str, Any]
    """The run's keys and values with all defaults, for `config.yaml`. Secrets stay interpolations."""
    written: tuple[str, ...] = ()
    """Dotted keys that the run file or an override sets."""
    notices: tuple[str, ...] = ()
    """Decisions made for the user, as text to show."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(dotted key that was null, why it has its value)."""
    place: Callable[[str], str] = str
    """Returns where a key was written: `run.yaml:14: training.lr`, or `override training.lr`."""
    references: tuple[tuple[str, str], ...] = ()
    """(dotted key, the reference that is its value, such as `${steps}`)."""
    redact: Callable[[str], str] = str
    """Replaces values from the environment by their interpolations."""

    def section(self, path: str) -> Any:
        """Return the struct at a dotted key."""
        node: Any = self.config
        for part in path.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)
        return node

    def with_numbers(self, numbers: Mapping[str, tuple[int, str]]) -> Composed:
        """Return the run with these numbers of workers: dotted key -> (number, place that set the number)."""
        config = self.config
        for path, (number, _) in numbers.items():
            config = _replaced(config, path.split("."), number)

        def place(path: str) -> str:
            return numbers[path][1] if path in numbers else self.place(path)

        return replace(self, config=config, place=place)

    def with_value(self, path: str, value: object, reason: str = "") -> Composed:
        """Return the run with another value at a dotted key of its config and its document."""
        *parents, key = path.split(".")
        document = node = dict(self.document)
        for parent in parents:
            node[parent] = node = dict(node[parent])
        node[key] = value
        reasons = (*self.reasons, (path, reason)) if reason else self.reasons
        config = _replaced(self.config, [*parents, key], value)
        return replace(self, config=config, document=document, reasons=reasons)

    def make(self, path: str, context: Context, section: Any = None) -> Any:
        """Make the component of a section. Raise ContractError if the component breaks its contract."""
        section = self.section(path) if section is None else section
        with _redacted_errors(self.redact):
            parts = getattr(section, _PARTS, None)
            arguments = (
                [{name: self.make(f"{path}.{_PARTS}.{name}", context) for name in parts.__struct_fields__}]
                if isinstance(parts, ComponentParts)
                else []
            )
            try:
                component = self.components[path].make(section, context, *arguments)
            except StrettoError:
                raise
            except Exception as error:
                raise PluginError(self.blame(error, path)) from error
        expect_contract(component, CONTRACTS[sections.kind_of(path)], self.origin(path).label)
        return component

    def origin(self, path: str) -> Origin:
        """Return the plugin that the component of a section comes from."""
        return self.plugins.origin(sections.kind_of(path), self.section(path).use)

    def blame(self, error: BaseException, path: str = "") -> str:
        """Name the component whose code is innermost in the error's traceback, such as `algorithm 'median' of
        acme 1.2 raised ValueError: … (median.py:23)`. If the traceback has no component's files, name the
        component of the section at `path`; without `path`, return an empty text."""
        owners = {
            section: self.origin(section) for section in ([path] if path else []) + list(self.components)
        }
        for frame in reversed(foreign_frames(error)):
            for origin in owners.values():
                if frame.filename.startswith(origin.files):
                    return f"{origin.label} raised {place_of(error, origin.files)}"
        return f"{owners[path].label} raised {place_of(error)}" if path else ""

    def explain(self, error: BaseException, log: Path | str) -> str:
        """Return an error as text; if stretto did not raise it, with plugin, line and the file `log`."""
        if isinstance(error, StrettoError):
            return self.redact(str(error))
        return self.redact(f"{self.blame(error) or error_text(error)}; traceback in {log}")


def compose(
    file: Path, overrides: Sequence[str] = (), *, document: Mapping[str, Any] | None = None
) -> Composed:
    """Read a run file, or `document` in its place, merge `key=value` overrides, and convert every section."""
    from stretto.assembly import run_file  # OmegaConf is slow to import, and only this function needs it

    try:
        source = run_file.RunFile(file, overrides, document)
        with _redacted_errors(source.redact):
            plain, secret = run_file.read(source)
            composed = _Composer(source, Plugins(), deepcopy(plain)).run()
            for document in (plain, secret):
                _inherit_sections(document)
            full = run_file.overlay(msgspec.to_builtins(composed.config), secret, plain)
    except RecursionError as error:
        raise run_file.nested_too_deeply(file) from error
    references = run_file.references(source.raw)
    return replace(
        composed,
        document=full,
        written=source.written(),
        place=source.place,
        references=tuple(each for each in references if value_at(full, each[0]) is not None),
        redact=source.redact,
    )


@contextmanager
def _redacted_errors(redact: Callable[[str], str]) -> Generator[None]:
    try:
        yield
    except StrettoError as error:
        error.args = (redact(str(error)),)
        raise


def compose_mapping(mapping: Mapping[str, Any]) -> Composed:
    """Convert a run that was composed before, such as the run that the kernel sends to a worker."""
    return _Composer(sections.KeySource(Path("config")), Plugins(), dict(mapping)).run()


def _inherit_sampling(data: dict[str, Any]) -> None:
    sampling, evaluation = data.get("sampling"), data.get("evaluation")
    if isinstance(sampling, dict) and isinstance(evaluation, dict):
        evaluation = cast("dict[str, Any]", evaluation)
        if isinstance(changed := evaluation.get("sampling"), dict):
            evaluation["sampling"] = sampling | changed


def _inherit_sections(data: dict[str, Any]) -> None:
    variants = data.get("variants")
    for variant in cast("dict[str, Any]", variants).values() if isinstance(variants, dict) else ():
        if not isinstance(variant, dict):
            continue  # `_named_sections` refuses it
        variant = cast("dict[str, Any]", variant)
        for key in ("sampling", *sections.VARIANT_SECTIONS):
            run, own = (_as_mapping(section.get(key)) for section in (data, variant))
            default = (
                _default_use(sections.VARIANT_SECTIONS[key]) if key in sections.VARIANT_SECTIONS else None
            )
            if own is not None and own.get("use") in (None, (run or {}).get("use", default)):
                variant[key] = {**(run or {}), **own}


def _as_mapping(section: Any) -> dict[str, Any] | None:
    """Return a section as a mapping; None if it is not set or is not a section."""
    if isinstance(section, str):
        return {"use": section}
    return cast("dict[str, Any]", section) if isinstance(section, dict) else None


class _Composer:
    def __init__(self, source: sections.KeySource, plugins: Plugins, data: dict[str, Any]) -> None:
        self.source = source
        self.plugins = plugins
        self.data = data
        self.components: dict[str, Component[Any]] = {}
        self.notices: list[str] = []

    def run(self) -> Composed:
        data = self.data
        self._load_paths()
        structs = self._structs_of([*sections.SECTIONS, *self._named_sections()])
        # Variants inherit keys of the run's own sections, which are complete now.
        structs |= self._structs_of(self._variant_sections())
        struct = self._struct(structs, self._lists(), list(data.get("variants") or {}))
        _expand_names(data, struct)
        self._refuse_unknown(data, struct, "", struct)
        self._refuse_numbers(data, "")
        _inherit_sampling(data)
        config = cast("RunConfig", self._resolve_paths(self._convert(struct), ""))
        document = msgspec.to_builtins(config)
        return Composed(config, self.plugins, self.components, document, notices=tuple(self.notices))

    def _structs_of(self, paths: Iterable[str]) -> dict[str, type[msgspec.Struct]]:
        structs: dict[str, type[msgspec.Struct]] = {}
        for path in paths:
            if (section := self._section(path)) is not None:
                component = self._component(path, section)
                self._drop_stale_keys(path, section, component)
                structs[path] = self._with_parts(path, component.config)
        return structs

    def _with_parts(self, path: str, struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
        fields = {field.name: field.type for field in _fields(struct)}
        if fields.get(_PARTS) is not ComponentParts:
            return struct
        names = [str(name) for name in self._mapping(f"{path}.{_PARTS}")]
        for name in names:
            self._expect_name(f"{path}.{_PARTS}.{name}", name, "a part")
        structs = self._structs_of(f"{path}.{_PARTS}.{name}" for name in names)
        part_fields = [(name, structs[f"{path}.{_PARTS}.{name}"]) for name in names]
        return _narrowed(struct, [(_PARTS, _narrowed(ComponentParts, part_fields))])

    def _mapping(self, path: str) -> dict[str, Any]:
        entries = value_at(self.data, path) or {}
        if not isinstance(entries, dict):
            raise self.source.error(path, f"expected a mapping of names, found {entries!r}", entries)
        return cast("dict[str, Any]", entries)

    def _expect_name(self, path: str, name: str, what: str) -> None:
        if not re.fullmatch(sections.GROUP_NAME, name) or name in sections.SECTIONS:
            raise self.source.error(
                path,
                f"{name!r} cannot be the name of {what}; expected a-z, 0-9 and _, a letter first, and not "
                "the name of a section",
            )

    def _load_paths(self) -> None:
        paths = self.data.get("plugins") or []
        if not isinstance(paths, (list, tuple)):
            raise self.source.error("plugins", f"expected a list of files, found {paths!r}", paths)
        files: list[str] = []
        for index, path in enumerate(cast("list[Any]", paths)):
            file = self._find_file(f"plugins.{index}", str(path))
            try:
                self.plugins.add_path(file)
            except PluginError as error:
                raise PluginError(f"{self.source.place('plugins')}: {error}") from error
            files.append(str(file))
        if files:
            self.data["plugins"] = files

    def _named_sections(self) -> Iterator[str]:
        """Yield the sections whose names the user chooses, such as `groups.critics`."""
        for path in sections.NAMED_SECTIONS:
            for name in self._mapping(path):
                self._expect_name(f"{path}.{name}", str(name), "a worker group")
                yield f"{path}.{name}"

    def _variant_sections(self) -> list[str]:
        """Let variants inherit missing keys. Return sections with a component: `variants.NAME.workflow`."""
        paths: list[str] = []
        for name, variant in self._mapping("variants").items():
            path = f"variants.{name}"
            if not re.fullmatch(sections.VARIANT_NAME, str(name)):
                raise self.source.error(
                    path,
                    f"{name!r} cannot be the name of a variant; expected at most 32 of a-z, 0-9 and _, a "
                    "letter first",
                )
            if not isinstance(variant, dict):
                raise self.source.error(path, f"expected a mapping with `weight`, found {variant!r}", variant)
            paths += [f"{path}.{key}" for key in sections.VARIANT_SECTIONS if variant.get(key) is not None]
        _inherit_sections(self.data)
        return paths

    def _section(self, path: str) -> dict[str, Any] | None:
        """Return the mapping at `path`. Add a missing one if its kind has a default, else return None."""
        owner, _, key = path.rpartition(".")
        parent = value_at(self.data, owner)
        if not isinstance(parent, dict):
            return None
        parent = cast("dict[str, Any]", parent)
        if parent.get(key) is None:
            if _default_use(sections.kind_of(path)) is None:
                return None  # `_convert` reports a missing section that is required
            parent[key] = {}
        section = parent[key] = self._choice(path, parent[key])
        return section

    def _choice(self, path: str, value: Any) -> dict[str, Any]:
        """Return a section as a mapping; the name of a component stands for a mapping with only `use`."""
        section = _as_mapping(value)
        if section is None:
            hint = sections.instead_of_list(path)
            raise self.source.error(
                path, f"expected a name or a mapping with `use`, found {value!r}{hint}", value
            )
        return section

    def _component(self, path: str, section: dict[str, Any]) -> Component[Any]:
        kind = sections.kind_of(path)
        name = section.setdefault("use", _default_use(kind))
        use_key = f"{path}.use"
        if not isinstance(name, str):
            names = ", ".join(self.plugins.names(kind)) or "none"
            fault = "is missing" if name is None else f"is {name!r}"
            article = "an" if kind[0] in "aeiou" else "a"
            raise self.source.error(
                use_key, f"{fault}; expected the name of {article} {kind}; installed: {names}"
            )
        try:
            component = self.plugins.get(kind, name)
        except PluginError as error:
            raise PluginError(f"{self.source.place(use_key)}: {error}", kind=kind, name=name) from error
        self.components[path] = component
        return component

    def _drop_stale_keys(self, path: str, section: dict[str, Any], component: Component[Any]) -> None:
        """If an override replaces a section's component, remove keys that only the previous component has."""
        if not self.source.is_overridden(f"{path}.use"):
            return
        known, previous = _keys_of(component), self._former_keys(path)
        stale = [
            key
            for key in section
            if key not in known
            and (previous is None or key in previous)
            and not self.source.is_overridden(f"{path}.{key}")
        ]
        for key in stale:
            del section[key]
        if stale:
            self.notices.append(
                f"{path}: {component.name!r} does not use {', '.join(stale)} of {self.source.file}"
            )

    def _former_keys(self, path: str) -> set[str] | None:
        """Return the keys of the component that the run file names; None if the component does not load."""
        try:
            return _keys_of(self.plugins.get(sections.kind_of(path), self.source.component_in_file(path)))
        except PluginError:
            return None

    def _lists(self) -> dict[str, list[type[msgspec.Struct]]]:
        structs: dict[str, list[type[msgspec.Struct]]] = {}
        for path in sections.LIST_SECTIONS:
            items = self.data.get(path) or []
            if not isinstance(items, (list, tuple)):
                raise self.source.error(path, f"expected a list, found {items!r}", items)
            places = {f"{path}.{index}": item for index, item in enumerate(cast("list[Any]", items))}
            chosen = {place: self._choice(place, item) for place, item in places.items()}
            self.data[path] = [*chosen.values()]
            structs[path] = [self._component(place, section).config for place, section in chosen.items()]
        return structs

    def _struct(
        self,
        structs: Mapping[str, type[msgspec.Struct]],
        lists: Mapping[str, list[type[msgspec.Struct]]],
        variants: Iterable[str],
    ) -> type[msgspec.Struct]:
        fields: list[tuple[str, Any]] = [item for item in structs.items() if "." not in item[0]]
        if groups := _below("groups", structs):
            fields.append(("groups", _narrowed(Groups, groups)))
        nested = [(name, _narrowed(VariantConfig, _below(f"variants.{name}", structs))) for name in variants]
        if nested:
            fields.append(("variants", _narrowed(Variants, nested)))
        if evaluation := _below("evaluation", structs):
            fields.append(("evaluation", _narrowed(EvaluationConfig, evaluation)))
        for path, items in lists.items():
            fields.append((path, tuple[tuple(items)] if items else tuple[()]))  # type: ignore[misc]
        return _narrowed(RunConfig, fields)

    def _refuse_unknown(
        self, data: Any, struct: type[msgspec.Struct], path: str, run: type[msgspec.Struct]
    ) -> None:
        """Refuse unknown keys and name the nearest known key, which msgspec does not do."""
        if not isinstance(data, dict):
            return
        known = {field.encode_name: field for field in _fields(struct)}
        for key, value in cast("dict[str, Any]", data).items():
            key_path = f"{path}.{key}" if path else str(key)
            if key not in known and key_path in sections.REMOVED_KEYS:
                raise self.source.error(
                    key_path, f"{key!r} is gone; {sections.REMOVED_KEYS[key_path]}", value
                )
            if key not in known:
                hint = _other_place(str(key), known, run) or offer(str(key), known, "accepted here")
                raise self.source.error(key_path, f"unknown key {key!r}{hint}", value)
            for nested, path_and_value in _structs_in(known[key].type, value, key_path):
                self._refuse_unknown(path_and_value[1], nested, path_and_value[0], run)

    def _refuse_numbers(self, value: Any, path: str) -> None:
        """Refuse a number, at any key, that is not finite, or too large for messages between processes."""
        if isinstance(value, dict):
            for key, item in cast("dict[str, Any]", value).items():
                self._refuse_numbers(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(cast("Sequence[Any]", value)):
                self._refuse_numbers(item, f"{path}.{index}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise self.source.error(
                path,
                f"expected a finite number; found {value} (null is no limit, where a key takes it)",
                value,
            )
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise self.source.error(path, f"expected a whole number of at most 64 bits; found {value}", value)

    def _convert(self, struct: type[msgspec.Struct]) -> RunConfig:
        data = self.data
        try:
            return cast("RunConfig", msgspec.convert(data, struct))
        except msgspec.ValidationError as error:
            message, path = _message_and_path(error)
            missing = re.match(r"Object missing required field `(\w+)`", message)
            if missing:
                path = f"{path}.{missing[1]}" if path else missing[1]
                raise self.source.error(path, "this key is required but missing") from error
            from_key = ""
            if origin := self._reference_at(path):
                try:
                    msgspec.convert(value_at(data, origin), _annotation_at(struct, origin))
                    from_key = f", from ${{{origin}}}"
                except msgspec.ValidationError as cause:  # the fault is at the key of the reference
                    message, path = _message_and_path(cause)[0], origin
            value, annotation = value_at(data, path), _annotation_at(struct, path)
            text = _plain_message(message, value, annotation)
            shown = _LOGIN.sub("://<login>@", repr(value))
            value_text = "" if isinstance(value, dict) else f"; found {shown}{from_key}"
            hint = _hint(path, message, value, annotation)
            raise self.source.error(path, f"{text}{value_text}{hint}", value) from error

    def _reference_at(self, path: str) -> str:
        """Follow the references from `path`, and return the last key; empty if the value is no `${key}`."""
        match = re.fullmatch(r"\$\{([A-Za-z_][\w.]*)\}", str(value_at(self.source.raw, path)))
        return (self._reference_at(match[1]) or match[1]) if match else ""

    def _resolve_paths(self, struct: msgspec.Struct, path: str) -> msgspec.Struct:
        changes: dict[str, Any] = {}
        for field in _fields(type(struct)):
            value = getattr(struct, field.name)
            key_path = f"{path}.{field.name}" if path else field.name
            if isinstance(value, msgspec.Struct):
                changes[field.name] = self._resolve_paths(value, key_path)
            elif isinstance(value, dict):
                mapping = cast("dict[str, Any]", value)
                changes[field.name] = {
                    key: self._resolve_paths(item, f"{key_path}.{key}")
                    if isinstance(item, msgspec.Struct)
                    else item
                    for key, item in mapping.items()
                }
            elif isinstance(value, str):
                changes[field.name] = self._resolve_path(marks_of(field.type), value, key_path)
            elif isinstance(value, tuple) and (marks := _marks_of_items(field.type)):
                items = cast("tuple[str, ...]", value)
                changes[field.name] = tuple(
                    self._resolve_path(marks, item, f"{key_path}.{index}") for index, item in enumerate(items)
                )
        return msgspec.structs.replace(struct, **changes) if changes else struct

    def _resolve_path(self, marks: set[str], value: str, path: str) -> str:
        module, _, name = value.rpartition(":")
        if "local_path" in marks:
            resolved = str(self._find_file(path, value))
        elif "model" in marks and (local := find_path(value, self.source.file)):
            resolved = str(local)
        elif "importable" in marks and module.endswith(".py"):
            resolved = f"{self._find_file(path, module)}:{name}"
        else:
            resolved = value
        if not is_utf8(resolved):  # messages and records are UTF-8
            raise self.source.error(
                path, f"the name {resolved!r} is not UTF-8: rename the file or folder", value
            )
        return resolved

    def _find_file(self, key: str, path: str) -> Path:
        local = find_path(path, self.source.file)
        if local is None:
            raise self.source.error(
                key,
                f"no such file or folder: {path!r} (searched the working directory and the "
                "run file's folder)",
                path,
            )
        return local


def _below(path: str, structs: Mapping[str, type[msgspec.Struct]]) -> list[tuple[str, Any]]:
    return [
        (key.rpartition(".")[2], struct) for key, struct in structs.items() if key.rpartition(".")[0] == path
    ]


def _narrowed(struct: type[msgspec.Struct], fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    return msgspec.defstruct(struct.__name__, fields, bases=(struct,), kw_only=True, frozen=True)


def _keys_of(component: Component[Any]) -> set[str]:
    return {field.encode_name for field in _fields(component.config)}


def _default_use(kind: Kind) -> str | None:
    use = next(field for field in _fields(BASES[kind]) if field.name == "use")
    return None if use.required else use.default


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. File names of other encodings have surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def find_path(path: str, run_file: Path) -> Path | None:
    """Return the absolute path of a file in the working directory or the run file's folder; else None."""
    for candidate in (Path(path).expanduser(), run_file.parent / path):
        if candidate.exists():
            # Do not resolve links: the interpreter of a virtual environment is one.
            return candidate.absolute()
    return None


def _structs_in(
    annotation: Any, value: Any, path: str
) -> Iterator[tuple[type[msgspec.Struct], tuple[str, Any]]]:
    """Yield the struct types in an annotation, each with the (path, value) that has to match the type."""
    info = _type_info(annotation)
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


_fields = cache(msgspec.structs.fields)
"""Cached, because msgspec evaluates all annotations in each call."""
_known_type_info = cache(msgspec.inspect.type_info)


def _type_info(annotation: Any) -> msgspec.inspect.Type:
    """Return msgspec's description of a type, cached because composing asks for a type several times."""
    try:
        return _known_type_info(annotation)
    except TypeError:  # metadata that cannot be hashed
        return msgspec.inspect.type_info(annotation)


def _replaced(struct: Any, path: Sequence[str], value: Any) -> Any:
    key, *rest = path
    new = _replaced(getattr(struct, key), rest, value) if rest else value
    return msgspec.structs.replace(struct, **{key: new})


def marks_of(annotation: Any) -> set[str]:
    """Return the marks of `stretto.component` that a field's type carries, such as `local_path`."""
    info = _type_info(annotation)
    return {
        (part.extra or {}).get("stretto", "")
        for part in (info, *getattr(info, "types", ()))
        if isinstance(part, msgspec.inspect.Metadata)
    }


def _marks_of_items(annotation: Any) -> set[str]:
    """Return the marks of the items of a list of any length; empty for another type."""
    info = _type_info(annotation)
    item = info.item_type if isinstance(info, msgspec.inspect.VarTupleType) else None
    return {(item.extra or {}).get("stretto", "")} if isinstance(item, msgspec.inspect.Metadata) else set()


def _other_place(key: str, known: Collection[str], run: type[msgspec.Struct]) -> str:
    """Return `"; did you mean 'training.lr'?"` for a key of another project, or of another section."""
    typing_error = get_close_matches(key, known, 1, 0.85)  # such as `beta` in place of `betas`
    path = "" if typing_error else sections.FOREIGN_KEYS.get(key.lower(), "")
    if not path and not nearest(key, known):
        path = min((path for path in _keys_in(run) if path.rpartition(".")[2] == key), key=len, default="")
    place = "" if "." in path else "the top-level "
    return f"; did you mean {place}{path!r}?" if path else ""


def _keys_in(struct: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    for field in _fields(struct):
        key = f"{path}.{field.encode_name}" if path else field.encode_name
        yield key
        for part, _ in _structs_in(field.type, None, ""):
            yield from _keys_in(part, key)


def _expand_names(data: Any, struct: type[msgspec.Struct]) -> None:
    """Expand `correction: none` to `correction: {use: none}` for every field whose struct has `use`."""
    if not isinstance(data, dict):
        return
    section, known = cast("dict[str, Any]", data), _fields(struct)
    for field in known:
        structs = [part for part, _ in _structs_in(field.type, None, "")]
        if isinstance(section.get(field.name), str) and any(
            "use" in part.__struct_fields__ for part in structs
        ):
            section[field.name] = {"use": section[field.name]}
        for part, (_, value) in _structs_in(field.type, section.get(field.name), ""):
            _expand_names(value, part)


def _message_and_path(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's error into its message and the dotted path of the value. The path ends at a mapping
    whose keys the user names, because msgspec leaves such a key out."""
    message, _, place = str(error).partition(" - at ")
    if place.startswith("`key` in "):
        message, place = f"a key: {message[0].lower()}{message[1:]}", place.removeprefix("`key` in ")
    path = place.strip("`").removeprefix("$").removeprefix(".").partition("[...]")[0]
    return message, path.replace("[", ".").replace("]", "")


def _hint(path: str, message: str, value: Any, annotation: Any) -> str:
    if message.startswith("Expected `str") and isinstance(value, (bool, int, float)):
        cause = ", because YAML reads yes, no, on and off as true or false" if isinstance(value, bool) else ""
        return f"; write the text in quotes{cause}"
    if str(value).lower() == "none" and "null" in message:
        return "; write null"
    if message.startswith("Expected `object") and not isinstance(value, dict):
        for struct, _ in _structs_in(annotation, None, ""):
            for field in _fields(struct):
                with suppress(msgspec.ValidationError):
                    msgspec.convert(value, field.type)
                    return f"; did you mean {path}.{field.encode_name}={value}?"
    return ""


def _plain_message(msgspec_message: str, value: Any, annotation: Any) -> str:
    if "matching regex" in msgspec_message:
        return f"expected {_description(annotation) or 'text of another form'}"
    info = _type_info(annotation)
    parts = getattr(info, "types", (info,))
    literals = [part for part in parts if isinstance(part, msgspec.inspect.LiteralType)]
    if literals and not isinstance(value, (dict, list)):
        allowed = [str(choice) for part in literals for choice in part.values]
        return f"expected one of {', '.join(allowed)}{nearest(str(value), allowed)}"
    text = msgspec_message[0].lower() + msgspec_message[1:].replace("`", "")
    return re.sub(r"\bobject\b", "a mapping", re.sub(r"\barray\b", "a list", text))


def _description(annotation: Any) -> str:
    info = _type_info(annotation)
    parts = (info, *getattr(info, "types", ()), getattr(info, "item_type", None))
    metadata = [part for part in parts if isinstance(part, msgspec.inspect.Metadata)]
    return next((str((part.extra_json_schema or {}).get("description", "")) for part in metadata), "")


def _annotation_at(struct: Any, path: str) -> Any:
    """Return the annotation at a dotted path; for an item of a list, the list's; Any without a field."""
    annotation: Any = struct
    for part in path.split("."):
        if part.isdigit():
            continue
        structs = [nested for nested, _ in _structs_in(annotation, None, "")]
        fields = {field.encode_name: field.type for nested in structs for field in _fields(nested)}
        if part not in fields:
            return Any
        annotation = fields[part]
    return annotation


def value_at(data: Any, path: str) -> Any:
    """Return the value at a dotted key of a document; None if it has none."""
    for part in path.split(".") if path else []:
        if isinstance(data, dict):
            data = cast("dict[str, Any]", data).get(part)
        elif isinstance(data, (list, tuple)) and part.isdigit():
            data = cast("list[Any]", data)[int(part)]
        else:
            return None
    return data
