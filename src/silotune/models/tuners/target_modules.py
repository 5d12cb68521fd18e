"""From what a user names (`query,value`, `houlsby`, `*.c_attn`) to the backbone's linear layers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, cast
from weakref import WeakKeyDictionary

from pydantic import field_validator
from torch import Tensor, nn

from silotune.errors import InputError
from silotune.models.backbone.architectures import SITE_FIELDS
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners.base import TunerOptions

_FOUND: WeakKeyDictionary[Backbone, dict[tuple[tuple[str, ...], str], list[str]]] = WeakKeyDictionary()


def as_words(value: object) -> object:
    """`"a, b"` or a list of words as a tuple of words, each checked for a mistyped field."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"a list of {', '.join(SITE_FIELDS)}, or of patterns of module names, is needed")
    words = tuple(word.strip() for word in words)
    for word in words:
        near = [] if word in SITE_FIELDS else difflib.get_close_matches(word, SITE_FIELDS, n=1, cutoff=0.85)
        if near:
            raise ValueError(
                f"unknown site {word!r} (did you mean {near[0]!r}?); allowed: {', '.join(SITE_FIELDS)}, or patterns of "
                "module names"
            )
    return words


class SiteOptions(TunerOptions):
    """`sites`: fields of the family's table (query, key, value, …) or patterns of module names, comma-separated."""

    sites: tuple[str, ...]

    @field_validator("sites", mode="before")
    @classmethod
    def _words(cls, sites: object) -> object:
        return as_words(sites)


def is_linear(module: nn.Module) -> bool:
    """Whether a low-rank or scaling tuner can sit here: a linear layer, or GPT-2's transposed form of one."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def widths(module: nn.Module) -> tuple[int, int]:
    """A linear layer's input and output width."""
    weight = cast(Tensor, module.weight)
    rows, columns = weight.shape
    return (int(rows), int(columns)) if is_transposed(module) else (int(columns), int(rows))


def is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)  # by name: no import of transformers


def linear_weight(module: nn.Module) -> Tensor:
    """A linear layer's weight as (out, in), also where the layer stores it transposed."""
    weight = cast(Tensor, module.weight)
    return weight.t() if is_transposed(module) else weight


def peft_target_modules(backbone: Backbone, modules: list[str]) -> dict[str, Any]:
    """Fields of peft's `adapter_config.json` that name the target modules."""
    transposed = {is_transposed(backbone.site(module)) for module in modules}
    return {
        "target_modules": short_names(backbone, modules),
        "fan_in_fan_out": transposed == {True},
        "modules_to_save": None,
    }


def short_names(backbone: Backbone, modules: list[str]) -> list[str]:
    """The modules' last words where these name no other module of the backbone, else their full names."""
    all_names = [name for name, _ in backbone.model.named_modules()] + ["pooler.dense"]
    endings = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    matches = [name for name in all_names if name.rpartition(".")[2] in endings]
    return endings if len(matches) == len(modules) else modules


def find_sites(backbone: Backbone, words: Sequence[str], tuner: str) -> list[str]:
    """The full names of the linear layers that the words name, each once: block by block, then as patterns match.

    Found once per backbone, whose modules stay as they are: a thousand silos ask.

    A word is a field of the family's table, a full module name, the end of one (`c_attn`, `attn.c_attn`), or a
    pattern with `*`.

    Raises:
        InputError: for a word that names no linear layer of this backbone.
    """
    known = _FOUND.setdefault(backbone, {})
    key = (tuple(words), tuner)
    if key not in known:
        known[key] = _find_sites(backbone, words, tuner)
    return list(known[key])


def _find_sites(backbone: Backbone, words: Sequence[str], tuner: str) -> list[str]:
    modules = dict(backbone.base.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    fields = [word for word in words if word in SITE_FIELDS]
    found: list[str] = []
    for stack in backbone.architecture.stacks if fields else ():
        count = len(cast(nn.ModuleList, modules[stack.blocks]))
        found += [
            name
            for block in range(count)
            for field in fields
            for name in stack.modules(field, block)
            if name in modules
        ]
    for word in words:
        if word in SITE_FIELDS:
            matches = [name for stack in backbone.architecture.stacks for name in stack.modules(word, 0)]
            matches = [name for name in matches if name in modules]
        else:
            matches = [name for name in linear if name == word or fnmatchcase(name, word) or name.endswith(f".{word}")]
            found += matches
        if not matches:
            examples = ", ".join(linear[:3])
            raise InputError(
                f"tuner.sites: {tuner} finds no linear layer for {word!r} in {backbone.model_type}; allowed: "
                f"{', '.join(SITE_FIELDS)} where the family has them, or patterns of module names (such as {examples})"
            )
    return list(dict.fromkeys(found))
