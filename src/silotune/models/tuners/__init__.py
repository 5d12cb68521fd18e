"""Register the tuners by name. A new tuner is a file here and a line in `TUNERS`."""

from __future__ import annotations

from silotune.config import registries
from silotune.config.registries import Registry
from silotune.models.tuners.base import Tuner, TunerOptions, Weight, WeightedTensors
from silotune.models.tuners.bottleneck import Bottleneck
from silotune.models.tuners.dora import DoRA
from silotune.models.tuners.fed_sb import FedSB
from silotune.models.tuners.full import BitFit, Delta, Full
from silotune.models.tuners.ia3 import IA3
from silotune.models.tuners.loha import LoHa
from silotune.models.tuners.lora import LoRA
from silotune.models.tuners.part_modules import TensorGroup, TokenMixer, token_weight, tuner_of
from silotune.models.tuners.prefix import PrefixTuning
from silotune.models.tuners.prompts import PromptTuning, PTuning
from silotune.models.tuners.ravan import RavanTuner
from silotune.models.tuners.vera import VeRA

_ALL: tuple[type[Tuner], ...] = (
    *(Bottleneck, LoRA, DoRA, VeRA, LoHa, FedSB, RavanTuner, PrefixTuning, PromptTuning, PTuning, IA3, BitFit, Full),
)

TUNERS: Registry[type[Tuner]] = registries.TUNERS

TUNERS.problem = registries.subclass_problem(Tuner)

TUNERS.built_in = {tuner.name: tuner for tuner in _ALL}

register_tuner = TUNERS.register_class


__all__ = [
    "TUNERS",
    "Delta",
    "TensorGroup",
    "TokenMixer",
    "Tuner",
    "TunerOptions",
    "Weight",
    "WeightedTensors",
    "register_tuner",
    "token_weight",
    "tuner_of",
]
