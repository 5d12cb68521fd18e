"""The registry of methods, and all names that a method's file imports.

A method is a class that extends `Method` in one file that reads like its paper: `parts` (named sets of tensors, each
shared or private), `phases` (which parts train, under which views, on which loss), `prediction` (the mix that answers).
Sampling, messages, checkpoints and engines are the same for all methods. `docs/adding-a-method.md` walks through one.

A built-in method is a file here and an entry of `catalog.py`. A method from outside calls `register_method`, or its
package names it as an entry point of group `silotune.methods`.
"""

from __future__ import annotations

from silotune.aggregation import PartAggregation, Server, Update
from silotune.config import registries
from silotune.config.registries import Registry
from silotune.core.tensors import State, Tensors
from silotune.methods.base import Method, MethodOptions, PredictionMix, Setting
from silotune.methods.instance_weighting import InstanceWeighting, Representation, Similarity, WeightOf
from silotune.methods.parts import (
    CLASSES,
    GLOBAL,
    HEAD,
    HEAD_GLOBAL,
    HEAD_PRIVATE,
    PRIVATE,
    WIDTH,
    Part,
    Scalar,
    Scope,
    Table,
    ZerosLike,
    fixed,
    private,
    shared,
)
from silotune.methods.phase import Phase, StartingTensors, copies, even, gather, odd
from silotune.methods.similarity import SIMILARITIES, distillation, model_contrast, row_cosine, row_cosine_by_distance
from silotune.methods.step import LocalTraining, Step, WhichHead, mean_over_rows, proximal
from silotune.methods.supervised import OneModel, Supervised, SupervisedOptions
from silotune.models.forward.mixing import Mix, frozen, joined, previous, received
from silotune.models.heads.classifier import Projection
from silotune.models.tuners import TensorGroup, TokenMixer, token_weight

METHODS: Registry[type[Method]] = registries.METHODS

METHODS.problem = registries.subclass_problem(Method)

register_method = METHODS.register_class


def is_centralized(method: str) -> bool:
    """Return whether a method trains in one place, not in silos; False for a name that is not known here."""
    return method in METHODS and METHODS[method].centralized


__all__ = [
    "CLASSES",
    "GLOBAL",
    "HEAD",
    "HEAD_GLOBAL",
    "HEAD_PRIVATE",
    "METHODS",
    "PRIVATE",
    "SIMILARITIES",
    "WIDTH",
    "InstanceWeighting",
    "LocalTraining",
    "Method",
    "MethodOptions",
    "Mix",
    "OneModel",
    "Part",
    "PartAggregation",
    "Phase",
    "PredictionMix",
    "Projection",
    "Representation",
    "Scalar",
    "Scope",
    "Server",
    "Setting",
    "Similarity",
    "StartingTensors",
    "State",
    "Step",
    "Supervised",
    "SupervisedOptions",
    "Table",
    "TensorGroup",
    "Tensors",
    "TokenMixer",
    "Update",
    "WeightOf",
    "WhichHead",
    "ZerosLike",
    "copies",
    "distillation",
    "even",
    "fixed",
    "frozen",
    "gather",
    "is_centralized",
    "joined",
    "mean_over_rows",
    "model_contrast",
    "odd",
    "previous",
    "private",
    "proximal",
    "received",
    "register_method",
    "row_cosine",
    "row_cosine_by_distance",
    "shared",
    "token_weight",
]
