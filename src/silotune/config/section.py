"""The base of every group of keys."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and so are NaN, infinity, and yes/no where a number is asked for."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if {int, float} & {annotation, *get_args(annotation)}:
                raise ValueError(f"must be a number (got {value})")
        return value
