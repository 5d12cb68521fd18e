"""A notebook, run in a real kernel: the bar is drawn in place, and the cell's result is a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.config import dump

pytestmark = pytest.mark.long


@pytest.mark.filterwarnings("ignore")
def test_bar_table_and_picture(tiny_config, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    (tmp_path / "run.yaml").write_text(dump(tiny_config("fedmcp", "train.steps=1")))
    sources = (
        "from silotune import Callback, run\nfinished = run('run.yaml', rounds=2, out='out')",
        "finished",
        "print(finished)",
        "finished.plot()",
        "finished.to_pandas()",
        "class Stop(Callback):\n    def on_round(self, ended):\n        raise KeyboardInterrupt\n"
        "try:\n    run('run.yaml', rounds=2, out='half', callbacks=[Stop()])\nexcept KeyboardInterrupt:\n    pass",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    bars, table, text, picture, frame, stopped = (cell.outputs for cell in book.cells)
    shown = [output for output in bars if output.output_type == "display_data"]
    assert len(shown) == 1  # drawn in place
    assert 'value="1.000"' in shown[0].data["text/html"]
    assert "round 2: validation" in shown[0].data["text/html"]
    assert table[0].data["text/html"].startswith("<table>")
    assert len(table[0].data["text/plain"].splitlines()) == 2
    assert len(text[0].text.splitlines()) == 2
    assert "image/png" in picture[0].data
    assert "bytes_up" in frame[0].data["text/html"]
    assert "stopped" in stopped[0].data["text/html"]
    assert 'value="1.000"' not in stopped[0].data["text/html"]
    assert len(nbformat.writes(book)) < 200_000
