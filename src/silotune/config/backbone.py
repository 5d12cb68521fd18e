"""Section `backbone`: which pretrained model, its revision, attention, quantization, and the devices of its blocks."""

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
        device_map: where the blocks are, of a model that is larger than a GPU: `auto` spreads them over all GPUs of the
            process; a mapping gives devices to blocks (`layers.0: cuda:1`) or to all of them (`layers: cuda:1`). What
            it does not name is on `device`.
    """

    model_config = ConfigDict(frozen=True)

    common: ClassVar[tuple[str, ...]] = ("attention", "quantization", "device_map")

    name: str = "default"
    revision: str | None = Field(None, min_length=1)
    attention: Literal["auto", "eager", "sdpa", "flash"] = "auto"
    quantization: Literal["none", "auto", "int8", "nf4", "int8-torchao"] = "none"
    device_map: Literal["auto"] | dict[str, str] | None = None

    def __hash__(self) -> int:
        return hash(self.model_dump_json())
