"""`Section`: refuses unknown and ineffective keys; `ShortSection`, also given by name; `Choice`; `Options`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from silotune.config.validators import listed


class Choice(BaseModel):
    """A name with options (`method`, `tuner`), which the named class checks."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The options without the name."""
        return dict(self.model_extra or {})


class Section(BaseModel):
    """A group of keys; refuses unknown keys, NaN, infinity, a yes or no for a number, and keys without effect.

    Attributes:
        owners: key → the choices under which it has an effect; a key without an entry always has.
        chooser: the key that holds the choice (a name or a list of names).
        common: the keys that stay when another name is chosen, if they have an effect there.
    """

    owners: ClassVar[Mapping[str, Collection[str]]] = {}
    chooser: ClassVar[str] = "name"
    common: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_yes_or_no_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            field = cls.model_fields[info.field_name]
            says_it_itself = any(isinstance(check, BeforeValidator) for check in field.metadata)
            if {int, float} & {field.annotation, *get_args(field.annotation)} and not says_it_itself:
                raise ValueError(f"must be a number (got {value})")
        return value

    @model_validator(mode="after")
    def _refuse_keys_without_effect(self) -> Self:
        """Refuse keys without effect; this runs before a section's own validators, which may fill in values."""
        cls, section = type(self), type(self).__name__.removesuffix("Config").lower()
        if not self.owners:
            return self
        chosen = getattr(self, self.chooser)
        for key, owners in self.owners.items():
            if not has_effect(cls, key, chosen) and getattr(self, key) != cls.model_fields[key].get_default():
                names = chosen if isinstance(chosen, str) else ",".join(chosen) or "none"
                choice = section if self.chooser == "name" else f"{section}.{self.chooser}"
                having = " or ".join(f"{choice}={owner}" for owner in owners)
                raise ValueError(f"{key} belongs to {having}, not to {choice}={names}; leave {section}.{key} out")
        return self


class Options(Section):
    """Base of a method's or tuner's options, the keys `method.*` and `tuner.*`.

    `newer`: options that older run folders lack; a resolved configuration has them only where they were chosen.
    """

    newer: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(frozen=True)

    def resolved(self) -> dict[str, Any]:
        """Return the options as they are in a resolved configuration."""
        fields = type(self).model_fields
        left_out = {key for key in self.newer if getattr(self, key) == fields[key].get_default()}
        return self.model_dump(mode="json", exclude=left_out)


class ShortSection(Section):
    """A section that may be given, and is written to files, as its name alone if its other keys have their defaults."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _shortest(self, handler: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        defaults = {key: field.default for key, field in type(self).model_fields.items()}
        chosen = {key: value for key, value in handler(self).items() if value != defaults[key]}
        return self.name if chosen.keys() <= {"name"} else {"name": self.name} | chosen


def has_effect(section: type[Section], key: str, chosen: Any) -> bool:
    """Return whether a key has an effect under a choice: a name, or several as a list or separated by commas."""
    owners, names = section.owners.get(key), listed(chosen)
    return owners is None or (isinstance(names, list) and any(name in owners for name in names))
