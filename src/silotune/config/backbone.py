"""Sections `backbone` and `precision`: which pretrained model, how it is loaded, and the type of its numbers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from silotune.config.section import ShortSection
from silotune.config.validators import BackboneName


class BackboneConfig(ShortSection):
    """The pretrained model and how this machine loads it.

    It is hashable, as equal sections can share a loaded model.
    """

    model_config = ConfigDict(frozen=True)

    common: ClassVar[tuple[str, ...]] = ("attention", "quantization", "device_map")

    name: BackboneName = Field(
        default="default",
        description="`default` (MiniLM), `smollm2` and `mpnet` come as packages, without a hub; else a hub id, a local "
        "folder, or a GGUF file; for `silotune cost` also a shape.",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="branch, tag or commit of a hub id; None: the hub's main branch."
    )
    attention: Literal["auto", "eager", "sdpa", "flash"] = Field(
        default="auto",
        description="the attention implementation. On a CPU `auto` is `eager`, and `sdpa` where answers are "
        "written; elsewhere it is transformers' default. `flash` needs a GPU and the package flash-attn.",
    )
    quantization: Literal["none", "auto", "int8", "nf4", "int8-torchao"] = Field(
        default="none",
        description="storage of the linear layers: `int8` or `nf4` (bitsandbytes), `int8-torchao`, or `none`. `auto` is"
        " int8 on a CUDA device and none elsewhere.",
    )
    device_map: Literal["auto"] | None = Field(
        default=None,
        description="for a model larger than one GPU: `auto` spreads its blocks over all GPUs of the process. "
        "Everything else is on `device`.",
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def as_stored(section: Any) -> Any:
    """Return the section of a run's folder; older runs may name the device of each block, in the place of `auto`."""
    mapped = isinstance(section, dict) and isinstance(section.get("device_map"), dict)
    return section | {"device_map": "auto"} if mapped else section


class PrecisionConfig(ShortSection):
    """The type of the backbone's numbers, and PyTorch's settings for equal bits."""

    common: ClassVar[tuple[str, ...]] = ("deterministic", "tf32")

    name: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="`auto` is bf16 where the hardware has it, else fp32; fp16 scales losses against underflow.",
    )
    deterministic: bool = Field(
        default=True,
        description="use only deterministic kernels, so that a seed gives the same bits again on the same hardware; "
        "`false` leaves PyTorch's settings alone.",
    )
    tf32: bool = Field(
        default=False, description="let a GPU round float32 factors of matrix products to 10 bits (TensorFloat32)."
    )
