"""What keys mean, in the words of the schema's docstrings: `attributes` of a section, `option_meanings` of a choice."""

from __future__ import annotations

import inspect
import re

from pydantic import BaseModel


def attributes(model: type[BaseModel]) -> dict[str, str]:
    """Return key → meaning: the entries under `Attributes:` in a section's docstring."""
    _, _, text = (inspect.getdoc(model) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {key: re.sub(r"\s+", " ", meaning) for key, meaning in found}


def option_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return option → meaning: "`key`: meaning" in the docstrings of a method's or tuner's options and their bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        text = re.sub(r"\s+", " ", base.__doc__ or "") if issubclass(base, BaseModel) and base is not BaseModel else ""
        found |= dict(re.findall(r"`(\w+)`: (.*?)(?=[.;] `\w+`: |\.? ?$)", text))
    return found
