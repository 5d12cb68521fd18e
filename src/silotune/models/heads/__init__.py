"""Register the heads by name. A new head is a file here and a line in `HEADS`."""

from __future__ import annotations

from typing import TypeVar

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

Kind = TypeVar("Kind", bound=type[Head])


def register_head(head: Kind) -> Kind:
    """Make a head known in this process, under its `name`; also a decorator of its class.

    Processes that a run starts know it if their script or an entry point of group `silotune.heads` registers it.
    """
    HEADS.register(getattr(head, "name", ""), head)
    return head


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
