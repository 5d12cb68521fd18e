"""Turn pydantic's errors into one line: the key, what is allowed, the given value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from silotune.config.registries import METHODS, TUNERS
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
        message = f"must be a list, such as [a, b] (got {shown(first['input'])})"
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
        options = [option for made in (registry or {}).values() for option in made.Options.model_fields]
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
