"""Section `backbone`: which pretrained model, its revision, attention implementation and quantization."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from silotune.config.section import ShortSection


class BackboneConfig(ShortSection):
    """The pretrained model and how this machine loads it.

    It is hashable, as equal sections can share a loaded model.

    Attributes:
        name: `default` (offline MiniLM), a hub id, or a local folder; for `silotune cost` also a shape.
        revision: branch, tag or commit of a hub id; None: the hub's main branch.
        attention: the attention implementation. `auto` is `eager` on a CPU and transformers' default elsewhere; `flash`
            needs a GPU and the package flash-attn.
        quantization: how the linear layers are stored: `int8` and `nf4` (bitsandbytes), `int8-torchao`, or `none`, as
            in `precision`. `auto` is int8 on a CUDA device and none elsewhere.
    """

    model_config = ConfigDict(frozen=True)

    common: ClassVar[tuple[str, ...]] = ("attention", "quantization")

    name: str = "default"
    revision: str | None = Field(None, min_length=1)
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
    quantization: Literal["none", "auto", "int8", "nf4", "int8-torchao"] = "none"
