"""The heads. A new one is a file here and a line in `HEADS`."""

from silotune.heads.base import Head
from silotune.heads.classifier import LinearHead, MLPHead
from silotune.heads.lm import LanguageModelHead
from silotune.heads.verbalizer import VerbalizerHead

HEADS: dict[str, type[Head]] = {head.name: head for head in (MLPHead, LinearHead, VerbalizerHead, LanguageModelHead)}

__all__ = ["HEADS", "Head", "LanguageModelHead", "LinearHead", "MLPHead", "VerbalizerHead"]
