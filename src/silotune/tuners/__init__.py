"""The kinds of PEFT. A new one is a file here and a line in `TUNERS`."""

from silotune.tuners.base import Tuner, TunerOptions, Weight, Weighted
from silotune.tuners.bitfit import BitFit
from silotune.tuners.bottleneck import Bottleneck
from silotune.tuners.full import Full
from silotune.tuners.ia3 import IA3
from silotune.tuners.lora import LoRA
from silotune.tuners.prefix import PrefixTuning
from silotune.tuners.prompt import PromptTuning
from silotune.tuners.ptuning import PTuning

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

__all__ = ["TUNERS", "Tuner", "TunerOptions", "Weight", "Weighted"]
