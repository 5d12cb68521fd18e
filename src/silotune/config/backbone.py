"""Section `backbone`: which pretrained model, and how it is loaded."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from silotune.config.section import ShortSection


class BackboneConfig(ShortSection):
    """The pretrained model and how this machine loads it; hashable, as equal sections can share a loaded model.

    Attributes:
        name: `default` (offline MiniLM), a hub id, or a local folder; for `silotune cost` also a shape.
        revision: branch, tag or commit of a hub id; None: the hub's main branch.
        attention: the attention implementation. `auto` is `eager` on a CPU and transformers' default elsewhere; `flash`
            needs a GPU and the package flash-attn.
    """

    model_config = ConfigDict(frozen=True)

    common: ClassVar[tuple[str, ...]] = ("attention",)

    name: str = "default"
    revision: str | None = Field(None, min_length=1)
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
