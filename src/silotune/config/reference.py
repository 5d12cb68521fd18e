"""Every key of the configuration with its type, default and meaning, for people and, as JSON schema, for editors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from typing_extensions import override

from silotune.config.parse import preset_names
from silotune.config.registries import METHODS, TUNERS, Registry
from silotune.config.schema import Config
from silotune.config.section import Choice, ExtensibleSection, Section
from silotune.config.trees import NAMED, SECTIONS

PAGE = "docs/configuration.md"

_NAMES = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", dict: "mapping", NoneType: "none"}

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

_CHOSEN: dict[str, Registry[Any]] = {"method": METHODS, "tuner": TUNERS}
"""Sections whose keys are the options of the class that `name` chooses."""


@dataclass(frozen=True)
class Key:
    """A key of the configuration (`train.lr`): what it takes, with its bounds, its default ("–" for none), its meaning.

    `owners` are the choices under which it has an effect, as `method=moon`; empty: always.
    """

    name: str
    type: str
    default: str
    meaning: str
    owners: tuple[str, ...] = ()


def sections() -> dict[str, str]:
    """Return section → its meaning, in the schema's order; "" is the keys without a section."""
    meanings = {"": "Keys without a section."}
    for name, field in Config.model_fields.items():
        if name in _CHOSEN:
            meanings[name] = field.description or ""
        elif (model := section_of(field)) is not None:
            meanings[name] = (inspect.getdoc(model) or "").partition("\n")[0]
    return meanings


def keys_of(section: str) -> list[Key]:
    """Return a section's keys; "" stands for those without a section.

    The built-in methods' and tuners' options are the keys of `method` and `tuner`; `owners` says whose they are.
    """
    if section == "":
        fields = Config.model_fields.items()
        return [_key(name, name, field) for name, field in fields if section_of(field) is None]
    if section in _CHOSEN:
        return _chosen_keys(section, _CHOSEN[section])
    model = section_of(Config.model_fields[section])
    assert model is not None, "callers name a section"
    prefix = f"{section}.NAME." if section == "silos" else f"{section}."
    choice = section if model.chooser == "name" else f"{section}.{model.chooser}"
    return _model_keys(
        prefix, model, {key: [f"{choice}={name}" for name in names] for key, names in model.owners.items()}
    )


def all_keys() -> dict[str, Key]:
    """Return every key by its name; of several methods' or tuners' options of one name, the first."""
    keys: dict[str, Key] = {}
    for section in sections():
        for key in keys_of(section):
            keys.setdefault(key.name, key)
    return keys


def _chosen_keys(section: str, registry: Registry[Any]) -> list[Key]:
    """Return the key `name`, and the options of the built-in methods or tuners."""
    field = Config.model_fields[section]
    names = ", ".join(f"`{name}`" for name in registry)
    name_key = Key(f"{section}.name", names, f"`{field.default.name}`", field.description or "")
    return [name_key, *_option_keys(section, registry)]


def _option_keys(section: str, registry: Registry[Any]) -> list[Key]:
    """Return each option of a registry's built-in classes once, with those that have it."""
    options: dict[Key, list[str]] = {}
    for name in _built_in(registry):
        model = getattr(registry.find(name), "Options", None)
        for key in [] if model is None else _model_keys(f"{section}.", model):
            options.setdefault(key, []).append(f"{section}={name}")
    return [replace(key, owners=tuple(owners)) for key, owners in options.items()]


def _built_in(registry: Registry[Any]) -> list[str]:
    """Return the names of what comes with silotune, without reserved ones, whose options are keys of the section."""
    return [
        name
        for name in registry
        if name not in registry.reserved and registry.find(name).__module__.startswith("silotune.")
    ]


def _model_keys(prefix: str, model: type[BaseModel], owners: Mapping[str, list[str]] = {}) -> list[Key]:
    keys: list[Key] = []
    options: list[Key] = []
    for name, field in model.model_fields.items():
        key = _key(f"{prefix}{name}", name, field, tuple(owners.get(name, ())))
        if name == "name" and issubclass(model, ExtensibleSection):
            section, registry = model.section_name(), model.registry
            named = ", ".join(f"`{choice}`" for choice in (*registry.reserved, *_built_in(registry)))
            options = _option_keys(section, registry)
            steps = f"list of steps: `clip`, `laplace` or `gaussian`, and one of {named}, or a plug-in's"
            key = replace(key, type=steps if section == "uplink" else f"{named}, or a plug-in's")
        keys.append(key)
    return [*keys, *options]


def _key(name: str, word: str, field: FieldInfo, owners: tuple[str, ...] = ()) -> Key:
    if field.annotation is Choice:
        kind, default = f"name of a {word}, with its options", f"`{field.default.name}`"
    else:
        kind, default = _bounded(type_text(field.annotation), field), default_text(field)
    return Key(name, kind, default, field.description or "", owners)


def type_text(annotation: Any) -> str:
    """Describe a type in words for the reference of keys."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return type_text(arguments[0])
    if kind is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if kind in (Union, UnionType):
        return " or ".join(type_text(one) for one in arguments if one is not NoneType)
    if kind in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if kind is dict:
        return "mapping"
    return _NAMES.get(annotation, "mapping")


def _bounded(kind: str, field: FieldInfo) -> str:
    if not kind.startswith(("integer", "number")):
        return kind
    bounds = [
        f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value:,}"
        for metadata in field.metadata
        for name, sign in _BOUNDS.items()
        if (value := getattr(metadata, name, None)) is not None
    ]
    return f"{kind} {' and '.join(bounds)}" if bounds else kind


def default_text(field: FieldInfo) -> str:
    """Return a field's default as a word of the command line."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", [], (), {}):
        return "–"
    if isinstance(value, BaseModel):
        fields = value.model_dump(exclude_defaults=True)
        return f"`{fields}`" if fields else "its defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{','.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a key of `Config` holds, alone or in a list; None for plain keys."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if inspect.isclass(kind) and issubclass(kind, Section):
            return kind
    return None


# -- for editors -------------------------------------------------------------------------------------------------------

_WORDS = {"type": "string", "description": "words with commas between"}

_NUMBER = {"type": "string", "pattern": r"^[-+]?[0-9.]+[eE][-+]?[0-9]+$"}
"""A number as `1e-3`, which YAML 1.1 takes for text."""


class _FileSchema(GenerateJsonSchema):
    """Allows the other ways to write a value: a list as words with commas, names that are whole numbers, `1e-3`."""

    @override
    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), _NUMBER]}

    @override
    def list_schema(self, schema: core_schema.ListSchema) -> dict[str, Any]:
        array = super().list_schema(schema)
        if array.get("items", {}).get("type") == "string":
            array["items"] = {"type": ["string", "integer"]}
        return array if "$ref" in array.get("items", {}) else {"anyOf": [array, _WORDS]}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a YAML file: all keys, their values and meanings, and `preset`.

    It is wider than the checks of `load_config`: keys of plug-ins and dotted keys are allowed, and it knows no keys
    without effect.
    """
    schema = Config.model_json_schema(mode="validation", schema_generator=_FileSchema)
    properties, meanings = schema["properties"], sections()
    for name, one in properties.items():
        if name in NAMED:
            properties[name] = {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}, one]}
        elif name in SECTIONS:
            properties[name] = {"anyOf": [{"type": "null"}, one]}
        if name in meanings:
            properties[name]["description"] = meanings[name]
    for name, registry in (("method", METHODS), ("tuner", TUNERS)):
        options: dict[str, Any] = {key.name.partition(".")[2]: {"description": key.meaning} for key in keys_of(name)}
        options["name"] = {"anyOf": [{"enum": [*registry]}, {"type": "string"}]}  # completed; plug-ins are allowed
        properties[name] = {
            "anyOf": [*options["name"]["anyOf"], {"type": "object", "properties": options}, {"type": "null"}],
            "description": meanings[name],
            "default": Config.model_fields[name].default.name,
        }
    properties["preset"] = {"enum": preset_names(), "description": "a preset on which this file builds"}
    return schema | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "silotune configuration",
        "description": "A run, comparison or sweep of silotune.",
        "patternProperties": {r"^[a-z_]+\.": {}},  # dotted keys
    }
