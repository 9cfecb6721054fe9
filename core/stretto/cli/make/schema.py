"""Config structs for people and editors: fields with types and meanings, and one JSON schema. A field's
meaning is the string literal under it in the class body."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec
from msgspec import inspect as types

from stretto.assembly.plugins import KINDS, Plugins, missing_extra
from stretto.assembly.sections import LIST_SECTIONS, NAMED_SECTIONS, SECTIONS, VARIANT_SECTIONS
from stretto.component import Component, ComponentParts, Kind
from stretto.config import EvaluationConfig, RunConfig, VariantConfig
from stretto.errors import PluginError


@dataclass(frozen=True)
class Field:
    """One key of a config struct, as text for people."""

    name: str
    type: str
    default: str
    """The default as a run file would have it; `required` if the key has none."""
    meaning: str


def fields_of(struct: type[msgspec.Struct]) -> list[Field]:
    """Return the fields of a config struct, those of base classes first.

    The fields of a nested struct follow the field that holds it: `lora.rank`, `pools.NAME.max`, `mcp[].url`.
    """
    meanings = _meanings(struct)
    hints = {field.name: field.type for field in _info(struct).fields}
    fields: list[Field] = []
    for field in msgspec.structs.fields(struct):
        name, info = field.encode_name, hints[field.name]
        fields.append(Field(name, _type_text(info), _default(field), meanings.get(field.name, "")))
        for place, inner in _nested(name, info):
            fields += [dataclasses.replace(each, name=f"{place}.{each.name}") for each in fields_of(inner)]
    return fields


def json_schema(plugins: Plugins) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of run files, with every installed component that can be loaded."""
    structs: list[type[msgspec.Struct]] = [RunConfig, EvaluationConfig, VariantConfig]
    choices: dict[Kind, list[type[msgspec.Struct]]] = {}
    for kind in KINDS:
        choices[kind] = [_choice(kind, component) for component in _usable(plugins, kind)]
        structs += choices[kind]
    refs, definitions = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    for struct in _all_structs(structs):
        if struct.__name__ in definitions:
            _describe(definitions[struct.__name__], struct)
    properties = {name: definition.get("properties", {}) for name, definition in definitions.items()}
    run = properties["RunConfig"]

    def section(kind: Kind, plain: dict[str, Any]) -> dict[str, Any]:
        return _section_schema(choices[kind], plugins.names(kind), plain)

    for key, kind in SECTIONS.items():
        owner, _, name = key.rpartition(".")
        keys = properties["EvaluationConfig"] if owner else run
        keys[name] = section(kind, keys[name])
    for key, kind in LIST_SECTIONS.items():
        run[key]["items"] = section(kind, {})
    for key, kind in NAMED_SECTIONS.items():
        run[key] = _names_schema(section(kind, {}), run[key])
    for key, kind in VARIANT_SECTIONS.items():
        choice = section(kind, properties["VariantConfig"][key])
        choice["anyOf"].append({"type": "object"})  # without `use`, the variant inherits the run's own keys
        properties["VariantConfig"][key] = choice
    for kind, structs_of_kind in choices.items():
        for struct in structs_of_kind:
            keys = properties[struct.__name__]
            if any(field.type is ComponentParts for field in msgspec.structs.fields(struct)):
                keys["parts"] = _names_schema(section(kind, {}), keys["parts"])
    run["variants"] = _names_schema({"$ref": "#/$defs/VariantConfig"}, run["variants"])
    assert refs
    for struct in _all_structs(structs):
        for field in _info(struct).fields:
            keys = properties[struct.__name__]
            if names := _names_of(field.type):
                keys[field.encode_name] = _allow_name(keys[field.encode_name], names)
    for keys in properties.values():
        for name, schema in keys.items():
            keys[name] = _allow_interpolation(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stretto run file",
        "$ref": "#/$defs/RunConfig",
        "$defs": definitions,
    }


def _nested(place: str, info: types.Type) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for part in _parts(info):
        match part:
            case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
                yield from _nested(f"{place}[]", item)
            case types.DictType(value_type=value):
                yield from _nested(f"{place}.NAME", value)
            case types.StructType(cls=cls):
                yield place, cls
            case _:
                pass


def _usable(plugins: Plugins, kind: Kind) -> Iterator[Component[Any]]:
    for name in plugins.names(kind):
        try:
            component = plugins.get(kind, name)
        except PluginError:
            continue  # `stretto plugins` shows the error; the schema covers only what loads
        if not missing_extra(component):
            yield component


def _choice(kind: Kind, component: Component[Any]) -> type[msgspec.Struct]:
    """Return the component's struct with `use` narrowed to the component's name."""
    return msgspec.defstruct(
        f"{kind}_{component.name}",
        [("use", cast("Any", Literal[component.name]))],
        bases=(component.config,),
        kw_only=True,
        namespace={"__doc__": component.summary},
    )


def _section_schema(
    choices: list[type[msgspec.Struct]], names: list[str], plain: dict[str, Any]
) -> dict[str, Any]:
    """Return the schema of a section: a component's name, or an object with that component's keys."""
    metadata = {key: plain[key] for key in ("description", "default") if key in plain}
    variants: list[dict[str, Any]] = [{"$ref": f"#/$defs/{struct.__name__}"} for struct in choices]
    if "default" in plain and plain["default"] is None:
        variants.append({"type": "null"})
    return {"anyOf": [{"enum": names}, *variants], **metadata}


def _names_of(info: types.Type) -> list[str]:
    for part in _parts(info):
        for field in _info(part.cls).fields if isinstance(part, types.StructType) else ():
            if field.encode_name == "use" and isinstance(field.type, types.LiteralType):
                return [str(value) for value in field.type.values]
    return []


def _names_schema(section: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": section, "description": plain["description"]}


def _mark(info: types.Type) -> str:
    """Return the mark of `stretto.component` that a field's type carries; empty if it has none."""
    return str((info.extra or {}).get("stretto", "")) if isinstance(info, types.Metadata) else ""


def _allow_name(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Allow a name instead of the value: `correction: none` means `correction: {use: none}`."""
    metadata = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return {"anyOf": [{"enum": names}, *schema.pop("anyOf", [schema])], **metadata}


def _allow_interpolation(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = {part.get("type") for part in schema.get("anyOf", [schema])}
    if not kinds & {"integer", "number", "boolean"}:
        return schema
    metadata = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    variants = schema.get("anyOf", [schema])
    return {"anyOf": [*variants, {"type": "string", "pattern": r"\$\{.+\}"}], **metadata}


def _describe(definition: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    meanings = _meanings(struct)
    for name, schema in definition.get("properties", {}).items():
        if meaning := meanings.get(name):
            if "$ref" in schema:
                schema: dict[str, Any] = {"allOf": [schema]}
                definition["properties"][name] = schema
            schema["description"] = meaning


def _all_structs(roots: list[type[msgspec.Struct]]) -> Iterator[type[msgspec.Struct]]:
    seen: set[type[msgspec.Struct]] = set()
    stack = list(roots)
    while stack:
        struct = stack.pop()
        if struct in seen:
            continue
        seen.add(struct)
        yield struct
        for field in _info(struct).fields:
            stack += [info.cls for info in _parts(field.type) if isinstance(info, types.StructType)]


def _parts(info: types.Type) -> Iterator[types.Type]:
    if isinstance(info, types.Metadata):
        yield from _parts(info.type)
    elif isinstance(info, types.UnionType):
        for part in info.types:
            yield from _parts(part)
    else:
        yield info


def _info(struct: type[msgspec.Struct]) -> types.StructType:
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    return info


def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return, by field name, the string literals under the fields of the class and of its base classes."""
    meanings: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls in (object, msgspec.Struct):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue  # `defstruct` made the class, so it has no source; its base classes have the meanings
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                meanings[field.target.id] = " ".join(below.value.value.split())
    return meanings


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    return msgspec.json.encode(value).decode()


_PLAIN: dict[type[types.Type], str] = {
    types.NoneType: "null",
    types.AnyType: "any",
    types.BoolType: "bool",
    types.StrType: "str",
}


def _type_text(info: types.Type) -> str:
    """Return a type as readable text: `int >= 1`, `str | null`, `one of wait, drop`."""
    match info:
        case types.Metadata(type=inner):
            return "path" if _mark(info) == "local_path" else _type_text(inner)
        case types.UnionType(types=parts):
            return " | ".join(_type_text(part) for part in parts)
        case types.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case types.IntType() | types.FloatType():
            name = "int" if isinstance(info, types.IntType) else "float"
            bounds = [(">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt)]
            return name + "".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)
        case types.StructType(cls=cls):
            return "map of names to sections" if cls is ComponentParts else cls.__name__
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return f"list of {_type_text(item)}"
        case types.DictType(key_type=key, value_type=value):
            return f"map of {_type_text(key)} to {_type_text(value)}"
        case _:
            return _PLAIN.get(type(info), type(info).__name__.removesuffix("Type").lower())
