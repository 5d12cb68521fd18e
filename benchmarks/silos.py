"""The engine's time and memory as silos grow in number: 10, 100, 1,000 (with --large also 10,000, tiny model only).

Ditto over LoRA (r = 8): every silo keeps a private adapter and two private heads, and sends a shared adapter. Every
silo holds `ROWS` short rows and takes one optimizer step per phase, so that the engine is measured and not training; it
has no rows to be judged on. Each size runs in a process of its own, which first runs a small federation to warm up.

- overhead: seconds of a run outside local training, per silo and round (messages both ways, their checks, aggregation,
  events, checkpoints).
- cpu: the same in processor time. Other work on the machine does not stretch it as it does seconds.
  Drawing a silo's first parts belongs to its first local round in both.
- growth: resident memory after the run less that before its first round (backbone, rows and the first shared parts are
  there by then), against the bytes of private state that the silos hold; `peak`: the largest during the run, less the
  same. A round's updates are in memory together until they are aggregated, and what they took stays with the process:
  `peak_over_private_and_updates` counts them too.

The last key, `ratio`, is growth / private state of the largest MiniLM federation in which every silo took part.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = (10, 100, 1000)
LARGE = 10_000
ROUNDS = 2
ROWS = 4
FRACTION = 0.05
FRACTION_ROUNDS = 10
_WARM_UP = 3


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--large", action="store_true", help="also 10,000 silos over the tiny model")
    parser.add_argument("--hidden", type=int, default=64, help="the tiny model's width (a multiple of 4)")
    parser.add_argument("--layers", type=int, default=2, help="the tiny model's blocks")


def measure(large: bool = False, hidden: int = 64, layers: int = 2) -> dict[str, Any]:
    """Per model and size: milliseconds of overhead per silo and round, and memory."""
    report: dict[str, Any] = {"tiny": {"hidden": hidden, "layers": layers}}
    sizes = [*SIZES, LARGE] if large else SIZES
    cases = [("tiny", size, 1.0, ROUNDS) for size in sizes] + [("minilm", size, 1.0, ROUNDS) for size in SIZES]
    cases += [("minilm", size, FRACTION, FRACTION_ROUNDS) for size in SIZES[1:]]
    for model, size, fraction, rounds in cases:
        words = [model, str(size), str(fraction), str(rounds), str(hidden), str(layers)]
        ended = subprocess.run([sys.executable, "-m", "benchmarks.silos", *words], stdout=subprocess.PIPE, check=True)
        name = f"{model}, {size} silos" + (f", fraction {fraction:g}" if fraction < 1 else "")
        report[name] = json.loads(ended.stdout)
    return report | {"ratio": report[f"minilm, {SIZES[-1]} silos"]["growth_over_private"]}


def _one(model: str, size: int, fraction: float, rounds: int, hidden: int, layers: int) -> dict[str, Any]:
    from silotune.models.backbone.loading import load_backbone

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        source = tiny_backbone(folder / "tiny", hidden, layers) if model == "tiny" else "default"
        backbone = load_backbone(source, precision="fp32")
        _engine(backbone, source, _WARM_UP, 1.0, ROUNDS, folder / "warm-up").run()
        gc.collect()
        empty = _resident()
        engine = _engine(backbone, source, size, fraction, rounds, folder / "run")
        training = _timed(engine._client.trainer)
        federation, history = engine.federation, engine.history
        gc.collect()
        before = _resident()
        _forget_peak()
        started, worked = time.perf_counter(), time.process_time()
        engine.run()
        seconds, work = time.perf_counter() - started, time.process_time() - worked
        gc.collect()
        growth, peak = _resident() - before, _resident("VmHWM") - before
        states = [silo.state.flat() for silo in federation.silos.values() if silo.state is not None]
        private = sum(tensor.numel() * tensor.element_size() for state in states for tensor in state.values())
        shared = sum(t.numel() * t.element_size() for t in federation.coordinator.flat().values())
        turns = rounds * len(federation.coordinator.choose(1, list(federation.silos)))
        return {
            "silos_that_took_part": len(states),
            "overhead_ms_per_silo_and_round": round(1000 * (seconds - history.training_seconds) / turns, 3),
            "cpu_ms_per_silo_and_round": round(1000 * (work - training[0]) / turns, 3),
            "training_ms_per_silo_and_round": round(1000 * history.training_seconds / turns, 3),
            "backbone_mib": _mib(sum(p.numel() * p.element_size() for p in backbone.base.parameters())),
            "before_mib": _mib(empty),
            "rows_mib": _mib(before - empty),
            "shared_mib": _mib(shared),
            "private_mib": _mib(private),
            "growth_mib": _mib(growth),
            "peak_mib": _mib(peak),
            "peak_over_private_and_updates": round(peak / (private + shared * turns / rounds), 3),
            "growth_over_private": round(growth / private, 3),
        }


def _engine(
    backbone: Any, source: str, size: int, fraction: float, rounds: int, folder: Path, words: Sequence[str] = ()
) -> Any:
    """A federation of silos with a few rows each, before its first round."""
    from silotune.config import dump
    from silotune.data.rows import Row, SiloData, Splits
    from silotune.data.tasks import Task
    from silotune.runs.build.builder import build
    from silotune.runs.build.resolve import read_config
    from silotune.runs.engines.in_process import InProcessEngine
    from silotune.runs.storage.run_folder import RunFolder

    words = [
        *words,
        "method=ditto",
        "tuner=lora",
        "head=linear",
        "train.steps=1",
        f"train.batch_size={ROWS}",
        "threads=1",
    ]
    words += [f"rounds={rounds}", f"sampling.fraction={fraction}", "precision=fp32", f"backbone={source}"]
    config = read_config("demo", words)
    task = Task("task", ("a", "b"))
    names = [f"silo-{number:05d}" for number in range(size)]
    data = [
        SiloData(name, task, Splits(train=[Row((f"{name} row {n}",), n % 2) for n in range(ROWS)])) for name in names
    ]
    federation = build(config, backbone, data)
    return InProcessEngine(federation, RunFolder.create(folder, dump(config), backbone.fingerprint))


def _timed(trainer: Any) -> list[float]:
    """The processor time of all local rounds from now on, in seconds, as the one item of a list."""
    spent, local_rounds = [0.0], trainer.rounds

    def timed(*arguments: Any) -> Any:
        started = time.process_time()
        try:
            return local_rounds(*arguments)
        finally:
            spent[0] += time.process_time() - started

    trainer.rounds = timed
    return spent


def tiny_backbone(folder: Path, hidden: int, layers: int, masked: bool = False) -> str:
    """A BERT of this size over single characters; `masked`: with its language-model head, and two whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = "abcdefghijklmnopqrstuvwxyz0123456789-"
    words = [*special, *characters, *(f"##{character}" for character in characters)]
    words += ["good", "bad", ".", "?", ","] if masked else []
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names).save_pretrained(folder)
    shape: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(words), intermediate_size=2 * hidden, max_position_embeddings=128, **shape)
    (BertForMaskedLM if masked else BertModel)(config).save_pretrained(folder)
    return str(folder)


def _resident(field: str = "VmRSS") -> int:
    """Resident memory of the process in bytes, now (or `VmHWM`: at its most)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status says no {field}")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _mib(size: int) -> float:
    return round(size / 2**20, 2)


if __name__ == "__main__":
    model, size, fraction, rounds, hidden, layers = sys.argv[1:]
    print(json.dumps(_one(model, int(size), float(fraction), int(rounds), int(hidden), int(layers))))
