"""`export` (`silotune export`) writes a silo's adapters or whole model, head, `export.json` and card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from silotune.core.tensors import Tensors
from silotune.errors import InputError, require_unused
from silotune.interop.fold_weights import can_fold, fold_in, load_plain
from silotune.interop.model_card import DEFAULT_BASE, card
from silotune.interop.native_format import native_layout
from silotune.interop.peft_format import Layout, peft_layout
from silotune.interop.selection import ExportSelection, select
from silotune.models.backbone.backbone import WEIGHT_TYPES
from silotune.models.backbone.quantization import NONE, QUANTIZATIONS
from silotune.runs.run_result import Run


def export(run: Run, silo: str, part: str, to: str | Path, base: str | None = None) -> dict[str, Any]:
    """Write one export folder.

    Args:
        run: a finished run, from `load_run(folder, precision="fp32")`.
        silo: name of the silo.
        part: `global`, `private`, `mixed` or `merged`.
        to: a new or empty folder.
        base: the base model's name in the export; the run's by default.

    Returns:
        The content of `export.json`.
    """
    target = Path(to)
    check_target(target)
    selection = select(run, silo, part)
    backbone = run.federation.backbone
    base_class = _base_class(selection)
    configured = run.federation.config.backbone
    name = base or (DEFAULT_BASE if configured.name == "default" else configured.name)
    layout = None if part == "merged" else _layout(selection, name, base_class)
    about = _about(selection, name, base_class, "weights" if layout is None else layout.name)
    head = _head(selection)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        if layout is None:
            model = load_plain(configured, base_class, float32=backbone.quantization == NONE)
            for tuner, adapter in ((selection.tuner, selection.adapter), *selection.others):
                fold_in(model, tuner, adapter)
            model.save_pretrained(temporary)
        else:
            _json(temporary / f"{layout.config_file}.json", layout.config)
            _tensors(temporary / f"{layout.tensor_file}.safetensors", layout.tensors)
        backbone.tokenizer.save_pretrained(temporary)
        _json(temporary / "head.json", head)
        if selection.head_tensors:
            _tensors(temporary / "head.safetensors", selection.head_tensors)
        _json(temporary / "export.json", about)
        (temporary / "README.md").write_text(card(about, head), encoding="utf-8")
        script = resources.files("silotune.interop") / "standalone.py"
        (temporary / "standalone.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        for file in temporary.glob("*.safetensors"):  # the library lets the owner alone read them
            shutil.copymode(temporary / "export.json", file)
        if target.exists():
            target.rmdir()
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"--to {target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return about


def check_target(target: Path) -> None:
    """Check that nothing would be overwritten."""
    require_unused(target, "--to")


def _base_class(selection: ExportSelection) -> str:
    """The class of transformers that loads the base model."""
    model_class = selection.head.model_class
    encoder_decoder = selection.run.federation.backbone.base.config.is_encoder_decoder
    return "AutoModelForSeq2SeqLM" if encoder_decoder and model_class != "AutoModel" else model_class


def _layout(selection: ExportSelection, base: str, base_class: str) -> Layout | None:
    """The adapter in peft's layout or silotune's own; None for a tuner with neither, which is folded into weights."""
    backbone, tuner, adapter = selection.run.federation.backbone, selection.tuner, selection.adapter
    layout = peft_layout(backbone, tuner, adapter, base, base_class)
    layout = layout or native_layout(tuner, adapter, base, base_class, backbone.fingerprint)
    if layout is None and not can_fold(tuner):
        raise InputError(f"export: tuner={tuner.name} has no layout of adapters and cannot be folded into weights")
    if layout is not None and selection.head.soft_slot:
        raise InputError("export: peft puts a soft prompt before the text, but {soft} in head.template puts it inside")
    return layout


def _about(selection: ExportSelection, base: str, base_class: str, layout: str) -> dict[str, Any]:
    """The content of `export.json`."""
    run = selection.run
    federation, summary, scores = run.federation, run.summary, run.silos[selection.silo]
    return {
        "layout": layout,
        "base_model": base,
        "base_class": base_class,
        "base_sha256": federation.backbone.fingerprint,
        "part": selection.word,
        "mix": selection.mix,
        "whole": selection.whole,
        "prediction": selection.prediction,
        "per_text": selection.per_text,
        "private": list(selection.private),
        "tuner": {"name": selection.tuner.name, **selection.adapter.options},
        "virtual_tokens": selection.tuner.virtual_tokens,
        "segments": "token_type_ids" in federation.backbone.tokenizer.model_input_names,
        "method": {"name": federation.method.name, "paper": federation.method.paper},
        "silo": selection.silo,
        "silos": len(run.silos),
        "rows": scores["rows"],
        "rows_of_all_silos": _all_rows(run.silos),
        "metric": scores["metric"],
        "validation": scores["validation"],
        "test": scores["test"],
        "rounds": summary["rounds"],
        "best_round": summary["best_round"],
        "seed": summary["seed"],
        "precision": summary["precision"],
        "trained_over": federation.backbone.quantization,
        "quantization": _quantization(selection) if layout != "weights" else None,
        "privacy": summary.get("privacy"),
    }


def _quantization(selection: ExportSelection) -> dict[str, Any] | None:
    """Transformers' quantization configuration of the run's backbone; None if it is not quantized."""
    run = selection.run
    name = run.federation.backbone.quantization
    if name == NONE:
        return None
    dtype = WEIGHT_TYPES.get(run.summary["precision"], torch.float32)
    settings = QUANTIZATIONS[name].settings(dtype).to_dict()
    return {key: value for key, value in settings.items() if not key.startswith("_")}


def _all_rows(silos: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Training rows of all silos; None if a silo does not share its number."""
    shared = [silo["rows"]["train"] for silo in silos.values() if silo["rows"] is not None]
    return sum(shared) if len(shared) == len(silos) else None


def _head(selection: ExportSelection) -> dict[str, Any]:
    """The content of `head.json`: how the last layer's states become answers."""
    config, task = selection.run.federation.config, selection.task
    return {
        "kind": selection.head.name,
        "part": selection.head_part,
        "task": task.name,
        "task_kind": task.kind,
        "labels": list(task.labels),
        "max_length": config.train.max_length,
        **selection.head.description(config.head, task),
    }


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tensors(path: Path, tensors: Tensors) -> None:
    independent = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(independent, path, metadata={"format": "pt"})
