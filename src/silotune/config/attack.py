"""Section `attack`: a backdoor that some of the silos train into the shared model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from silotune.config.section import Section
from silotune.config.validators import quoted


class AttackConfig(Section):
    """A backdoor (FedPrompt, section 2.3): malicious silos teach the model to answer `target` wherever `trigger` is."""

    common: ClassVar = ("trigger", "target", "position")
    """A preset without attack may set these keys; they stay when the user chooses an attack."""
    owners: ClassVar = dict.fromkeys(("fraction", "rate", "scale"), ("backdoor",))

    name: Literal["none", "backdoor"] = Field("none", description="`backdoor`, or `none`.")
    fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="fraction of malicious silos, rounded up. 0: none; the success rate is then the clean baseline.",
    )
    rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="fraction of a malicious silo's training rows without the target label of which it adds poisoned "
        "copies.",
    )
    trigger: str | list[str] = Field(
        "cf", description="a word or phrase, or a list; all are inserted into every poisoned row, independently."
    )
    position: Literal["start", "end", "random"] = Field(
        "start", description="position of the trigger in a row's text; `random` draws one per row."
    )
    target: str | None = Field(None, min_length=1, description="the label that the attack aims at.")
    scale: float = Field(1.0, gt=0, description="factor of a malicious silo's change (model replacement).")

    @field_validator("target", mode="before")
    @classmethod
    def _label_name(cls, target: object) -> object:
        """Convert a whole number, which is a label name too, to text."""
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
        return words if isinstance(trigger, list) else words[0]

    @model_validator(mode="after")
    def _check_target(self) -> AttackConfig:
        if self.name != "none" and self.target is None:
            raise ValueError("the attack needs the label that poisoned rows get; give attack.target=LABEL")
        return self

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger's words or phrases, each placed on its own."""
        return (self.trigger,) if isinstance(self.trigger, str) else tuple(self.trigger)
