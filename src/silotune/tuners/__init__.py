"""The kinds of PEFT. A new one is a file here and a line in `TUNERS`."""

from silotune.tuners.base import Tuner, TunerOptions, Weight, Weighted
from silotune.tuners.bottleneck import Bottleneck
from silotune.tuners.full import Full
from silotune.tuners.lora import LoRA

TUNERS: dict[str, type[Tuner]] = {tuner.name: tuner for tuner in (Bottleneck, LoRA, Full)}

__all__ = ["TUNERS", "Tuner", "TunerOptions", "Weight", "Weighted"]
