"""Federations over a quantized LLaMA against the same in bf16: scores, resume after a kill, exports in plain peft.

    python -m benchmarks quantization --out FOLDER [--backbone FOLDER] [--seeds 1,2,3]

Two federations on the CPU: FedDPA-T, silos of made instructions answered by the language-model head, and FedMCP with
LoRA over the demo's classification tasks. The small LLaMA is one of `benchmarks.pretrain_llama`; without `--backbone`
it is trained first, in FOLDER/llama. Every finished run is kept in FOLDER: called again, the benchmark goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.small_llama import rows_of
from silotune.interop.export import export
from silotune.runs.personal_model import load_model
from silotune.runs.run_result import load_run

FORMS = ("none", "int8", "nf4")
KINDS = ("copy", "letter", "yes-no", "short")
"""Kinds of made instructions, one silo each."""
ROWS = 100
"""Rows of a silo: 60 training, 20 validation and 20 test rows."""
STEPS = 400
"""Steps of pretraining, if no model is given."""
FEDDPA: dict[str, Any] = {
    "method": "feddpa-t",
    "tuner": {"name": "lora", "r": 8, "dropout": 0.05},
    "head": {"name": "lm", "max_new_tokens": 16},
    "rounds": 2,
    "train": {"lr": 3e-3, "epochs": 1, "batch_size": 16, "optimizer": "adamw", "max_length": 256},
}
FEDMCP = ("demo", "method=fedmcp", "tuner=lora", "tuner.r=8", "rounds=2", "train.lr=3e-3")
TESTED = FORMS[1:]
"""What is also killed, resumed, exported and opened, with the first seed."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="the folder of all runs")
    parser.add_argument("--backbone", type=Path, help="a folder of `benchmarks.pretrain_llama`")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 3])


def measure(out: Path, backbone: Path | None, seeds: Sequence[int]) -> str:
    """Run what is missing and return the table."""
    out.mkdir(parents=True, exist_ok=True)
    llama = backbone or _pretrained(out / "llama")
    sources = {"FedDPA-T": (str(_instructions(out)),), "FedMCP, LoRA": FEDMCP}
    common = (f"backbone={llama.resolve()}", "threads=1", "precision=bf16")
    lines = [
        "| federation | weights | average | paired difference to bf16 | resumed = whole | largest difference to peft |",
        "|---|---|---|---|---|---|",
    ]
    for name, source in sources.items():
        by_form: dict[str, list[float]] = {}
        for form in FORMS:
            words = (*source, *common, f"backbone.quantization={form}")
            place = out / f"{name.split(',')[0].lower()}-{form}"
            by_form[form] = [_score(place / str(seed), (*words, f"seed={seed}")) for seed in seeds]
            checks = ["", ""]
            if form in TESTED:
                checks = _checks(place, (*words, f"seed={seeds[0]}"), seeds[0])
            pairs = [one - other for one, other in zip(by_form[form], by_form["none"], strict=True)]
            cells = ["bf16" if form == "none" else form, _mean(by_form[form]), "" if form == "none" else _mean(pairs)]
            lines.append(f"| {' | '.join([name, *cells, *checks])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _pretrained(folder: Path) -> Path:
    words = ["--steps", str(STEPS), "--tokens", "2048", "--threads", "1", "--seed", "1", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "benchmarks.pretrain_llama", *words], check=True, stdout=sys.stderr)
    return folder


def _instructions(out: Path) -> Path:
    """Write the silos of made instructions, and the configuration that names them."""
    silos = []
    for kind in KINDS:
        rows: list[dict[str, str]] = []
        stream = rows_of(7, "quantization", kind, unseen=True)
        while len(rows) < ROWS:
            row = next(stream)
            if row.kind == kind:
                rows.append({"instruction": row.instruction, "output": row.answer})
        path = out / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        fields = {"text": "instruction", "label": "output", "kind": "generation", "metric": "rouge1"}
        silos.append({"name": kind, "task": kind, "path": str(path.resolve()), **fields})
    config = out / "feddpa.yaml"
    config.write_text(yaml.safe_dump({**FEDDPA, "silos": silos}), encoding="utf-8")
    return config


def _command(place: Path, words: Sequence[str], *more: str) -> list[str]:
    return [sys.executable, "-m", "silotune", "run", *words, "--out", str(place), *more]


def _score(place: Path, words: Sequence[str]) -> float:
    """The average of a run's test scores, in percent; the run is made, or goes on, if it is not finished."""
    if not (place / "summary.json").exists():
        more = ["--resume"] if place.exists() else []
        subprocess.run(_command(place, words, *more), check=True, stdout=subprocess.DEVNULL)
    return float(_summary(place)["average"])


def _summary(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "summary.json").read_text(encoding="utf-8")))


def _checks(place: Path, words: Sequence[str], seed: int) -> list[str]:
    """Kill and resume a run; open the export of another in peft. Kept in a file, as they take a while."""
    file = place / "checks.json"
    if not file.exists():
        whole, again = place / str(seed), place / "killed"
        if not (again / "summary.json").exists():
            _kill_after_a_round(again, words)
            subprocess.run(_command(again, words, "--resume"), check=True, stdout=subprocess.DEVNULL)
        equal = _summary(whole)["state_sha256"] == _summary(again)["state_sha256"]
        file.write_text(json.dumps(["yes" if equal else "no", f"{_difference(place, whole):.1e}"]), encoding="utf-8")
    return list(json.loads(file.read_text(encoding="utf-8")))


def _kill_after_a_round(place: Path, words: Sequence[str]) -> None:
    """Start a run and kill it when its first round is written."""
    process = subprocess.Popen(_command(place, words), stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not list(place.glob("checkpoints/*1*")):
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@torch.no_grad()
def _difference(place: Path, run: Path) -> float:
    """The largest difference of states between silotune and plain peft over the same quantized base, by their spread.

    In float32, and without the kernel that bitsandbytes takes on some CPUs where no gradient is wanted: it computes in
    bf16.
    """
    import transformers
    from peft import PeftModel
    from transformers.quantizers.auto import AutoQuantizationConfig

    from silotune.models.forward.mixing import make_plan

    opened = load_run(run, precision="fp32")
    silo = next(iter(opened.silos))
    to = place / "export"
    about = (
        export(opened.model(silo), "global", to) if not to.exists() else json.loads((to / "export.json").read_text())
    )
    settings = AutoQuantizationConfig.from_dict(about["quantization"] | {"bnb_4bit_compute_dtype": "float32"})
    auto = getattr(transformers, about["base_class"])
    base = auto.from_pretrained(about["base_model"], dtype=torch.float32, quantization_config=settings)
    model: Any = PeftModel.from_pretrained(base, str(to)).eval()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    backbone, state = opened.federation.backbone, opened.federation.coordinator.shared
    ids = backbone.tokenizer(["Copy the text: the old garden was bright"], return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    plan = make_plan(backbone, opened.federation.context.resolve({"global": 1.0}, state, {}, {}))
    own = backbone.encode({"input_ids": ids, "attention_mask": mask}, plan)
    inner = model.get_base_model()
    body = inner if about["base_class"] == "AutoModel" else inner.base_model
    theirs = body(input_ids=ids, attention_mask=mask).last_hidden_state
    answered = load_model(run, silo)
    if answered.task.kind == "generation":
        answered.write(["Copy the text: the old garden was bright"])
    else:
        answered.predict(["a river"] if answered.texts_per_row == 1 else [("a river", "a garden")])
    return float((own - theirs).abs().max() / own.std())
