"""Section `backbone`: which pretrained model, and how it is loaded."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from silotune.config.section import Section


class BackboneConfig(Section):
    """The pretrained model and how this machine loads it; hashable, as equal sections can share a loaded model.

    Written to files, it is the name alone where the other keys have their defaults.

    Attributes:
        name: `default` (offline MiniLM), a hub id, or a local folder; for `silotune cost` also a shape.
        revision: branch, tag or commit of a hub id; None: the hub's main branch.
        attention: the attention implementation. `auto` is `eager` on a CPU and transformers' default elsewhere; `flash`
            needs a GPU and the package flash-attn.
    """

    model_config = ConfigDict(frozen=True)

    common: ClassVar[tuple[str, ...]] = ("attention",)

    name: str = "default"
    revision: str | None = Field(None, min_length=1)
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        defaults = {key: field.default for key, field in type(self).model_fields.items()}
        chosen = {key: value for key, value in handler(self).items() if value != defaults[key]}
        return self.name if chosen.keys() <= {"name"} else {"name": self.name} | chosen
