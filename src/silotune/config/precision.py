"""Section `precision`: number type (fp32, bf16, fp16), TF32, and whether a GPU gives equal bits for equal seeds."""

from __future__ import annotations

from typing import ClassVar, Literal

from silotune.config.section import ShortSection


class PrecisionConfig(ShortSection):
    """The type of the backbone's numbers, and PyTorch's settings for equal bits.

    Attributes:
        name: `auto` is bf16 where the hardware has it, else fp32; fp16 scales losses against underflow.
        deterministic: use deterministic kernels only, so that a seed gives the same bits again on the same hardware.
            Otherwise the process's settings stay as they are.
        tf32: whether a GPU may round float32 factors of matrix products to 10 bits (TensorFloat32).
    """

    common: ClassVar[tuple[str, ...]] = ("deterministic", "tf32")

    name: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    deterministic: bool = True
    tf32: bool = False
