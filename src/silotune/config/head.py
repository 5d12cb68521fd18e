"""Sections `head` and `generation`: the kind of head, and how it generates answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.registries import HEADS
from silotune.config.section import ExtensibleSection, Section, one_of
from silotune.config.validators import RowsAtOnce, composed, quoted

PLAIN = "plain"
"""The value of `head.template` for the usual template of instructions."""


class HeadConfig(ExtensibleSection):
    """The head, which makes a task's logits or answers of the backbone's states."""

    registry: ClassVar = HEADS
    common: ClassVar = ("scope", "pooling")
    owners: ClassVar = {
        "normalize": ("mlp", "linear"),
        "template": ("verbalizer", "lm", "dpo"),
        "words": ("verbalizer",),
        "multi_token": ("verbalizer",),
        "average": ("verbalizer",),
        "chat_template": ("lm", "dpo"),
        "chat_kwargs": ("lm", "dpo"),
        "train_on": ("lm",),
        "choices": ("lm", "dpo"),
        "beams": ("lm", "dpo"),
        "max_new_tokens": ("lm", "dpo"),
        "beta": ("dpo",),
        **dict.fromkeys(("temperature", "negatives", "in_batch"), ("retrieval",)),
    }

    name: str = Field(
        default="mlp",
        description="`mlp` and `linear` classify a pooled state; `verbalizer` scores label words at a template's mask; "
        "`lm` generates answers; `dpo` too, and trains on preference pairs; `entities` marks spans; `retrieval` "
        "finds passages.",
    )
    scope: Literal["private", "shared"] = Field(
        default="private", description="one head for all silos, or one per silo."
    )
    pooling: Literal["auto", "first", "mean", "last"] = Field(
        default="auto",
        description="the state that `mlp` and `linear` read: the first token's, the last one's, or the mean. `auto` is "
        "`last` in a causal model, else what the model was trained with, else `first`.",
    )
    normalize: float | None = Field(
        default=None,
        gt=0,
        description="L2 norm to which `mlp` and `linear` scale that state, so that gradients of rows are about equally "
        "long; unset: as it is.",
    )
    template: str | dict[str, str] | None = Field(
        default=None,
        description="template of `verbalizer` or `lm`: one for all tasks, or task → template. Of `lm`, `chat` is the "
        "tokenizer's own, the default where it has one, and `plain` is “### Instruction: … ### Response:”.",
    )
    words: dict[str, list[str]] | None = Field(default=None, description="label → its words (`verbalizer`).")
    multi_token: Literal["refuse", "average"] = Field(
        default="refuse",
        description="label words of several tokens: refuse them, or average their tokens (`verbalizer`).",
    )
    average: Literal["logits", "probabilities", "best"] = Field(
        default="logits",
        description="how the words of a label are combined: mean logit, mean probability, or the most likely word "
        "(`verbalizer`).",
    )
    chat_template: str | None = Field(
        default=None, min_length=1, description="the name of the tokenizer's chat template, if it has several (`lm`)."
    )
    chat_kwargs: dict[str, bool | int | float | str | None] = Field(
        default={}, description="variables for the chat template, such as `enable_thinking` (`lm`)."
    )
    train_on: Literal["assistant", "last"] = Field(
        default="assistant",
        description="turns in the loss: all of the assistant's, or its last (`lm`).",
    )
    choices: Literal["likelihood", "write"] = Field(
        default="likelihood",
        description="how tasks whose prompts list their answers (lines `- answer`) are scored: by the likeliest of "
        "them, or by the written answer (`lm`).",
    )
    beta: float = Field(
        default=0.1, gt=0, description="β of the DPO loss; larger keeps the model nearer to the backbone (`dpo`)."
    )
    beams: int = Field(default=1, ge=1, le=64, description="number of beams (`lm`, `dpo`).")
    temperature: float = Field(
        default=0.05, gt=0, description="τ of InfoNCE; smaller pushes the nearest negatives away more (`retrieval`)."
    )
    negatives: int | None = Field(
        default=None, ge=0, description="most of a row's own `negatives` in the loss; unset, all (`retrieval`)."
    )
    in_batch: bool = Field(
        default=True,
        description="whether passages of a batch's other rows are negatives, too (`retrieval`). `false` needs "
        "`head.negatives`; it is for noise on rows.",
    )
    max_new_tokens: int = Field(default=80, ge=1, le=4096, description="the longest answer (`lm`).")

    _name = field_validator("name", mode="before")(one_of(HEADS))

    _composed = field_validator("template", "words", mode="before")(composed)

    @field_validator("words", mode="before")
    @classmethod
    def _lists(cls, words: object) -> object:
        """Accept a single word in place of a list, and whole numbers as labels."""
        if not isinstance(words, dict):
            return words
        lists = {}
        for label, entry in words.items():
            candidates = entry if isinstance(entry, list) else [entry]
            quoted((label, *candidates), "the word")
            if not candidates or not all(isinstance(word, str) and word.strip() for word in candidates):
                raise ValueError(f"needs a word, or a list of words, for label {label!r} (got {entry!r})")
            lists[str(label)] = candidates
        return lists

    @model_validator(mode="after")
    def _has_negatives(self) -> HeadConfig:
        if not self.in_batch and not self.negatives:
            raise ValueError("in_batch=false leaves a row its own negatives; give head.negatives, how many, 1 or more")
        return self

    @property
    def writes(self) -> bool:
        """Whether the head writes answers."""
        return self.name in self.owners["max_new_tokens"]

    @property
    def pools(self) -> bool:
        """Whether the head may read a pooled state."""
        return self.name not in (*self.owners["template"], "entities", "retrieval")

    @property
    def chat_keys(self) -> list[str]:
        """The keys that only a chat template reads and whose values are not the defaults."""
        return [*self.model_dump(include={"chat_template", "chat_kwargs", "train_on"}, exclude_defaults=True)]


class GenerationConfig(Section):
    """How answers are written (`head=lm`)."""

    rows_at_once: RowsAtOnce = Field(
        default=32, description="prompts per generated batch; each takes the memory of `head.beams` answers."
    )
