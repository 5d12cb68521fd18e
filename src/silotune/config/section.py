"""Base classes of the configuration's sections; they refuse unknown keys and keys without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from silotune.config.registries import METHODS, TUNERS, Registry
from silotune.config.validators import listed
from silotune.errors import InputError, unknown_name_error

_OTHER_WORDS = {
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "local_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.batch_size",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip_norm",
    "max_seq_length": "train.max_length",
    "optim": "train.optimizer",
    "num_rounds": "rounds",
    "model": "backbone",
    "model_name_or_path": "backbone",
    "lora_alpha": "tuner.alpha",
    "lora_dropout": "tuner.dropout",
    "target_modules": "tuner.sites",
}
"""Keys of transformers, peft and Flower → ours."""

_SHOULD = re.compile(r"^\w+ should")


def input_error(
    error: ValidationError, model: type[BaseModel], prefix: str = "", silos: Sequence[str] = ()
) -> InputError:
    """Return pydantic's first error as one line: the key, the allowed values, the given value."""
    first = error.errors()[0]
    location = [str(word) for word in first["loc"] if not str(word).endswith("]")]
    words = [*([prefix] if prefix else []), *location]
    if silos and location[:1] == ["silos"] and len(location) > 1:
        words[1] = silos[int(location[1])]
    key = ".".join(words)
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        elsewhere = [] if prefix else _dotted(model)
        if (ours := _OTHER_WORDS.get(words[-1])) and len(words) <= 2:
            return InputError(f"unknown key {key!r} (did you mean {ours!r}?)")
        return unknown_name_error("key", key, [".".join([*words[:-1], name]) for name in allowed], elsewhere=elsewhere)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "is missing"
    elif first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        allowed = _fields_at(model, location)
        message = f"must be a group of keys{': ' if allowed else ''}{', '.join(allowed)} (got {shown(first['input'])})"
    elif first["type"] in ("list_type", "tuple_type"):
        keys = ", ".join(_fields_at(model, location))
        message = f"must be a list{f' whose entries have the keys {keys}' if keys else ', such as [a, b]'}"
        message += f" (got {shown(first['input'])})"
    elif first["type"] != "value_error":
        message = f"{_SHOULD.sub('must', message)} (got {shown(first['input'])})"
    return InputError(f"{key}: {message}" if key else message)


def shown(value: object) -> str:
    """Return a value for an error line, shortened if long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dotted(model: type[BaseModel]) -> list[str]:
    """Return the keys of a model and of its groups, with dots between; options of methods and tuners, too."""
    keys = []
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = [key for kind in kinds if issubclass(kind, BaseModel) for key in kind.model_fields]
        registry = {"method": METHODS, "tuner": TUNERS}.get(name)
        options = [option for entry in (registry or {}).values() for option in entry.Options.model_fields]
        group = f"{name}.NAME" if kinds != [field.annotation] and inner else name
        keys += [name, *(f"{group}.{key}" for key in dict.fromkeys([*inner, *options]))]
    return keys


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for word in location:
        if word.isdigit():
            continue
        annotation: Any = model.model_fields[word].annotation if word in model.model_fields else None
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
"""Numbers that float32 holds with all of its digits."""


class Group(BaseModel):
    """Base of all groups of keys."""

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values, unchecked; a dictionary for a group inside changes these keys of it."""
        update = {}
        for name, value in values.items():
            group = getattr(self, name, None)
            update[name] = group.replace(**value) if isinstance(group, Group) and isinstance(value, dict) else value
        return self.model_copy(update=update)


class Choice(Group):
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


class Section(Group):
    """A group of keys. It refuses unknown keys, NaN, infinity, a yes or no for a number, and keys without effect.

    Attributes:
        owners: key → the choices under which it has an effect; a key without an entry always has one.
        chooser: the key that holds the choice (a name or a list of names).
        common: the keys that stay when another name is chosen, if they have an effect there.
        doubles: the keys of numbers that are in no tensor, and may be too small for float32.
    """

    owners: ClassVar[Mapping[str, Collection[str]]] = {}
    chooser: ClassVar[str] = "name"
    common: ClassVar[tuple[str, ...]] = ()
    doubles: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def section_name(cls) -> str:
        """Return the section's key in the configuration."""
        return cls.__name__.removesuffix("Config").lower()

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_yes_or_no_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            field = cls.model_fields[info.field_name]
            says_it_itself = any(isinstance(check, BeforeValidator) for check in field.metadata)
            if {int, float} & {field.annotation, *get_args(field.annotation)} and not says_it_itself:
                raise ValueError(f"must be a number (got {value})")
        return value

    @field_validator("*")
    @classmethod
    def _refuse_what_float32_cannot_hold(cls, value: object, info: ValidationInfo) -> object:
        """Refuse numbers that are 0 or infinite in tensors; they would end in NaN, far from their key."""
        in_tensors = info.field_name not in cls.doubles
        if in_tensors and isinstance(value, float) and value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
            raise ValueError(f"float32 cannot hold it; allowed: {_SMALLEST} to {_LARGEST} (got {value:g})")
        return value

    @model_validator(mode="after")
    def _refuse_keys_without_effect(self) -> Self:
        """Refuse keys without effect; this runs before a section's own validators, which may fill in values."""
        cls, section = type(self), self.section_name()
        for key, owners in self.owners.items():
            value = getattr(self, self.chooser)
            if not has_effect(cls, key, value) and getattr(self, key) != cls.model_fields[key].get_default():
                names = value if isinstance(value, str) else ",".join(value) or "none"
                choice = section if self.chooser == "name" else f"{section}.{self.chooser}"
                having = " or ".join(f"{choice}={owner}" for owner in owners)
                raise ValueError(f"{key} belongs to {having}, not to {choice}={names}; leave {section}.{key} out")
        return self


def has_effect(section: type[Section], key: str, choice: Any) -> bool:
    """Return whether a key has an effect under a choice: a name, or several as a list or separated by commas."""
    owners, names = section.owners.get(key), listed(choice)
    return owners is None or (isinstance(names, list) and any(name in owners for name in names))


class Options(Section):
    """Base of a method's or tuner's options, the keys `method.*` and `tuner.*`."""

    model_config = ConfigDict(frozen=True)


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
        options = {key: value for key, value in handler(self).items() if value != defaults[key]}
        return self.name if options.keys() <= {"name"} else {"name": self.name} | options


class ExtensibleSection(Section):
    """A section with the keys of its built-in choices, and with the options of a plug-in if one is chosen.

    A registered object declares its keys by a pydantic model in the attribute `Options`, as methods and tuners do. They
    are read into `options`, with their defaults filled in.
    """

    model_config = ConfigDict(extra="allow")

    registry: ClassVar[Registry[Any]]

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
        section, fields = self.section_name(), type(self).model_fields
        model = options_model(self.registry, self.chosen)
        declared = model.model_fields if model else {}
        if hidden := sorted(declared.keys() & fields.keys()):
            raise InputError(f"{self.registry.kind} {self.chosen!r}: option {hidden[0]!r} is a key of {section}")
        if unknown := [key for key in self.options if key not in declared]:
            self._refuse_option_of_another(unknown[0])
            allowed = [f"{section}.{name}" for name in [*fields, *declared]]
            raise unknown_name_error("key", f"{section}.{unknown[0]}", allowed)
        if model is not None:
            try:
                options = model.model_validate(self.options)
            except ValidationError as error:
                raise input_error(error, model, section) from None
            assert self.__pydantic_extra__ is not None, "extra keys are allowed"
            self.__pydantic_extra__.update(options.model_dump(mode="json"))
        return self

    def _refuse_option_of_another(self, key: str) -> None:
        """Raise an error that names the choices with this option, if there are any."""
        section = self.section_name()
        models = {name: options_model(self.registry, name) for name in self.registry}
        owners = [f"{section}={name}" for name, model in models.items() if model and key in model.model_fields]
        if owners:
            raise ValueError(
                f"{key} belongs to {' or '.join(owners)}, not to {section}={self.chosen or 'none'}; "
                f"leave {section}.{key} out"
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
        if value in registry.reserved or value in registry:
            return value
        raise not_among(registry.names)

    return check


def not_among(names: Iterable[str]) -> PydanticCustomError:
    """Build the error for a value that is none of these names, as pydantic's own for a `Literal`."""
    *others, last = map(repr, names)
    expected = f"{', '.join(others)} or {last}"
    return PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
