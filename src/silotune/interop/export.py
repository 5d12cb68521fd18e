"""`silotune export`: a silo's adapters or whole model from a finished run, for other libraries."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from silotune.core.tensors import Tensors
from silotune.errors import InputError, require_unused
from silotune.interop.fold_weights import can_fold, fold_in, load_plain
from silotune.interop.model_card import card
from silotune.interop.native_format import native_layout
from silotune.interop.peft_format import Layout, peft_layout
from silotune.interop.selection import ExportSelection, choose
from silotune.runs.run import Run

DEFAULT_BASE = "sentence-transformers/all-MiniLM-L6-v2"
"""Under which name others find the backbone `default`."""


def export(run: Run, silo: str, part: str, to: str | Path, base: str | None = None) -> dict[str, Any]:
    """Write one export folder.

    Args:
        run: a finished run, from `load_run(folder, precision="fp32")`.
        silo: whose model.
        part: `global`, `private`, `mixed` or `merged`.
        to: a new or empty folder.
        base: the base model's name in the export; the run's by default.

    Returns:
        The content of its `export.json`.

    Raises:
        InputError: where the run has no such part, it cannot be expressed, or the folder is not empty. Nothing is
            written then.
    """
    target = Path(to)
    check_target(target)
    chosen = choose(run, silo, part)
    backbone = run.federation.backbone
    base_class = _base_class(chosen)
    name = base or (DEFAULT_BASE if run.federation.config.backbone == "default" else run.federation.config.backbone)
    layout = None if part == "merged" else _layout(chosen, name, base_class)
    about, head = _about(chosen, name, base_class, "weights" if layout is None else layout.name), _head(chosen)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        if layout is None:
            model = load_plain(run.federation.config.backbone, base_class)
            fold_in(model, chosen.tuner, chosen.adapter)
            model.save_pretrained(temporary)
        else:
            _json(temporary / f"{layout.config_file}.json", layout.config)
            _tensors(temporary / f"{layout.tensor_file}.safetensors", layout.tensors)
        backbone.tokenizer.save_pretrained(temporary)
        _json(temporary / "head.json", head)
        if chosen.head_tensors:
            _tensors(temporary / "head.safetensors", chosen.head_tensors)
        _json(temporary / "export.json", about)
        (temporary / "README.md").write_text(card(about, head), encoding="utf-8")
        script = resources.files("silotune.interop") / "standalone.py"
        (temporary / "standalone.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        if target.exists():
            target.rmdir()
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"--to {target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return about


def check_target(target: Path) -> None:
    """Refuse to write over anything.

    Raises:
        InputError: where the folder is there and not empty.
    """
    require_unused(target, "--to")


def _base_class(chosen: ExportSelection) -> str:
    """The class of transformers that the base model is loaded with."""
    wanted = chosen.head.model_class
    several = chosen.run.federation.backbone.base.config.is_encoder_decoder
    return "AutoModelForSeq2SeqLM" if several and wanted != "AutoModel" else wanted


def _layout(chosen: ExportSelection, base: str, base_class: str) -> Layout | None:
    """The adapter's files; None for a tuner whose adapters are weights of the whole model."""
    backbone, tuner, adapter = chosen.run.federation.backbone, chosen.tuner, chosen.adapter
    layout = peft_layout(backbone, tuner, adapter, base, base_class)
    layout = layout or native_layout(tuner, adapter, base, base_class, backbone.fingerprint)
    if layout is None and not can_fold(tuner):
        raise InputError(f"export: tuner={tuner.name} has no layout of adapters and cannot be folded into weights")
    if layout is not None and chosen.head.soft_slot:
        raise InputError("export: peft puts a soft prompt before the text, but {soft} in head.template puts it inside")
    return layout


def _about(chosen: ExportSelection, base: str, base_class: str, layout: str) -> dict[str, Any]:
    run = chosen.run
    federation, summary, scores = run.federation, run.summary, run.silos[chosen.silo]
    return {
        "layout": layout,
        "base_model": base,
        "base_class": base_class,
        "base_sha256": federation.backbone.fingerprint,
        "part": chosen.word,
        "mix": chosen.mix,
        "whole": chosen.whole,
        "prediction": chosen.prediction,
        "per_text": chosen.per_text,
        "private": list(chosen.private),
        "tuner": {"name": chosen.tuner.name, **chosen.adapter.options},
        "virtual_tokens": chosen.tuner.virtual_tokens,
        "segments": "token_type_ids" in federation.backbone.tokenizer.model_input_names,
        "method": {"name": federation.method.name, "paper": federation.method.paper},
        "silo": chosen.silo,
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
        "privacy": summary.get("privacy"),
    }


def _all_rows(silos: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Training rows; None where a silo keeps its number to itself."""
    known = [silo["rows"]["train"] for silo in silos.values() if silo["rows"] is not None]
    return sum(known) if len(known) == len(silos) else None


def _head(chosen: ExportSelection) -> dict[str, Any]:
    """What `head.json` says: how states become answers."""
    config = chosen.run.federation.config
    options = config.head.model_dump(mode="json", exclude={"name", "scope"}, exclude_defaults=True)
    kind = chosen.head.name
    found = {
        "kind": kind,
        "part": chosen.head_part,
        "task": chosen.task.name,
        "task_kind": chosen.task.kind,
        "labels": list(chosen.task.labels),
        "max_length": config.train.max_length,
    }
    if kind in ("mlp", "linear"):
        dense = "out.weight · tanh(dense.weight · x + dense.bias) + out.bias"
        computes = dense if kind == "mlp" else "out.weight · x + out.bias"
        x = "mean over the text's tokens" if chosen.head.pooling == "mean" else "the text's first token"
        return found | {
            "pooling": chosen.head.pooling,
            "computes": f"logits = {computes}, where x is the last layer's state: {x}, virtual tokens left out",
        }
    if kind == "verbalizer":
        words = config.head.words or {}
        options["words"] = {label: words.get(label, [label]) for label in chosen.task.labels}
    return found | {"options": options}


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tensors(path: Path, tensors: Tensors) -> None:
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
