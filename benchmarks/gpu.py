"""Everything that is to be measured on a GPU, in steps that can be interrupted: `--out FOLDER` keeps what is done.

A call runs the steps that are left, in order, until `--budget` seconds (480) are over, and says whether another call is
needed. Finished steps are skipped; one that was stopped begins again, and runs of presets go on where they were. Each
step is a process of its own and writes `FOLDER/results/STEP.json`; `FOLDER/state.json` says how each ended. A step that
lacks what it needs is left out, with the reason.

    python -m benchmarks gpu --out FOLDER [--model DIR] [--language-model DIR] [--data DIR] [--step NAME] [--budget 480]

`--model`: an encoder's folder, with its masked language-model head for FedPrompt. `--language-model`: a causal model's.
`--data`: a folder with `glue/TASK/{train,validation,test}.jsonl`. Without them, models of random weights and made rows
take their place: times and memory then mean what they say, scores mean nothing. `--device cpu --tiny` runs everything
in minutes anywhere, to see that it runs: no number of that means anything. docs/performance.md describes it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import LEFT_OUT, STEPS, Settings, command_of, prepare, result_of
from silotune.core.files import make_folder, write_text
from silotune.errors import InputError, unknown_name_error

LEAST = 30
"""Seconds below which no further step is begun."""

TO_END = 20
"""Seconds that a step has to write what it has, once it was told to stop."""


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--out", required=True, help="a new folder, or one of an earlier call")
    parser.add_argument("--model", help="an encoder's folder")
    parser.add_argument("--language-model", help="a causal model's folder")
    parser.add_argument("--data", help="a folder that holds glue/")
    parser.add_argument("--step", action="append", help="only this step, even if it is done; repeatable")
    parser.add_argument("--budget", type=int, default=480, help="seconds of this call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes; no number means anything")


def measure(
    out: str,
    model: str | None = None,
    language_model: str | None = None,
    data: str | None = None,
    step: list[str] | None = None,
    budget: int = 480,
    device: str = "cuda",
    tiny: bool = False,
) -> dict[str, Any]:
    """Run steps until the budget is spent; how each step stands.

    Raises:
        InputError: for an unknown step, or a folder that was begun with other settings.
    """
    begun, folder = time.monotonic(), Path(out).resolve()
    for place in (folder, folder / "logs", folder / "results"):
        make_folder(place, f"--out {out}")
    settings = Settings(str(folder), _absolute(model), _absolute(language_model), _absolute(data), device, tiny)
    state = _state(folder, settings)
    for name in step or []:
        if name not in STEPS:
            raise unknown_name_error("step", name, STEPS)
    settings = prepare(settings)
    ran = 0
    for name in step or STEPS:
        rest = budget - (time.monotonic() - begun)
        if not step and state["steps"].get(name, {}).get("status") in ("done", "left out"):
            continue
        if ran and rest < LEAST:
            break
        state["steps"][name] = _run(name, settings, rest)
        write_text(folder / "state.json", json.dumps(state, indent=1))
        ran += 1
    return _report(state, settings)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _state(folder: Path, settings: Settings) -> dict[str, Any]:
    """What earlier calls have done.

    Raises:
        InputError: they had other settings.
    """
    file = folder / "state.json"
    fields = settings.as_dict()
    if not file.is_file():
        return {"settings": fields, "steps": {}}
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for key, value in fields.items():
        if state["settings"][key] != value:
            raise InputError(
                f"--out {folder}: was begun with {key}={state['settings'][key]}, not {value}; choose another folder"
            )
    return state


def _run(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Run one step in a process of its own, at most so long."""
    begun = time.monotonic()
    folder = Path(settings.out)
    log = folder / "logs" / f"{name}.log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **settings.environment(name)}
    with log.open("w", encoding="utf-8") as written:
        child = subprocess.Popen(
            command_of(name, settings),
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
            _end(child)
    took = {"seconds": round(time.monotonic() - begun, 1)}
    if code is None:
        return {"status": "unfinished", **took}
    lines = log.read_text(encoding="utf-8").strip().splitlines()
    if code in (2, LEFT_OUT):
        return {"status": "left out", "reason": lines[-1] if lines else "", **took}
    if code:
        return {"status": "failed", "exit": code, "said": lines[-5:], **took}
    result = result_of(name, settings)
    write_text(folder / "results" / f"{name}.json", json.dumps(result, indent=1))
    return {"status": "done", **took}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Tell a step and what it started to stop, and stop them if they do not."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def _report(state: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """How each step stands, and what its numbers are worth."""
    report: dict[str, Any] = {}
    for name in STEPS:
        entry = state["steps"].get(name, {"status": "to do"})
        reason = entry.get("reason") or " | ".join(entry.get("said", []))
        report[name] = entry["status"] + (f": {reason}" if reason else "")
    open_steps = [name for name, status in report.items() if status.startswith(("to do", "unfinished"))]
    report["meaningless"] = settings.meaningless() or "nothing"
    report["next"] = "run the same command again" if open_steps else "all steps have ended"
    report["ratio"] = sum(status == "done" for status in report.values())
    return report
