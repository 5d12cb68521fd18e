"""Register the kinds of tasks by name. A new kind is a file here and a line in `_ALL`."""

from __future__ import annotations

from silotune.config import registries
from silotune.config.registries import Registry
from silotune.data.kinds.base import Kind, Prediction, Reading, Span
from silotune.data.kinds.classification import Classification
from silotune.data.kinds.entities import Entities
from silotune.data.kinds.generation import Generation
from silotune.data.kinds.multilabel import Multilabel
from silotune.data.kinds.regression import Regression
from silotune.data.kinds.retrieval import Retrieval
from silotune.data.rows import Row
from silotune.data.tasks import Task

_ALL: tuple[type[Kind], ...] = (Classification, Regression, Multilabel, Generation, Entities, Retrieval)

KINDS: Registry[type[Kind]] = registries.KINDS

KINDS.problem = registries.subclass_problem(Kind)

KINDS.built_in = {kind.name: kind for kind in _ALL}

register_kind = KINDS.register_class


__all__ = [
    "KINDS",
    "Classification",
    "Entities",
    "Kind",
    "Multilabel",
    "Prediction",
    "Reading",
    "Regression",
    "Row",
    "Span",
    "Task",
    "register_kind",
]
