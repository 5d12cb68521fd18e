"""`ExtensibleSection`: base of `aggregation`, `head`, `uplink`, whose choice may be a plug-in with own options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from silotune.config.input_errors import input_error
from silotune.config.section import Section
from silotune.core.registry import Registry
from silotune.errors import InputError, unknown_name_error


class ExtensibleSection(Section):
    """A section with the keys of the built-in choices and those of a registered one.

    A registered object declares its keys by a pydantic model in the attribute `Options`, as methods and tuners do. They
    are read into `options`, with their defaults filled in.
    """

    model_config = ConfigDict(extra="allow")

    registry: ClassVar[Registry[Any]]
    section: ClassVar[str]
    """The section's key in the configuration, for error messages."""

    @property
    def chosen(self) -> str | None:
        """The chosen name of the registry, if any."""
        name = getattr(self, "name", None)
        return name if isinstance(name, str) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of a registered choice; empty for built-in ones."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _registered_options(self) -> Self:
        model = options_model(self.registry, self.chosen)
        given, declared = self.options, model.model_fields if model else {}
        fields = type(self).model_fields
        if hidden := sorted(declared.keys() & fields.keys()):
            raise InputError(f"{self.registry.kind} {self.chosen!r}: option {hidden[0]!r} is a key of {self.section}")
        for key in given:
            if key not in declared:
                self._refuse_option_of_another(key)
                raise unknown_name_error(
                    "key", f"{self.section}.{key}", [f"{self.section}.{name}" for name in [*fields, *declared]]
                )
        if model is not None:
            try:
                options = model.model_validate(given)
            except ValidationError as error:
                raise input_error(error, model, self.section) from None
            assert self.__pydantic_extra__ is not None, "extra keys are allowed"
            self.__pydantic_extra__.update(options.model_dump(mode="json"))
        return self

    def _refuse_option_of_another(self, key: str) -> None:
        """Raise an error that names the choices with this option, if there are any."""
        models = {name: options_model(self.registry, name) for name in self.registry}
        owners = [f"{self.section}={name}" for name, model in models.items() if model and key in model.model_fields]
        if owners:
            raise ValueError(
                f"{key} belongs to {' or '.join(owners)}, not to {self.section}={self.chosen or 'none'}; "
                f"leave {self.section}.{key} out"
            )


def options_model(registry: Registry[Any], name: str | None) -> type[BaseModel] | None:
    """Return the model of a plug-in's options; None for built-in choices and plug-ins without options."""
    return None if name is None or name in registry.reserved else getattr(registry.find(name), "Options", None)


def make_registered(registry: Registry[Any], name: str, options: dict[str, Any]) -> Any:
    """Return a registered function, or an instance of a registered class, made with its options if it declares any."""
    value = registry.find(name)
    if not isinstance(value, type):
        return value
    model = options_model(registry, name)
    return value() if model is None else value(model.model_validate(options))


def one_of(registry: Registry[Any]) -> Callable[[object], object]:
    """Return a validator that allows the names of this registry only."""

    def check(value: object) -> object:
        if value in registry.names:
            return value
        *others, last = map(repr, registry.names)
        expected = f"{', '.join(others)} or {last}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    return check
