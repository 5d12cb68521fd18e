"""The content of `models/NAME/model.json`: a run writes it at its end, and `PersonalModel.open` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator

from silotune.communication.privacy.row_accountant import SIMULATED, UNCOVERED
from silotune.config import BackboneConfig
from silotune.config.backbone import as_stored
from silotune.config.head import HeadConfig
from silotune.core.files import damage_named, read_json
from silotune.core.serialization import read_tensor_file
from silotune.core.tensors import State, Tensors, unflatten
from silotune.data.long_texts import CUT, LongTexts
from silotune.errors import InputError, unknown_name_error
from silotune.methods.base import PredictionMix
from silotune.methods.instance_weighting import InstanceWeighting
from silotune.methods.parts import Module, Part, Scalar, Scope
from silotune.models.backbone.backbone import Backbone
from silotune.models.heads import HEADS, Head
from silotune.models.tuners import TUNERS, Delta, Tuner, token_weight, tuner_of
from silotune.runs.storage.readers import read_summary

MODELS = "models"

SHARED_FOLDER = "shared"
"""In `models`: the parts that all silos have in common."""

MODEL_FILE, OWN_FILE, SHARED_FILE = "model.json", "model.safetensors", "shared.safetensors"

FILES_FILE = "files.json"
"""In `models/shared`: the sha256 of its file, which the models' own `model.json` have as well."""

FORMAT, VERSION = "silotune-model", 1

SHARED_ALONE = "All of it was shared with all silos."
"""The notice of a model that holds nothing of its silo alone."""


class TunerFields(BaseModel):
    """A tuner's name and options, without other silos' ranks."""

    name: str
    options: dict[str, Any]

    @classmethod
    def of(cls, tuner: Tuner) -> TunerFields:
        """Describe a tuner."""
        options = tuner.options.model_dump(mode="json", exclude={"ranks"})
        return cls(name=tuner.name, options=options)

    def make(self) -> Tuner:
        """Make the tuner; equal fields give the same one, so that several silos' parts act in one product."""
        return _tuner(self.name, json.dumps(self.options, sort_keys=True))


@cache
def _tuner(name: str, options: str) -> Tuner:
    kind = TUNERS.find(name)
    return kind(kind.Options.model_validate_json(options))


class PartFields(BaseModel):
    """A part's scope, and its module: the run's `tuner` or `head`, another tuner, or a kind of its own."""

    scope: Scope
    module: str | TunerFields

    def make(self, tuner: Tuner, head: Head) -> Part:
        """Make the part."""
        if isinstance(self.module, TunerFields):
            return Part(self.module.make(), self.scope)
        modules: dict[str, Module] = {"tuner": tuner, "head": head}
        module = Delta(tuner) if self.module == Delta.name else modules.get(self.module, Scalar(0.0, self.module))
        return Part(module, self.scope)


class MixerWeight(BaseModel):
    """The part that computes a weight for each token, and which of its weights it is."""

    mixer: str
    index: int


class ModelFile(BaseModel):
    """The fields of `model.json`, in order; docs/reference-files.md explains them."""

    format: str = FORMAT
    version: int = VERSION
    method: dict[str, str]
    backbone: BackboneConfig
    backbone_sha256: str
    precision: str
    threads: int | None
    tuner: TunerFields
    head: dict[str, Any]
    parts: dict[str, PartFields]
    weighting: dict[str, Any] | None
    max_length: int
    long_texts: LongTexts = CUT
    rows_scored: int
    rows_written: int
    seed: int
    rounds: int
    best_round: int
    silos: int
    rows_of_all_silos: int | None
    privacy: dict[str, Any] | None
    silo: str
    notice: str
    task: dict[str, Any]
    texts: int
    columns: dict[str, Any] | None
    mix: dict[str, float | MixerWeight]
    answers_with: str | dict[str, float]
    metric: str
    validation: float | None
    test: float | None
    rows: dict[str, Any] | None
    files: dict[str, str] | None = None

    _as_stored = field_validator("backbone", mode="before")(as_stored)

    @property
    def prediction(self) -> PredictionMix:
        """How the parts are mixed."""
        mix = {
            name: weight if isinstance(weight, float) else token_weight(weight.mixer, weight.index)
            for name, weight in self.mix.items()
        }
        weighting = None if self.weighting is None else InstanceWeighting(**self.weighting)
        return PredictionMix(mix, self.answers_with, weighting)

    def make_head(self) -> Head:
        """Make the head."""
        config = HeadConfig.model_validate(self.head)
        return HEADS[config.name].make(config).with_long_texts(self.long_texts)


def read_model_file(path: Path) -> tuple[dict[str, Any], ModelFile]:
    """Read `model.json`, as it is and as its fields; an export adds entries of its own."""
    content = read_json(path)
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{content['format']} {content['version']} instead of {FORMAT} {VERSION}")
    return content, ModelFile.model_validate(content)


def require_guarantee(about: Mapping[str, Any], without: bool) -> None:
    """Refuse to give away a model that a silo trained under noise on rows if some of its parts have none."""
    uncovered = (about["privacy"] or {}).get("uncovered", "")
    if UNCOVERED in uncovered and SIMULATED not in uncovered and not without:
        raise InputError(
            f"model of silo {about['silo']!r}: some of its own parts were trained without noise on rows, so that no ε "
            "bounds what it tells; allowed: --without-guarantee, or a run with privacy.parts=all"
        )


def model_folder(run: Path, silo: str) -> Path:
    """Return the folder of a silo's model in a finished run, or say in one line why there is none."""
    models = run / MODELS
    if Path(silo).name == silo and (models / silo / MODEL_FILE).is_file():
        return models / silo
    raise unknown_name_error("silo", silo, model_folders(run))


def model_folders(run: Path) -> dict[str, Path]:
    """Return silo → the folder of its model in a finished run, or say in one line why there are none."""
    models = run / MODELS
    folders = {path.parent.name: path.parent for path in sorted(models.glob(f"*/{MODEL_FILE}"))}
    if not folders:
        check_has_models(run, read_summary(run))
    if not models.is_dir():
        raise InputError(f"{run}: has no folder {MODELS}; `silotune import {run}` makes it")
    return folders


def check_has_models(run: Path, summary: Mapping[str, Any]) -> None:
    """Refuse a coordinator's folder of a federation whose silos keep private parts: no model can be made of it."""
    has_none = not any((run / MODELS).glob(f"*/{MODEL_FILE}"))
    if has_none and summary.get("engine") == "flower":  # `Flower.label` in distributed/coordinator
        raise InputError(
            f"{run}: is the coordinator's folder of a federation; private parts are in the silos' own folders, "
            f"where each silo predicts and exports; here is {MODELS}/shared"
        )


def check_weights(path: Path, backbone: Backbone, fingerprint: str) -> None:
    """Refuse to open what was made with another backbone than the given one."""
    if backbone.fingerprint != fingerprint:
        raise InputError(f"{path}: was made with another backbone than {backbone.name!r} is now (its weights differ)")


TensorReader = Callable[[Path, str, Mapping[str, str] | None], Tensors]
"""Reads a file of tensors, as `read_tensor_file` does."""


def recorded_files(folder: Path) -> dict[str, str] | None:
    """Return name → sha256 of the files in a model's folder or in `models/shared`; None if it is from before those."""
    path = folder / (MODEL_FILE if (folder / MODEL_FILE).exists() else FILES_FILE)
    if not path.exists():
        return None
    with damage_named(path):
        files: dict[str, str] | None = read_json(path).get("files")
        return files


def read_state(
    folder: Path, parts: Mapping[str, Part], files: Mapping[str, str] | None, read: TensorReader = read_tensor_file
) -> State:
    """Read the tensors of a model's folder, whose files were recorded; a part without any is empty."""
    tensors: Tensors = {}
    for name in (SHARED_FILE, OWN_FILE):
        if (folder / name).exists() or name in (files or {}):
            tensors |= read(folder, name, files)
    with damage_named(folder / MODEL_FILE):
        state = unflatten(tensors)
    missing = [name for name, part in parts.items() if tuner_of(part.module) is not None and name not in state]
    if missing:
        file = OWN_FILE if parts[missing[0]].scope is Scope.PRIVATE else SHARED_FILE
        raise InputError(f"{folder / file}: missing or damaged (there are no tensors of part {missing[0]!r})")
    return {name: {} for name in parts} | state
