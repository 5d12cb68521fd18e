"""`json_schema`: the schema of a configuration file for editors (`silotune config --json-schema`)."""

from __future__ import annotations

from typing import Any

from silotune.config.meanings import attributes
from silotune.config.presets import preset_names
from silotune.config.reference import keys_of, section_of, sections
from silotune.config.registries import METHODS, TUNERS
from silotune.config.schema import Config
from silotune.config.trees import NAMED, SECTIONS

_WORDS = {"type": "string", "description": "words with commas between"}

_NUMBER = {"type": "string", "pattern": r"^[-+]?[0-9.]+[eE][-+]?[0-9]+$"}
"""A number as `1e-3`, which YAML 1.1 takes for text."""

_ANNOTATIONS = ("default", "title", "description")
"""Keys of a schema beside its type."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a YAML file: all keys, their values and meanings, and `preset`.

    It is wider than the checks of `load_config`: keys of plug-ins and dotted keys are allowed, and it knows no keys
    without effect.
    """
    schema = Config.model_json_schema(mode="validation")
    for definition in schema["$defs"].values():
        for one in definition.get("properties", {}).values():
            _allow_words(one)
    properties = schema["properties"]
    for model in map(section_of, Config.model_fields.values()):
        if model is not None:
            described = schema["$defs"][model.__name__]
            for key, meaning in attributes(model).items():
                described["properties"][key]["description"] = meaning
    meanings = {**attributes(Config), **{name: meaning for name, meaning in sections().items() if name}}
    for name, one in properties.items():
        properties[name] = _short_form(name, one) | {"description": meanings[name]}
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


def _short_form(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key with the forms that files may have beside the full one."""
    if name in NAMED:
        return {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}, *_of(one)]}
    if name in SECTIONS:
        return {"anyOf": [{"type": "null"}, *_of(one)]}
    return one


def _of(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"$ref": one["$ref"]}] if "$ref" in one else list(one.get("anyOf", [one]))


def _allow_words(one: dict[str, Any]) -> None:
    """Allow other ways to write a value: a list as words with commas between, a name as a whole number, `1e-3`."""
    kinds = one.get("anyOf", [one])
    if "anyOf" not in one and one.get("type") == "number":
        kinds = [{key: one.pop(key) for key in [*one] if key not in _ANNOTATIONS}]
        one["anyOf"] = kinds
    if any(kind.get("type") == "number" for kind in kinds):
        one["anyOf"] = [*kinds, _NUMBER]
    for kind in kinds:
        if isinstance(kind.get("additionalProperties"), dict):
            _allow_words(kind["additionalProperties"])
    lists = [kind for kind in kinds if kind.get("type") == "array"]
    for kind in lists:
        if kind.get("items", {}).get("type") == "string":
            kind["items"] = {"type": ["string", "integer"]}
    if lists and not any(kind.get("type") == "string" for kind in kinds):
        kept = {key: value for key, value in one.items() if key in _ANNOTATIONS}
        forms = [{key: value for key, value in kind.items() if key not in kept} for kind in kinds]
        one.clear()
        one |= kept | {"anyOf": [*forms, _WORDS]}
