"""The kinds of PEFT. A new one is a file here and a line in `TUNERS`."""

from __future__ import annotations

from silotune.models.tuners.base import Tuner, TunerOptions, Weight, WeightedTensors
from silotune.models.tuners.bitfit import BitFit
from silotune.models.tuners.bottleneck import Bottleneck
from silotune.models.tuners.full import Full
from silotune.models.tuners.ia3 import IA3
from silotune.models.tuners.lora import LoRA
from silotune.models.tuners.prefix import PrefixTuning
from silotune.models.tuners.prompt import PromptTuning
from silotune.models.tuners.ptuning import PTuning

TUNERS: dict[str, type[Tuner]] = {
    tuner.name: tuner
    for tuner in (
        Bottleneck,
        LoRA,
        PrefixTuning,
        PromptTuning,
        PTuning,
        BitFit,
        IA3,
        Full,
    )
}


__all__ = ["TUNERS", "Tuner", "TunerOptions", "Weight", "WeightedTensors"]
