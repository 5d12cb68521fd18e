"""The JSON schema of a configuration file, by which editors complete and check it (`silotune config --json-schema`)."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from typing_extensions import override

from silotune.config.presets import preset_names
from silotune.config.reference import keys_of, sections
from silotune.config.registries import METHODS, TUNERS
from silotune.config.schema import Config
from silotune.config.trees import NAMED, SECTIONS

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
        found = super().list_schema(schema)
        if found.get("items", {}).get("type") == "string":
            found["items"] = {"type": ["string", "integer"]}
        return found if "$ref" in found.get("items", {}) else {"anyOf": [found, _WORDS]}


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
