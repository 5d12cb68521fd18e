"""The heads. A new one is a file here and a line in `HEADS`."""

from __future__ import annotations

from silotune.models.heads.base import Head
from silotune.models.heads.classifier import LinearHead, MLPHead
from silotune.models.heads.lm import LanguageModelHead
from silotune.models.heads.verbalizer import VerbalizerHead

HEADS: dict[str, type[Head]] = {head.name: head for head in (MLPHead, LinearHead, VerbalizerHead, LanguageModelHead)}


__all__ = ["HEADS", "Head", "LanguageModelHead", "LinearHead", "MLPHead", "VerbalizerHead"]
