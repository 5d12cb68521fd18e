"""The section `head`: the kind of head, its scope, and the options that only some kinds have."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from silotune.config.extensible import ExtensibleSection, one_of
from silotune.config.registries import HEADS
from silotune.config.validators import quoted


class HeadConfig(ExtensibleSection):
    """The head.

    Attributes:
        name: `mlp` and `linear` classify a pooled state, `verbalizer` scores label words at a template's mask, `lm`
            writes answers.
        scope: whether all silos share the head's part, or each keeps its own.
        pooling: the state that `mlp` and `linear` read.
        template: template of `verbalizer` or `lm`: one for all tasks, or task → template; for `lm` also `chat`.
        words: label → its words (`verbalizer`).
        multi_token: whether words of several tokens are refused, or their tokens averaged (`verbalizer`).
        average: how the scores of a label's words are combined: mean of logits, mean of probabilities, or the most
            likely word alone (`verbalizer`).
        beams: number of beams (`lm`).
        max_new_tokens: the longest answer (`lm`).
    """

    registry: ClassVar = HEADS
    section: ClassVar = "head"
    common: ClassVar = ("scope", "pooling")
    owners: ClassVar = {
        "template": ("verbalizer", "lm"),
        "words": ("verbalizer",),
        "multi_token": ("verbalizer",),
        "average": ("verbalizer",),
        "beams": ("lm",),
        "max_new_tokens": ("lm",),
    }

    name: str = "mlp"
    scope: Literal["private", "shared"] = "private"
    pooling: Literal["first", "mean"] = "first"
    template: str | dict[str, str] | None = None
    words: dict[str, list[str]] | None = None
    multi_token: Literal["refuse", "average"] = "refuse"
    average: Literal["logits", "probabilities", "best"] = "logits"
    beams: int = Field(1, ge=1, le=64)
    max_new_tokens: int = Field(80, ge=1, le=4096)

    _known = field_validator("name", mode="before")(one_of(HEADS))

    @field_validator("words", mode="before")
    @classmethod
    def _lists(cls, words: object) -> object:
        """Accept a single word in place of a list, and whole numbers as labels."""
        if not isinstance(words, dict):
            return words
        lists = {}
        for label, chosen in words.items():
            candidates = chosen if isinstance(chosen, list) else [chosen]
            quoted((label, *candidates), "the word")
            if not candidates or not all(isinstance(word, str) and word.strip() for word in candidates):
                raise ValueError(f"needs a word, or a list of words, for label {label!r} (got {chosen!r})")
            lists[str(label)] = candidates
        return lists
