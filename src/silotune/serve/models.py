"""The models that a server answers with: their names, opened when they are first asked, the least used closed again."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from silotune.core.files import damage_named, file_sha256, read_bytes
from silotune.core.serialization import read_tensor_file
from silotune.core.tensors import Tensors
from silotune.errors import InputError, unknown_name_error
from silotune.evaluation.predict import Predictor
from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.generation import needs_no_padding
from silotune.runs.model_file import MODEL_FILE, OWN_FILE, SHARED_FILE, model_folders, read_model_file
from silotune.runs.personal_model import PersonalModel
from silotune.serve.jobs import Wanted

_WINDOW = 8192
"""The most tokens of a prompt with its answer, whatever the backbone was trained for."""

Signature = tuple[tuple[int, int, int], ...]
"""Inode, size and time of each file of a model's folder."""


@dataclass(eq=False)
class _File:
    """The tensors of one file; models hold it together, and it goes with the last of them."""

    tensors: Tensors


@dataclass
class Served:
    """One opened model.

    Args:
        signature: of its files when they were read.
        held: what it has in common with other models, which lasts as long as one of them.
    """

    name: str
    model: PersonalModel
    digest: str
    signature: Signature
    held: list[_File]

    def __post_init__(self) -> None:
        """Place the parts on the backbone's device, for all requests."""
        self.predictor = Predictor(self.model.context, self.model.state)

    @property
    def backbone(self) -> Backbone:
        """The backbone, one of all models with its weights."""
        return self.model.context.backbone

    @property
    def weighs_texts(self) -> bool:
        """Whether every text has a mix of its own."""
        return self.model.context.prediction.weighting is not None

    @property
    def writes(self) -> bool:
        """Whether it writes answers rather than to compute labels or numbers."""
        return self.gives == "answers"

    @property
    def gives(self) -> Wanted:
        """What is asked of it."""
        kind: Wanted = self.model.task.rules.gives
        return kind

    @cached_property
    def window(self) -> int:
        """The most tokens of a text, or of a prompt with its answer."""
        context, config = self.model.context, self.backbone.base.config
        if not self.writes or config.is_encoder_decoder:
            return context.max_length
        learned = int(getattr(config, "max_position_embeddings", None) or 0)
        return max(context.max_length, min(learned, _WINDOW)) - context.virtual_tokens

    @cached_property
    def key(self) -> Hashable:
        """Rows of models with equal keys share forwards; None: it shares with no other."""
        shared = self.predictor.key
        alone = shared is None or (self.writes and needs_no_padding(self.backbone, self.predictor.mix(), self.window))
        return None if alone else (id(self.backbone), shared)


class Models:
    """The models of run folders, and of single folders `models/NAME`, by name.

    Names are listed by the threads that answer; `open` is for the one thread that computes. `keep` models
    stay open; with `watch`, one is read anew once its files are others.
    """

    def __init__(
        self, folders: Sequence[Path], silos: Sequence[str] = (), keep: int = 256, watch: bool = False
    ) -> None:
        self._sources, self._silos, self._keep, self._watch = list(folders), list(silos), keep, watch
        self.opened: OrderedDict[str, Served] = OrderedDict()
        self.backbones: dict[Hashable, Backbone] = {}
        self._common: WeakValueDictionary[str, _File] = WeakValueDictionary()
        self._abouts: dict[str, tuple[dict[str, Any], int]] = {}
        self._folders = self._find()

    def _find(self) -> dict[str, Path]:
        by_name: dict[str, Path] = {}
        silos: set[str] = set()
        for source in self._sources:
            alone = (source / MODEL_FILE).is_file()
            folders = {"": source} if alone else model_folders(source)
            silos |= folders.keys()
            for silo, folder in folders.items():
                if alone or not self._silos or silo in self._silos:
                    name = source.resolve().name if alone else f"{source.resolve().name}/{silo}"
                    if name in by_name:
                        raise InputError(
                            f"{folder}: has the name {name!r}, as has {by_name[name]}; copy it to another name"
                        )
                    by_name[name] = folder
        for silo in self._silos:
            if silo not in silos:
                raise unknown_name_error("silo", silo, silos - {""})
        return by_name

    def names(self) -> list[str]:
        """Return the names of all models."""
        if self._watch:
            with suppress(InputError):  # while a folder is replaced, the models of before are known
                self._folders = self._find()
        return list(self._folders)

    def find(self, name: str) -> str:
        """Return the whole name of a model, of which the silo's name is enough if no other run has it."""
        if name in self._folders:
            return name
        same = [other for other in self._folders if other.rpartition("/")[2] == name]
        if len(same) != 1 and (name not in self.names()):
            raise unknown_name_error("model", name[:80], same or [*self._folders][:20])
        return same[0] if same else name

    def about(self, name: str) -> tuple[dict[str, Any], int]:
        """Return the content of a model's `model.json`, read again when it is another, and when it was written."""
        path = self._folders[name] / MODEL_FILE
        with damage_named(path):
            written = int(path.stat().st_mtime)
            if name not in self._abouts or self._abouts[name][1] != written:
                self._abouts[name] = read_model_file(path)[0], written
        return self._abouts[name]

    def open_first(self) -> None:
        """Open a model of each folder, so that backbones are loaded, and damaged folders known, at the start."""
        for source in self._sources:
            own = (name for name, folder in self._folders.items() if source in (folder, *folder.parents))
            if name := next(own, ""):
                self.open(name)

    def open(self, name: str) -> Served:
        """Return a model, opened if it is not, or if it is watched and its files are others now."""
        served = self.opened.get(name)
        if served is None or (self._watch and self._is_newer(served)):
            try:
                served = self._read(name)
            except InputError:
                if served is None:
                    raise
            self.opened[name] = served
        self.opened.move_to_end(name)
        while len(self.opened) > self._keep:
            self.opened.popitem(last=False)
        return served

    def _is_newer(self, served: Served) -> bool:
        signature = _signature(self._folders[served.name])
        return bool(signature) and signature != served.signature

    def _read(self, name: str) -> Served:
        """Read a model's folder; if it is replaced meanwhile, once more."""
        folder = self._folders[name]
        for retries in (2, 1, 0):
            before = _signature(folder)
            try:
                served = self._read_once(name, folder, before)
            except InputError:  # files of before and after do not belong together
                if not retries or _signature(folder) == before:
                    raise
                continue
            if _signature(folder) == before:
                break
        return served

    def _read_once(self, name: str, folder: Path, signature: Signature) -> Served:
        with damage_named(folder / MODEL_FILE):
            content = read_bytes(folder / MODEL_FILE)
            file = read_model_file(folder / MODEL_FILE)[1]
        # models of one backbone differ in nothing that it is loaded by
        head, tuner = file.make_head(), file.tuner.make()
        key = (file.backbone_sha256, file.precision, head.model_class, tuner.trains_backbone)
        whole, common = hashlib.sha256(content), list[_File]()
        threads = torch.get_num_threads()
        try:
            model = PersonalModel.open(folder, self.backbones.get(key), read=partial(self._tensors, whole, common))
        finally:
            torch.set_num_threads(threads)  # a run's own number is for its bits
        self.backbones.setdefault(key, model.context.backbone)
        return Served(name, model, whole.hexdigest(), signature, common)

    def _tensors(
        self, whole: Any, common: list[_File], folder: Path, name: str, files: Mapping[str, str] | None
    ) -> Tensors:
        """Read a file of tensors; one that several models have is kept once."""
        digest = (files or {}).get(name) or file_sha256(folder / name)
        file = self._common.get(digest)
        if file is None:
            self._common[digest] = file = _File(read_tensor_file(folder, name, files))
        common.append(file)
        whole.update(digest.encode())
        return dict(file.tensors)


def _signature(folder: Path) -> Signature:
    entries = []
    for file in (MODEL_FILE, SHARED_FILE, OWN_FILE):
        with suppress(OSError):
            stat = os.stat(folder / file)
            entries.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(entries)
