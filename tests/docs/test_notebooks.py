"""The notebooks under examples/ have no outputs, and run in a real kernel without network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_runs import save_model
from tests.support.tiny import save_backbone

BOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_kept(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    save_backbone("bert", tmp_path / "backbone")
    monkeypatch.setenv("SILOTUNE_BACKBONE", str(tmp_path / "backbone"))
    monkeypatch.setenv("SILOTUNE_LANGUAGE_MODEL", str(save_model("llama", "causal", tmp_path / "language-model")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs").is_dir()
    printed = [
        output.text for cell in book.cells for output in cell.get("outputs", ()) if output.output_type == "stream"
    ]
    assert not [text for text in printed if "Traceback" in text or "silotune: " in text]
