"""The digest of stored weights: what it is of, and when it is computed again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from silotune.models.backbone import fingerprint
from silotune.models.backbone.fingerprint import CACHE_FILE, stored_fingerprint
from silotune.models.backbone.loading import load_backbone


@pytest.fixture
def folder(tmp_path: Path, backbone_folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backbone without a kept digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copied = shutil.copytree(backbone_folder("bert"), tmp_path / "bert")
    (copied / CACHE_FILE).unlink(missing_ok=True)
    return copied


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old enough to be told from later ones."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**9))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose bytes are read for a digest."""
    read: list[str] = []
    digests = fingerprint._tensor_digests

    def recorded(file):
        read.append(Path(file.name).name)
        return digests(file)

    monkeypatch.setattr(fingerprint, "_tensor_digests", recorded)
    return read


def change(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_second_start_does_not_read_the_weights_for_it(folder, reads, settled):
    first = load_backbone(str(folder), precision="fp32")
    again = load_backbone(str(folder), precision="fp32")
    assert first.fingerprint == again.fingerprint
    assert reads == ["model.safetensors"]


def test_changed_weights_of_the_same_size_are_read_anew(folder, reads):
    weights = folder / "model.safetensors"
    before, size = stored_fingerprint([weights]), weights.stat().st_size
    change(weights)
    assert weights.stat().st_size == size
    after = stored_fingerprint([weights])
    change(weights)  # within the tick of the file system's clock, perhaps
    assert len({before, after, stored_fingerprint([weights])}) == 3
    assert len(reads) == 3


def test_a_change_whose_time_is_set_back_is_read_anew(folder, settled):
    weights = folder / "model.safetensors"
    before = stored_fingerprint([weights])
    assert (folder / CACHE_FILE).is_file()
    change(weights)
    os.utime(weights, (1.0, 1.0))  # as rsync and tar do
    assert stored_fingerprint([weights]) != before


def test_shards_have_the_digest_of_the_whole(folder):
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    parts = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({name: tensors[name] for name in names[::2]}, parts[0])
    save_file({name: tensors[name] for name in names[1::2]}, parts[1], metadata={"made": "elsewhere"})
    assert stored_fingerprint(parts) == stored_fingerprint([folder / "model.safetensors"])
    renamed = {("x" + name if name == names[0] else name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "renamed.safetensors")
    assert stored_fingerprint([folder / "renamed.safetensors"]) != stored_fingerprint(parts)


@pytest.mark.parametrize("kept", ["nonsense", "[]", json.dumps({"form": 2, "files": {}, "sha256": "a" * 64})])
def test_a_digest_that_is_not_of_these_files_is_not_believed(folder, kept):
    expected = stored_fingerprint([folder / "model.safetensors"])
    (folder / CACHE_FILE).write_text(kept, encoding="utf-8")
    assert stored_fingerprint([folder / "model.safetensors"]) == expected


def test_a_folder_of_others_is_left_as_it_is(folder, tmp_path, reads, settled):
    installed = shutil.copytree(folder, tmp_path / "site-packages" / "bert")
    files = sorted(installed.iterdir())
    assert stored_fingerprint([installed / "model.safetensors"]) == stored_fingerprint(
        [installed / "model.safetensors"]
    )
    assert sorted(installed.iterdir()) == files
    assert len(reads) == 1
    assert len(list((tmp_path / "cache" / "silotune" / "fingerprints").iterdir())) == 1
