"""The section `attack`: a backdoor attack by a fraction of the silos (trigger, target label, scale)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import quoted


class AttackConfig(Section):
    """A backdoor (FedPrompt, section 2.3): malicious silos teach the model to answer `target` wherever `trigger` is.

    `fraction` of the silos are malicious (rounded up; 0: a clean federation, of which the success rate is still
    measured). Each adds poisoned copies of `rate` of its training rows that are not of the target label already.
    `trigger`: a word or phrase, or a list of them, each placed on its own; `position`: at the start of a row's text,
    at its end, or anywhere (drawn for each row). `scale`: malicious silos send their change multiplied by this (model
    replacement; 1: as it is).
    """

    common: ClassVar = ("trigger", "target", "position")
    """What a preset may say of an attack that it does not make."""
    owners: ClassVar = dict.fromkeys(("fraction", "rate", "scale"), ("backdoor",))

    name: Literal["none", "backdoor"] = "none"
    fraction: float = Field(0.1, ge=0, le=1)
    rate: float = Field(1.0, ge=0, le=1)
    trigger: str | list[str] = "cf"
    position: Literal["start", "end", "random"] = "start"
    target: str | None = Field(None, min_length=1)
    scale: float = Field(1.0, gt=0)

    @field_validator("target", mode="before")
    @classmethod
    def _label_name(cls, target: object) -> object:
        """Whole numbers are label names too."""
        quoted([target], "the label")
        return str(target) if isinstance(target, int) else target

    @field_validator("trigger", mode="before")
    @classmethod
    def _words(cls, trigger: object) -> object:
        several = trigger if isinstance(trigger, list) else [trigger]
        quoted(several, "the trigger")
        words = [str(word) for word in several if isinstance(word, (str, int))]
        if not words or len(words) < len(several) or not all(word.strip() for word in words):
            raise ValueError(f"must be a word or phrase, or a list of them, none empty (got {trigger!r})")
        if any("\0" in word for word in words):
            raise ValueError("holds a NUL character; only text is allowed")
        return words if isinstance(trigger, list) else words[0]

    @model_validator(mode="after")
    def _fitting(self) -> AttackConfig:
        if self.name != "none" and self.target is None:
            raise ValueError("which label is the attack to bring about? give attack.target=LABEL")
        return self

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger's words or phrases, each placed on its own."""
        return (self.trigger,) if isinstance(self.trigger, str) else tuple(self.trigger)
