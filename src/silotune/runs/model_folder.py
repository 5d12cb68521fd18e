"""Write the folders `models/NAME/` of a finished run: one silo's whole model, to be opened without anything else.

A folder holds `model.json`, `shared.safetensors` with the parts that all silos have in common, and `model.safetensors`
with the silo's own: its private parts, and where a method weighs texts by similarity the vectors of the silo's training
rows. Shared parts are on the disk once, as `models/shared/shared.safetensors`, of which every silo's file is another
name (a hard link); a folder that is copied away takes the content along. docs/reference-files.md describes the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silotune.core.serialization import write_tensor_file
from silotune.core.tensors import State, Tensors, flatten
from silotune.evaluation.federation_scores import current_model_state
from silotune.methods.instance_weighting import INSTANCES, VECTORS
from silotune.methods.parts import Part, Scope
from silotune.models.forward.mixing import resolve_weights
from silotune.models.heads import Head
from silotune.models.tuners import TUNERS, tuner_of
from silotune.models.tuners.base import TokenWeight
from silotune.runs import model_file
from silotune.runs.model_file import FILES_FILE, MODEL_FILE, MODELS, OWN_FILE, SHARED_FILE, SHARED_FOLDER, TunerFields
from silotune.runs.summary import head_section
from silotune.training.federation import Federation
from silotune.training.silo import Silo


def write_models(run: Path, federation: Federation, summary: Mapping[str, Any]) -> None:
    """Rewrite a run's folder `models` from the federation's present state, one silo's state at a time.

    A silo of a federation over machines may call it as well, for its own folder. It reads `rounds`, `best_round` and
    `silos` of the summary.
    """
    place = _new_place(run)
    written = _write_shared(place, federation)
    for owner in federation.silos.values():
        state = current_model_state(federation, owner)
        own, takes_common = _own_tensors(federation, owner, state)
        shared = place / SHARED_FOLDER / SHARED_FILE
        sources = {SHARED_FILE: shared} if SHARED_FILE in written and takes_common else {}
        for name in owner.evaluations:
            folder = place / name
            folder.mkdir(exist_ok=True)
            if own and OWN_FILE not in sources:
                sources[OWN_FILE] = folder / OWN_FILE
                written[OWN_FILE] = write_tensor_file(sources[OWN_FILE], own)
            for file, source in sources.items():
                _link(source, folder / file)
            about = _describe(federation, name, state, summary) | {"files": {file: written[file] for file in sources}}
            (folder / MODEL_FILE).write_text(_json(about), encoding="utf-8")
    _put_in_place(run, place)


def write_shared_model(run: Path, federation: Federation) -> None:
    """Write `models/shared` alone, as a coordinator does whose silos keep parts of their own."""
    place = _new_place(run)
    _write_shared(place, federation)
    _put_in_place(run, place)


def _new_place(run: Path) -> Path:
    place = run / f".{MODELS}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def _put_in_place(run: Path, place: Path) -> None:
    shutil.rmtree(run / MODELS, ignore_errors=True)
    place.replace(run / MODELS)


def _write_shared(place: Path, federation: Federation) -> dict[str, str]:
    """Write the shared and fixed parts into a new folder of models; return their file's sha256, if there is one."""
    folder = place / SHARED_FOLDER
    folder.mkdir()
    common = flatten(federation.coordinator.shared | federation.context.fixed)
    files = {SHARED_FILE: write_tensor_file(folder / SHARED_FILE, common)} if common else {}
    (folder / FILES_FILE).write_text(_json({"files": files}), encoding="utf-8")
    return files


def gather_models(run: Path, folders: Mapping[str, Path], summary: Mapping[str, Any]) -> None:
    """Copy the models that silos wrote into folders of their own, if they were asked to, into a run's `models`."""
    place = _new_place(run)
    common = {"silos": len(folders), "rows_of_all_silos": _rows_of_all(summary["silos"])}
    for name, folder in folders.items():
        if not (folder / MODELS).is_dir():
            continue
        shutil.copytree(folder / MODELS, place, dirs_exist_ok=True)
        path = place / name / MODEL_FILE
        path.write_text(_json(json.loads(path.read_text(encoding="utf-8")) | common), encoding="utf-8")
    _put_in_place(run, place)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; on a file system without such links, copy it."""
    if target == source:
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _own_tensors(federation: Federation, silo: Silo, state: State) -> tuple[Tensors, bool]:
    """Return a silo's own tensors, and whether all its other tensors are common to all silos.

    With another LoRA rank, or an aggregation that makes every silo's own tensors, all of them are its own.
    """
    parts = federation.context.parts
    takes_common = federation.coordinator.broadcasts.key(silo.name) is None
    own = {
        name: tensors
        for name, tensors in state.items()
        if not takes_common or name == INSTANCES or parts[name].scope is Scope.PRIVATE
    }
    return flatten(own), takes_common


def _describe(federation: Federation, name: str, state: State, summary: Mapping[str, Any]) -> dict[str, Any]:
    config, context, method = federation.config, federation.context, federation.method
    prediction, scores = context.prediction, summary["silos"][name]
    files = next((entry for entry in config.silos if entry.name == name), None)
    columns = None
    if files is not None:
        columns = {
            "text": list(files.columns),
            "label": files.label,
            "encoding": files.encoding,
            "separator": files.label_separator,
            "column_separator": files.column_separator,
        }
    shows = config.privacy.parts != "all"  # scores and numbers of rows have no noise
    head = prediction.head if isinstance(prediction.head, str) else _describe_mix(prediction.head, state)
    described = model_file.ModelFile(
        method={"name": method.name, "paper": method.paper},
        backbone=config.backbone,
        backbone_sha256=federation.backbone.fingerprint,
        precision=federation.backbone.precision,
        threads=config.threads,
        tuner=TunerFields.of(method.setting.tuner),
        head=head_section(federation).model_dump(mode="json", exclude_defaults=True),
        parts={
            part: model_file.PartFields(scope=definition.scope, module=_describe_module(definition, federation))
            for part, definition in context.parts.items()
        },
        weighting=None if prediction.weighting is None else asdict(prediction.weighting),
        max_length=context.max_length,
        long_texts=context.head.long_texts,
        rows_scored=context.rows_scored,
        rows_written=context.rows_written,
        seed=config.seed,
        rounds=summary["rounds"],
        best_round=summary["best_round"],
        silos=len(federation.tasks),
        rows_of_all_silos=_rows_of_all(summary["silos"]) if shows else None,
        privacy=None if federation.privacy is None else federation.privacy.summary(),
        silo=name,
        notice=_notice(federation, state),
        task=federation.tasks[name].fields(),
        texts=federation.texts[name],
        columns=columns,
        mix=_describe_mix(prediction.mix, state),
        answers_with=head,
        metric=scores["metric"],
        validation=scores["validation"] if shows else None,
        test=scores["test"] if shows else None,
        rows=scores["rows"] if shows else None,
    )
    return described.model_dump(mode="json")


def _notice(federation: Federation, state: State) -> str:
    """Name the files of a folder that were never shared, because they may reveal single rows."""
    parts = federation.context.parts
    private = [name for name in state if name in parts and parts[name].scope is Scope.PRIVATE and state[name]]
    vectors = state.get(INSTANCES, {}).get(VECTORS)
    contents = [f"parts that were trained on its rows alone ({', '.join(private)})"] if private else []
    if vectors is not None:
        contents.append(f"a vector of each of its {len(vectors)} training rows")
    return f"Personal data of the silo: {', and '.join(contents)}." if contents else model_file.SHARED_ALONE


def _describe_mix(mix: Mapping[str, Any], state: State) -> dict[str, Any]:
    """Return a mix with the weights that it has in a state; a weight of each token names the part that computes it."""
    described: dict[str, Any] = {}
    for name, weight in resolve_weights(mix, state).items():
        if isinstance(weight, TokenWeight):
            (mixer,) = (part for part, tensors in state.items() if tensors is weight.tensors)
            described[name] = model_file.MixerWeight(mixer=mixer, index=weight.index)
        else:
            described[name] = float(weight)
    return described


def _describe_module(part: Part, federation: Federation) -> str | TunerFields:
    tuner = tuner_of(part.module)
    if tuner is federation.method.setting.tuner:
        return "tuner"
    if tuner is not None and tuner.name in TUNERS:
        return TunerFields.of(tuner)
    return "head" if isinstance(part.module, Head) else part.module.name


def _rows_of_all(silos: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the training rows of all silos; None if a silo does not share its number."""
    shared = [silo["rows"]["train"] for silo in silos.values() if silo["rows"] is not None]
    return sum(shared) if len(shared) == len(silos) else None
