"""Checkpoints: files are written beside the work, committed when all of them are there, and dropped when superseded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from silotune.communication.messages import Expected, MessageRefused, broadcast_message
from silotune.core.tensors import Tensors
from silotune.runs.storage import checkpoints as writing
from silotune.runs.storage.checkpoints import AsyncWriter, Checkpoint, Checkpoints
from silotune.training.client import SiloClient


@pytest.fixture
def folder(tmp_path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints")


@pytest.fixture
def gate(monkeypatch):
    """Files wait until it is opened."""
    opened, write = threading.Event(), writing.write_tensor_file

    def late(path: Path, tensors: Tensors) -> str:
        assert opened.wait(60)
        return write(path, tensors)

    monkeypatch.setattr(writing, "write_tensor_file", late)
    yield opened
    opened.set()


def write_thirty(writer: AsyncWriter, folder: Path) -> None:
    for n in range(30):
        writer.write(folder / f"{n}.safetensors", {}, [].append)


def checkpoint(*files: str) -> Checkpoint:
    return Checkpoint(1, files[0], {str(n): name for n, name in enumerate(files[1:])}, {})


def test_a_commit_waits_for_every_file_written_before(folder, gate):
    tensors = [{"x": torch.full((3,), float(n))} for n in range(5)]
    names = [folder.write(f"silos/{n}/0001", one) for n, one in enumerate(tensors)]
    committing = threading.Thread(target=folder.commit, args=(checkpoint(*names), None))
    committing.start()
    assert not (folder.path / "round-0001.json").exists()
    assert not any((folder.path / name).exists() for name in names)
    gate.set()
    committing.join(60)
    assert folder.latest() == checkpoint(*names)
    for name, one in zip(names, tensors, strict=True):
        assert torch.equal(folder.read(name)["x"], one["x"])


def test_what_is_read_was_written_first(folder, gate):
    name = folder.write("shared-0001", {"x": torch.arange(3)})
    threading.Timer(0.2, gate.set).start()
    assert folder.read(name)["x"].tolist() == [0, 1, 2]


def test_a_file_that_cannot_be_written_stops_the_commit(folder):
    name = folder.write("shared-0001", {"x": torch.ones(3)})
    folder.commit(checkpoint(name), None)
    (folder.path / ".shared-0002.safetensors.tmp").mkdir()  # where the file would be made
    second = folder.write("shared-0002", {"x": torch.zeros(3)})
    with pytest.raises(IsADirectoryError):
        folder.commit(Checkpoint(2, second, {}, {}), None)
    assert folder.latest() == checkpoint(name)


def test_files_are_removed_beside_the_work_and_after_the_manifest(folder, gate, monkeypatch):
    gate.set()
    first, second = (checkpoint(folder.write(f"shared-000{n}", {"x": torch.ones(3)})) for n in (1, 2))
    folder.commit(first, second)
    removed, remove = threading.Event(), writing.remove_files
    monkeypatch.setattr(writing, "remove_files", lambda paths: removed.wait(60) and remove(paths))
    folder.commit(second, None)
    assert folder.latest() == second
    assert (folder.path / first.shared).exists()
    removed.set()
    folder.close()
    assert [path.name for path in folder.path.glob("*.safetensors")] == [second.shared]


def test_an_error_comes_up_at_a_later_file_too_and_few_files_wait_in_memory(tmp_path, gate):
    writer = AsyncWriter()
    writing_all = threading.Thread(target=write_thirty, args=(writer, tmp_path))
    writing_all.start()
    writing_all.join(0.5)
    assert writing_all.is_alive()
    assert len(writer._waiting) <= writing._QUEUE_LENGTH
    gate.set()
    writing_all.join(60)
    writer.finish()
    assert len(list(tmp_path.iterdir())) == 30
    with pytest.raises(FileNotFoundError):
        write_thirty(writer, tmp_path / "nowhere")
    writer.close()


def test_a_broadcast_is_read_once_for_all_silos_and_refused_for_each():
    expected = Expected({"global/x": (2,)})
    participant = SiloClient(None, lambda silo: expected)  # type: ignore[arg-type]
    message = broadcast_message({"global": {"x": torch.tensor([1.0, 2.0])}}, 3)
    assert participant.open_broadcast(message, "alpha")[0] is participant.open_broadcast(message, "beta")[0]
    other = broadcast_message({"global": {"x": torch.tensor([5.0, 2.0])}}, 4)
    shared, number = participant.open_broadcast(other, "alpha")
    assert (shared["global"]["x"][0], number) == (5.0, 4)
    for _ in range(2):
        with pytest.raises(MessageRefused):
            participant.open_broadcast(b"nothing of the kind", "alpha")
    assert participant.open_broadcast(message, "alpha")[1] == 3


def test_older_files_go_and_newer_and_needed_ones_stay(folder):
    """A run that was killed while it dropped a superseded checkpoint finishes that when it is resumed."""
    tensors = {"x": torch.zeros(2)}
    names = [*(f"shared-000{n}" for n in "123"), *(f"silos/a/{n}" for n in ("0001", "0002", "0003-final", "0004"))]
    for name in names:
        folder.write(name, tensors)
    last = Checkpoint(3, "shared-0003.safetensors", {"a": "silos/a/0003-final.safetensors"}, {})
    best = Checkpoint(1, "shared-0001.safetensors", {"a": "silos/a/0001.safetensors"}, {})
    folder.close()
    for number in (1, 2, 3):
        (folder.path / f"round-{number:04d}.json").write_text("{}")
    folder.drop_older(last, best)
    left = sorted(path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file())
    newer = "silos/a/0004.safetensors"
    assert left == sorted({*last.names, *best.names, newer, "round-0001.json", "round-0003.json"})
