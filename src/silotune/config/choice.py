"""A named thing with options of its own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Choice(BaseModel):
    """A named thing with options of its own (`method`, `tuner`); the thing itself checks them."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return dict(self.model_extra or {})
