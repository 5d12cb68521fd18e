"""Write a silo's adapters or whole model for other programs: peft, transformers, servers of language models, ONNX."""

from __future__ import annotations

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from silotune.config import BackboneConfig
from silotune.config.head import HeadConfig
from silotune.core.files import file_sha256
from silotune.core.serialization import write_tensor_file
from silotune.data.kinds import KINDS
from silotune.data.tasks import Task
from silotune.errors import InputError, library_errors, require_known, require_unused
from silotune.interop.adapters import Layout, can_fold, fold_in, load_plain, native_layout, peft_layout, with_last_layer
from silotune.interop.comparison import compare
from silotune.interop.model_card import DEFAULT_BASE, card
from silotune.interop.onnx_model import FILE, check_classifier, write_onnx
from silotune.interop.selection import ExportSelection, select
from silotune.interop.served_lora import (
    GGUF_FILE,
    GGUF_PROGRAMS,
    SERVERS,
    as_lora,
    check_family,
    check_served,
    write_gguf,
)
from silotune.interop.token_classifier import CLASS, token_classifier
from silotune.models.backbone.backbone import WEIGHT_TYPES
from silotune.models.backbone.loading import stored_types
from silotune.models.backbone.packages import model_source
from silotune.models.backbone.quantization import NONE, QUANTIZATIONS
from silotune.models.backbone.stored_model import is_causal, weight_files
from silotune.runs.marked_texts import marking_head
from silotune.runs.model_file import require_guarantee
from silotune.runs.personal_model import PersonalModel

PROGRAMS = (*SERVERS, *GGUF_PROGRAMS, "onnx")
"""Values of `--for`."""

_TENSORS, _FORMAT = (".safetensors", ".gguf", ".onnx"), {"format": "pt"}
"""Endings of an export's files of tensors, and what transformers and peft want to find in safetensors' metadata."""

_LAYOUTS = {**dict.fromkeys(GGUF_PROGRAMS, "gguf"), "onnx": "onnx"}
"""Program → its own layout; the servers read peft's."""


def export(
    model: PersonalModel,
    part: str,
    to: str | Path,
    base: str | None = None,
    program: str | None = None,
    *,
    rank: int | None = None,
    alpha: float | None = None,
    without_guarantee: bool = False,
) -> dict[str, Any]:
    """Write a folder of a model that was opened with `precision="fp32"`; returns the content of `export.json`.

    Private parts that have no noise, in a run with noise on rows, are refused unless `without_guarantee`.
    """
    target = Path(to)
    require_unused(target, "--to")
    if program is not None:
        require_known("program in --for", program, PROGRAMS)
    if rank is not None and program not in (*SERVERS, *GGUF_PROGRAMS):
        raise InputError(f"--rank: belongs to --for {', '.join((*SERVERS, *GGUF_PROGRAMS))}")
    selection, product_error = select(model, part, alpha), None
    if selection.private:
        require_guarantee(model.about, without_guarantee)
    if program == "onnx":
        check_classifier(selection)
    elif program is not None:
        selection, product_error = as_lora(selection, program, rank)
        check_family(selection) if program in GGUF_PROGRAMS else check_served(selection, program)
    backbone, head = model.context.backbone, _head(selection)
    of_program = _LAYOUTS.get(program or "")
    tagger = None if of_program else _tagger(selection, head)
    base_class = _base_class(model) if tagger is None else CLASS
    configured = BackboneConfig.model_validate(model.about["backbone"])
    name = base or (DEFAULT_BASE if configured.name == "default" else configured.name)
    layout = None if part == "merged" or of_program else _layout(selection, name, base_class)
    if layout is not None and tagger is not None:
        layout = with_last_layer(layout, tagger[0].base_model_prefix, tagger[1], selection.head_tensors)
    kind = of_program or ("weights" if layout is None else layout.name)
    about = _about(selection, name, base_class, kind) | {"for": program, "product_error": product_error}
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _json(temporary / "head.json", head)
        if selection.head_tensors:
            write_tensor_file(temporary / "head.safetensors", selection.head_tensors, _FORMAT)
        with library_errors(f"--to {target}: cannot be written"):
            backbone.tokenizer.save_pretrained(temporary)
        if layout is not None:
            files = {layout.tensor_file: write_tensor_file(temporary / layout.tensor_file, layout.tensors, _FORMAT)}
            _json(temporary / layout.config_file, layout.config | ({"files": files} if kind == "silotune" else {}))
        elif kind == "gguf":
            write_gguf(temporary / GGUF_FILE, selection)
            if program == "ollama":
                (temporary / "Modelfile").write_text(f"FROM {name}\nADAPTER ./{GGUF_FILE}\n", encoding="utf-8")
        else:
            _write_folded(temporary, selection, configured, base_class, head, kind)
        about["files"] = {
            path.name: file_sha256(path) for path in sorted(temporary.iterdir()) if path.suffix in _TENSORS
        }
        about["comparison"] = compare(selection, temporary, kind, base_class, tagger and tagger[0])
        _json(temporary / "export.json", about)
        (temporary / "README.md").write_text(card(about, head), encoding="utf-8")
        if head["kind"] == "retrieval" and kind in ("peft", "weights") and not selection.tuner.virtual_tokens:
            _write_modules(temporary, head, backbone.hidden_size)
        if kind in ("peft", "silotune", "weights"):
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


def _write_folded(
    folder: Path,
    selection: ExportSelection,
    configured: BackboneConfig,
    base_class: str,
    head: dict[str, Any],
    kind: str,
) -> None:
    """Write the base model with the mix in its weights: as it is stored, or as an ONNX graph in float32."""
    unquantized = selection.model.context.backbone.quantization == NONE
    plain_class = "AutoModel" if base_class == CLASS else base_class
    plain = load_plain(configured, plain_class, float32=unquantized or kind == "onnx")
    for tuner, adapter in ((selection.tuner, selection.adapter), *selection.others):
        fold_in(plain, tuner, adapter)
    if kind == "onnx":
        write_onnx(folder / FILE, plain, selection, head)
        return
    if base_class == CLASS and (tagger := token_classifier(plain, head["tags"], selection.head_tensors)):
        plain.pooler = None  # this class has none
        plain = tagger[0]
    if unquantized:
        types = stored_types(weight_files(model_source(configured.name), configured))
        plain.to((types.pop() if len(types) == 1 else None) or torch.float32)  # of several types: the widest
    with library_errors(f"--to {folder}: cannot be written"):  # of a full disk it raises no OSError
        plain.save_pretrained(folder)


def _tagger(selection: ExportSelection, head: dict[str, Any]) -> tuple[Any, str] | None:
    """Return transformers' class around the run's backbone and its last layer's name, if the export is opened by it."""
    model, tuner = selection.model, selection.tuner
    own_layout = tuner.implements("native_config") and selection.word != "merged"
    if not model.task.rules.by_position or own_layout or tuner.virtual_tokens:
        return None
    return token_classifier(model.context.backbone.model, head["tags"], selection.head_tensors)


def _base_class(model: PersonalModel) -> str:
    """Return the class of transformers that loads the base model."""
    model_class, encoder_decoder = model.context.head.model_class, model.context.backbone.base.config.is_encoder_decoder
    if model_class == "AutoModelForMaskedLM" and is_causal(model.context.backbone.base.config):
        return "AutoModelForCausalLM"
    return "AutoModelForSeq2SeqLM" if encoder_decoder and model_class != "AutoModel" else model_class


def _layout(selection: ExportSelection, base: str, base_class: str) -> Layout | None:
    """Lay the adapter out as peft does, or as runs do; None for a tuner with neither, which is folded into weights."""
    model, adapter = selection.model, selection.adapter
    if whole := getattr(model.context.backbone.model.config, "text_part_of", None):
        raise InputError(
            f"export: the run tuned the text part of a {whole} model, and an adapter would not open over the whole; "
            "allowed: --part merged, which writes the text model by itself"
        )
    layout = peft_layout(model.context.backbone, selection.tuner, adapter, base, base_class)
    if layout is None:
        layout = native_layout(model, adapter, selection.head_tensors, selection.private, base, base_class)
    if layout is None and not can_fold(model.tuner):
        raise InputError(
            f"export: tuner={model.tuner.name} has no layout of adapters and cannot be folded into weights"
        )
    if layout is not None and model.context.head.soft_slot:
        raise InputError("export: peft puts a soft prompt before the text, but {soft} in head.template puts it inside")
    return layout


def _about(selection: ExportSelection, base: str, base_class: str, layout: str) -> dict[str, Any]:
    """Return the content of `export.json`."""
    model = selection.model
    backbone, about = model.context.backbone, model.about
    copied = ("method", "silo", "silos", "rows", "rows_of_all_silos", "metric", "validation", "test", "rounds")
    return {
        "layout": layout,
        "base_model": base,
        "base_class": base_class,
        "base_sha256": backbone.fingerprint,
        "part": selection.word,
        "mix": selection.mix,
        "whole": selection.whole,
        "prediction": selection.prediction,
        "per_text": selection.per_text,
        "private": list(selection.private),
        "tuner": {"name": selection.tuner.name, **selection.adapter.options},
        "trained_tuner": model.tuner.name,
        "virtual_tokens": model.tuner.virtual_tokens,
        "segments": "token_type_ids" in backbone.tokenizer.model_input_names,
        **{key: about[key] for key in (*copied, "best_round", "seed", "precision")},
        "trained_over": backbone.quantization,
        "quantization": _quantization(model) if layout in ("peft", "silotune") else None,
        "privacy": about["privacy"],
    }


def _quantization(model: PersonalModel) -> dict[str, Any] | None:
    """Return transformers' quantization configuration of the run's backbone; None if it is not quantized."""
    name = model.context.backbone.quantization
    if name == NONE:
        return None
    dtype = WEIGHT_TYPES.get(model.about["precision"], torch.float32)
    settings = QUANTIZATIONS[name].settings(dtype).to_dict()
    return {key: value for key, value in settings.items() if not key.startswith("_")}


def _head(selection: ExportSelection) -> dict[str, Any]:
    """Return the content of `head.json`: how the last layer's states become answers."""
    model, task, head = selection.model, selection.model.task, selection.model.context.head
    long = (marking_head(model.context) if task.rules.by_position else head).long_texts
    return {
        "kind": head.name,
        "part": selection.head_part,
        "task": task.name,
        "task_kind": _reader(task),
        "labels": list(task.labels),
        "max_length": model.context.max_length,
        **({"window_overlap": long.common(model.context.max_length)} if long.in_windows else {}),
        **head.description(HeadConfig.model_validate(model.about["head"]), task),
    }


def _reader(task: Task) -> str:
    """Return the built-in kind whose way from outputs to answers a task's kind has; an export knows no other."""
    name: str = task.rules.reader()
    if name in KINDS.built_in:
        return name
    raise InputError(f"export: no way from outputs to answers of kind {task.kind!r} is known to an export")


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_modules(folder: Path, head: dict[str, Any], width: int) -> None:
    """Write the modules by which sentence-transformers opens a model or adapter: mean pooling, vectors of length 1."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    for path in filter(None, kinds):
        (folder / path).mkdir()
    written: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": head["max_length"]},
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
