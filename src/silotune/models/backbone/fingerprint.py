"""Compute the sha256 of a backbone's stored weights, and cache it beside their files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from silotune.core.files import write_text
from silotune.errors import InputError
from silotune.models.backbone.lm_head import LMHead, without_lm_head
from silotune.models.backbone.quantization import NONE

CACHE_FILE = ".silotune-fingerprint.json"
"""Name of the file beside the weights that holds their digest."""

_FORM = 2
"""Number of the kept file's form; one of another form is not used."""

_CHUNK = 2**24
"""Bytes read at once."""

_SETTLED_NS = 2 * 10**9
"""Age at which a file's time tells it from a later change of the same size; file systems' clocks are coarse."""


def stored_fingerprint(files: Sequence[Path]) -> str:
    """Return the sha256 over names, types, shapes and bytes of all tensors in safetensors files.

    It does not depend on how the tensors are divided among files; see `kept_digest`.
    """
    return kept_digest(files, _digest)


def kept_digest(files: Sequence[Path], compute: Callable[[Sequence[Path]], str]) -> str:
    """Return a digest of files of one folder, computed once.

    It is kept, with sizes and times of the files, in their folder, or in a cache folder of the user if that is not
    writable or part of an installation.
    """
    status = {path.name: path.stat() for path in files}  # with the change time, which a program cannot set back
    stamps = {name: [own.st_size, own.st_mtime_ns, own.st_ctime_ns] for name, own in status.items()}
    places = _places(files[0].parent)
    for place in places:
        entry = _read(place)
        if entry.get("form") == _FORM and entry.get("files") == stamps and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
    digest, now = compute(files), time.time_ns()
    if places and max(stamp for _, *times in stamps.values() for stamp in times) < now - _SETTLED_NS:
        text = json.dumps({"form": _FORM, "files": stamps, "sha256": digest}, indent=1) + "\n"
        with contextlib.suppress(OSError):  # a full disk costs the next start some seconds
            places[0].parent.mkdir(parents=True, exist_ok=True)
            write_text(places[0], text)
    return digest


def _digest(files: Sequence[Path]) -> str:
    entries = []
    for path in files:
        with path.open("rb") as file:
            entries += _tensor_digests(file)
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(f"{entry}\n".encode())
    return total.hexdigest()


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file: tensor's name → type, shape and place; the tensors' bytes follow."""
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    try:
        header = json.loads(file.read(length)) if 8 + length <= size else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise InputError(
            f"backbone: {file.name} is no safetensors file, or not all of it (an unfinished download, or a pointer of "
            "git LFS?)"
        )
    return header


def _tensor_digests(file: BinaryIO) -> list[str]:
    """Return one line per tensor of a safetensors file: name, type, shape, and the sha256 of its bytes."""
    header = read_header(file)
    start = file.tell()
    lines = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, end = tensor["data_offsets"]
        file.seek(start + first)
        sha, rest = hashlib.sha256(), end - first
        while rest:
            chunk = file.read(min(rest, _CHUNK))
            if not chunk:
                raise EOFError(f"{name}: the file ends before the tensor does")
            sha.update(chunk)
            rest -= len(chunk)
        lines.append(json.dumps([name, tensor["dtype"], tensor["shape"], sha.hexdigest()]))
    return lines


def cache_root() -> Path:
    """Return the folder of silotune's cache: `SILOTUNE_CACHE`, else `silotune` in the user's own."""
    setting = os.environ.get("SILOTUNE_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silotune"
    return usual if setting in (None, "", "off") else Path(str(setting))


def _places(folder: Path) -> list[Path]:
    """Return the files that may cache a folder's digest, in order of lookup; a new digest goes to the first.

    Nothing is written to a folder that is read-only or belongs to an installed package.
    """
    folder = folder.resolve()
    beside = folder / CACHE_FILE
    ours = os.access(folder, os.W_OK) and "site-packages" not in folder.parts
    if os.environ.get("SILOTUNE_CACHE") == "off":
        return [beside] if ours else []
    by_path = cache_root() / "fingerprints" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:32]}.json"
    return [beside, by_path] if ours else [by_path, beside]


def _read(place: Path) -> dict[str, object]:
    try:
        entry = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


def weight_fingerprint(model: Any, stored: str | None, quantization: str) -> str:
    """Return the sha256 by which a run and its silos know a model's weights and how they are quantized."""
    stored = _float32_fingerprint(model) if stored is None else stored
    return stored if quantization == NONE else hashlib.sha256(f"{stored}|{quantization}".encode()).hexdigest()


def _float32_fingerprint(model: Any) -> str:
    """Return the sha256 of a model's parameters in float32, without a pooler."""
    base = without_lm_head(model)
    parameters = dict(base.named_parameters())
    if model.get_output_embeddings() is not None:
        parameters |= LMHead(model, base).parameters
    sha = hashlib.sha256()
    for name, tensor in sorted(parameters.items()):
        if not name.startswith("pooler."):
            sha.update(f"{name}|{tuple(tensor.shape)}|".encode())
            sha.update(tensor.detach().float().cpu().contiguous().reshape(-1).numpy().data)
    return sha.hexdigest()
