"""The steps of `python -m benchmarks gpu`: what each runs, in a process of its own, and what its result is.

A step is a command: the test suite, `silotune run` or `compare` of a preset, or a function of this module (`python -m
benchmarks.gpu_steps STEP SETTINGS`), which writes its result itself.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.core.files import write_text
from silotune.errors import SilotuneError

LEFT_OUT = 5
"""Exit code of a step that lacks what it needs; its last line says what."""

GLUE = {
    "MRPC": ("not_equivalent", "equivalent"),
    "RTE": ("entailment", "not_entailment"),
    "SST-2": ("negative", "positive"),
    "QNLI": ("entailment", "not_entailment"),
    "QQP": ("not_duplicate", "duplicate"),
    "MNLI": ("entailment", "neutral", "contradiction"),
}
"""Tasks of the presets, and their labels."""


@dataclass(frozen=True)
class Settings:
    """What was named on the command line.

    Args:
        out: the folder of results.
        model: an encoder's folder.
        language_model: a causal model's folder.
        data: a folder with `glue/`.
        device: where everything runs.
        tiny: the smallest sizes.
    """

    out: str
    model: str | None
    language_model: str | None
    data: str | None
    device: str
    tiny: bool

    def as_dict(self) -> dict[str, Any]:
        """Everything but the folder itself."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "out"}

    def environment(self, name: str) -> dict[str, str]:
        """Variables for a step's process: the suite takes its device from one; the CPU stays with the fake one."""
        real = name.startswith("device-suite") and self.device != "cpu"
        return {"SILOTUNE_TEST_DEVICE": self.device} if real else {}

    def meaningless(self) -> str:
        """Which numbers mean nothing under these settings; empty: none."""
        if self.tiny:
            return "every number: sizes are tiny"
        kinds = []
        if self.model is None or self.data is None or self.made("model") or self.made("data"):
            kinds.append("scores (random weights or made rows)")
        if self.device == "cpu":
            kinds.append("cohorts and memory as figures of a GPU (this is a CPU)")
        return "; ".join(kinds)

    def made(self, key: str) -> bool:
        """Whether a folder was made here rather than named."""
        path = getattr(self, key)
        return path is not None and Path(path).is_relative_to(Path(self.out) / "made")


def prepare(settings: Settings) -> Settings:
    """Make what was not named: an encoder and a causal model of random weights, and rows of made text."""
    from benchmarks.random_llama import save_random_llama
    from benchmarks.silos import tiny_backbone

    folder, tiny = Path(settings.out) / "made", settings.tiny
    encoder, llama, data = folder / "encoder", folder / "llama", folder / "data"
    if settings.model is None and not (encoder / "config.json").is_file():
        tiny_backbone(encoder, *((32, 2) if tiny else (768, 12)), masked=True)
    if settings.language_model is None and not (llama / "config.json").is_file():
        save_random_llama(llama, *((32, 2, 4) if tiny else (2048, 16, 16)), vocabulary=2000 if tiny else 32_000)
    if settings.data is None and not data.is_dir():
        _make_rows(data / "glue", {"train": 60, "validation": 12} if tiny else {"train": 4000, "validation": 400})
    return dataclasses.replace(
        settings,
        model=settings.model or str(encoder),
        language_model=settings.language_model or str(llama),
        data=settings.data or str(data),
    )


def _make_rows(folder: Path, counts: dict[str, int]) -> None:
    draws, words = random.Random(1), ("river", "doctor", "warm", "letter", "cold", "song", "kind", "market")
    for task, labels in GLUE.items():
        (folder / task).mkdir(parents=True)
        meta = {"task": task, "label_names": labels}
        (folder / task / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        for split, count in counts.items():
            lines = []
            for number in range(count):
                texts = [" ".join(draws.choices(words, k=draws.randint(4, 24))) for _ in range(1 + (task != "SST-2"))]
                columns = {f"sentence{place}": text for place, text in enumerate(texts, 1)}
                lines.append(json.dumps(columns | {"label": number % len(labels)}))
            (folder / task / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")


# -- measured here -----------------------------------------------------------------------------------------------------


def cohort(settings: Settings, model: str | None, head: str) -> dict[str, Any]:
    """2, 8 and 32 silos' LoRA in one forward against one after another."""
    from benchmarks.cohort import measure

    sizes = (2, 4) if settings.tiny else (2, 8, 32)
    return {f"{size} silos": measure(size, sizes[-1], model=model, device=settings.device, head=head) for size in sizes}


def language_model(settings: Settings, precision: str) -> dict[str, Any]:
    """Training against transformers' Trainer, generation against `generate`, both with peft."""
    from benchmarks.llm_throughput import TINY, Sizes, measure

    large = Sizes(rows=128, batch=16, instruction=(64, 256), answer=(32, 96), prompts=64, new_tokens=64)
    on_cpu = settings.device == "cpu"
    sizes = TINY if settings.tiny else Sizes() if on_cpu else large
    words = settings.made("language_model")
    repeats = 1 if settings.tiny else 5
    return measure(repeats, 2, precision, settings.device, settings.language_model, sizes, words)


def memory(settings: Settings) -> dict[str, Any]:
    """The peak memory of a step against `silotune cost`'s estimate, for several methods in float32."""
    import torch

    from benchmarks.memory_check import measure_step

    batch, tokens = (2, 16) if settings.tiny else (32, 128)
    assert settings.model is not None, "made if not named"
    assert settings.language_model is not None, "made if not named"
    report: dict[str, Any] = {"batch": batch, "tokens": tokens}
    encoder, causal = (settings.model, "linear"), (settings.language_model, "lm")
    for method, tuner, (model, head) in (
        ("fedavg", "lora", encoder),
        ("fedmcp", "bottleneck", encoder),
        ("fedavg-full", "full", encoder),
        ("fedit", "lora", causal),
        ("feddpa-t", "lora", causal),
    ):
        report[f"{method} {tuner}"] = measure_step(method, tuner, model, settings.device, batch, tokens, head)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return report


MEASURED: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "cohort": lambda settings: cohort(settings, settings.model, "linear"),
    "cohort-llm": lambda settings: cohort(settings, settings.language_model, "lm"),
    "llm-fp32": lambda settings: language_model(settings, "fp32"),
    "llm-bf16": lambda settings: language_model(settings, "bf16"),
    "memory": memory,
}


# -- presets and suites ------------------------------------------------------------------------------------------------

PRESETS = {
    "table1-glue": "compare",
    "table2-glue": "compare",
    "fedfame-sst2": "run",
    "fedprompt-sst2": "run",
}
"""Preset → the command that it is for."""

SUITES = {"device-suite": "not long", "device-suite-long": "long"}
"""Step → the tests of tests/properties/test_device_placement.py that it runs."""

STEPS = tuple(dict.fromkeys(("device-suite", "table1-glue", *MEASURED, *PRESETS, "device-suite-long")))
"""In the order in which they are worth the time of a GPU."""


def command_of(name: str, settings: Settings) -> list[str]:
    """The command line of a step."""
    python = [sys.executable, "-m"]
    if name in MEASURED:
        return [*python, "benchmarks.gpu_steps", name, json.dumps(dataclasses.asdict(settings))]
    if name in SUITES:
        words = ["tests/properties/test_device_placement.py", "-q", "-p", "no:cacheprovider", "-m", SUITES[name]]
        few = ["-k", "fedavg or waits"] if settings.tiny else []
        return [*python, "pytest", *words, *few, f"--junitxml={_junit(name, settings)}"]
    out = _run_folder(name, settings)
    words = [f"backbone={settings.model}", f"data.path={settings.data}/glue", f"device={settings.device}"]
    if PRESETS[name] == "compare":
        words += ["seeds=1", *(["methods=fedavg,fedmcp"] if settings.tiny and name == "table1-glue" else [])]
    if settings.tiny:
        words += ["rounds=1", "train.batch_size=4", "train.max_length=32", "threads=1"]
        words += {
            "compare": ["data.rows_per_silo=20"],
            "run": ["data.rows=40", "partition.silos=2", "server.labels_per_class=2"],
        }[PRESETS[name]]
        words = [word for word in words if name != "fedprompt-sst2" or not word.startswith("server.")]
        words += {"fedprompt-sst2": ["train.steps=2"], "fedfame-sst2": ["sampling.fraction=1.0"]}.get(name, [])
    resume = ["--resume"] if out.is_dir() else []
    return [*python, "silotune", PRESETS[name], name, *words, "--out", str(out), *resume]


def result_of(name: str, settings: Settings) -> dict[str, Any]:
    """What a finished step found."""
    note = {"meaningless": settings.meaningless() or "nothing", "settings": settings.as_dict()}
    if name in MEASURED:
        result = json.loads((Path(settings.out) / "results" / f"{name}.json").read_text(encoding="utf-8"))
    elif name in SUITES:
        import xml.etree.ElementTree as ElementTree

        suite = ElementTree.parse(_junit(name, settings)).getroot()[0].attrib
        result = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
        result["on"] = settings.device if settings.environment(name) else "the fake device"
    elif PRESETS[name] == "compare":
        with (_run_folder(name, settings) / "table.csv").open(encoding="utf-8") as file:
            result = {"table": [row for row in csv.DictReader(file) if row["silo"] == "average"]}
    else:
        summary = json.loads((_run_folder(name, settings) / "summary.json").read_text(encoding="utf-8"))
        keys = ("method", "rounds", "precision", "seconds", "samples_per_second", "average", "best_round")
        result = {key: summary[key] for key in keys}
    return result | note


def _run_folder(name: str, settings: Settings) -> Path:
    return Path(settings.out) / "runs" / name


def _junit(name: str, settings: Settings) -> Path:
    return Path(settings.out) / "logs" / f"{name}.xml"


def main(name: str, settings: str) -> int:
    """Run one of the steps that are measured here, and write its result."""
    step_settings = Settings(**json.loads(settings))
    try:
        result = MEASURED[name](step_settings)
    except SilotuneError as error:
        print(error)
        return LEFT_OUT
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed")
        return LEFT_OUT
    write_text(Path(step_settings.out) / "results" / f"{name}.json", json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
