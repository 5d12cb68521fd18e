"""Register the heads by name. A new head is a file here and a line in `HEADS`."""

from __future__ import annotations

from silotune.config import registries
from silotune.config.registries import Registry
from silotune.models.heads.base import PLAIN, Head, LossRecipe
from silotune.models.heads.classifier import LinearHead, MLPHead
from silotune.models.heads.entities import EntitiesHead
from silotune.models.heads.lm import LanguageModelHead, PreferenceHead
from silotune.models.heads.retrieval import RetrievalHead
from silotune.models.heads.verbalizer import VerbalizerHead

_ALL: tuple[type[Head], ...] = (
    *(MLPHead, LinearHead, VerbalizerHead, LanguageModelHead, PreferenceHead, EntitiesHead, RetrievalHead),
)

HEADS: Registry[type[Head]] = registries.HEADS

HEADS.problem = registries.subclass_problem(Head)

HEADS.built_in = {head.name: head for head in _ALL}

register_head = HEADS.register_class


__all__ = [
    "HEADS",
    "PLAIN",
    "EntitiesHead",
    "Head",
    "LanguageModelHead",
    "LinearHead",
    "LossRecipe",
    "MLPHead",
    "PreferenceHead",
    "RetrievalHead",
    "VerbalizerHead",
    "register_head",
]
