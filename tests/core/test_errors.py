"""What errors say: one line in a notebook, and the way on for the command line and for Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from silotune.errors import OR_RESUME, InputError, SilotuneError, require_unused


def test_a_notebook_shows_a_mistake_as_one_line() -> None:
    assert InputError("rounds: must be 1 or more")._render_traceback_() == ["InputError: rounds: must be 1 or more"]
    assert not hasattr(SilotuneError("a bug's message"), "_render_traceback_")


def test_a_used_folder_names_both_ways_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as refused:
        require_unused(tmp_path, "--out", OR_RESUME)
    for words in (f"--out {tmp_path}", "not empty", "--resume", "out=", "resume=True"):
        assert words in str(refused.value)
