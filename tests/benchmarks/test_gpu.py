"""`python -m benchmarks gpu`: steps are skipped when done, go on when stopped, and say why when they are left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_steps
from silotune.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def step_script(folder: Path, body: str) -> list[str]:
    """A command that writes the result of step `cohort`."""
    written = f"import json, pathlib; p = pathlib.Path({str(folder)!r}) / 'results' / 'cohort.json'"
    return [sys.executable, "-c", f"{written}; {body}"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """`call(body, **options)` runs the step `cohort` as a script; nothing else is left to do."""
    monkeypatch.setattr(gpu, "prepare", lambda settings: settings)
    monkeypatch.setattr(gpu, "STEPS", ("cohort",))
    monkeypatch.setattr(gpu, "TO_END", 0.3)

    def run(body, **options):
        monkeypatch.setattr(gpu, "command_of", lambda name, settings: step_script(tmp_path, body))
        return gpu.measure(str(tmp_path), device="cpu", tiny=True, **options)

    return run


WRITES = "p.write_text(json.dumps({'speed': 3}))"


def test_a_finished_step_is_kept_and_not_run_again(call, tmp_path):
    assert call(WRITES)["cohort"] == "done"
    result = json.loads((tmp_path / "results" / "cohort.json").read_text())
    assert result["speed"] == 3
    assert result["meaningless"] == "every number: sizes are tiny"
    report = call("raise SystemExit(1)")
    assert report["cohort"] == "done"
    assert report["next"] == "all steps have ended"
    assert call("raise SystemExit(1)", step=["cohort"])["cohort"].startswith("failed")


def test_a_step_that_is_stopped_runs_again(call):
    report = call("import time; time.sleep(60)", budget=1)
    assert report["cohort"] == "unfinished"
    assert report["next"] == "run the same command again"
    assert call(WRITES)["cohort"] == "done"


def test_a_step_that_lacks_something_is_left_out_with_its_reason(call):
    assert call(f"print('no such data'); raise SystemExit({gpu_steps.LEFT_OUT})")["cohort"] == "left out: no such data"
    assert call(WRITES)["cohort"].startswith("left out")
    assert call(WRITES, step=["cohort"])["cohort"] == "done"


def test_other_settings_and_unknown_steps_are_refused(call, tmp_path):
    call(WRITES)
    with pytest.raises(InputError, match="was begun with tiny=True, not False"):
        gpu.measure(str(tmp_path), device="cpu")
    with pytest.raises(InputError, match="unknown step 'flight'"):
        call(WRITES, step=["flight"])


@pytest.mark.long
def test_every_step_runs_to_its_end_on_a_cpu(tmp_path):
    words = ["gpu", "--out", str(tmp_path / "gpu"), "--device", "cpu", "--tiny", "--budget", "1800", "--json"]
    ended = subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert {name: report[name] for name in gpu_steps.STEPS} == dict.fromkeys(gpu_steps.STEPS, "done")
    assert report["meaningless"].startswith("every number")
    for name in gpu_steps.STEPS:
        assert "meaningless" in json.loads((tmp_path / "gpu" / "results" / f"{name}.json").read_text())
