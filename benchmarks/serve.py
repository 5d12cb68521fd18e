"""Requests of many silos to one server, against the same server with one silo a batch, and against peft.

Every silo has a LoRA (r = 8, query and value) of its own, untrained but moved from its start: it is time that is
measured. Labels: MiniLM, sentences of made words. Text: SmolLM2, `--tokens` new tokens an answer, greedy. All requests
are asked at once, in an order in which silos alternate at random. `mixed` is the engine of `silotune serve`, without
HTTP; `alone` is the same with one silo's requests in a batch; `set_adapter` is peft, request by request; `names` is
peft's `adapter_names` in batches of 64 (labels) or 32 (text). The ways take turns; numbers are medians of the turns.
`latency` is of `mixed`, at 50 and 90 % of its requests per second, which arrive at random. The last key is
`alone` / `mixed` of labels. With `--cold N`, N silos behind one server are then asked for labels once each, one after
the other: `cold_ms` is the time to an answer of a silo that is not open, `cold_mib` the memory before, and after.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

import silotune
from benchmarks.alternating import alternate, ratio
from benchmarks.made_text import PLACES, QUALITIES, THINGS
from silotune.core.files import file_sha256
from silotune.core.randomness import generator, sampler
from silotune.core.tensors import Tensors
from silotune.models.heads.lm import prompt_rows
from silotune.models.tuners.base import MergedAdapter
from silotune.serve.engine import Limits, ServingEngine
from silotune.serve.jobs import Refusal, Score, TextPiece, Write
from silotune.serve.models import Models, Served

Work = Score | Write
Asked = Sequence[tuple[str, str]]
"""Pairs of a silo and a text."""

BATCH = {"labels": 64, "text": 32}


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--silos", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256, help="for labels; a quarter as many for text")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="labels,text", help="none: an empty text")
    parser.add_argument("--cold", type=int, default=0, help="silos that are asked once each")


def measure(
    silos: int, requests: int, tokens: int, repeats: int, threads: int, kinds: str, cold: int = 0
) -> dict[str, Any]:
    """Requests per second of each way, ratios, and latencies."""
    torch.set_num_threads(threads)
    report: dict[str, Any] = {"silos": silos, "repeats": repeats, "threads": threads}
    last: dict[str, float] = {}
    for kind in filter(None, kinds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            run = _run(Path(folder), kind, silos, tokens)
            torch.set_num_threads(threads)
            number = requests if kind == "labels" else requests // 4
            result = _compare(run, kind, silos, number, tokens, repeats, report)
            last = last or result
    if cold:
        with tempfile.TemporaryDirectory() as folder:
            run = _run(Path(folder), "labels", cold, tokens)
            torch.set_num_threads(threads)
            report |= _cold(run, cold)
    return report | last


def _cold(run: Path, silos: int) -> dict[str, Any]:
    """Ask each silo once, and return how long that took and what it added to the process's memory."""
    import psutil

    process = psutil.Process()
    models = Models([run])
    engine = ServingEngine(models)
    engine.start()
    names = {f"silo-{number}": models.find(f"silo-{number}") for number in range(silos)}

    def ask(silo: str) -> float:
        return _ask(engine, names, [(silo, "a text")], lambda text: Score([text]))[0]

    ask("silo-0")
    before = process.memory_info().rss
    waits = [ask(f"silo-{number}") for number in range(1, silos)]
    after = process.memory_info().rss
    engine.stop()
    cuts = statistics.quantiles(waits, n=100)
    return {
        "cold_silos": silos,
        "cold_open": len(models.opened),
        "cold_ms": {f"p{cut}": round(1000 * cuts[cut - 1], 1) for cut in (50, 95, 99)},
        "cold_mib": [round(before / 2**20), round(after / 2**20)],
    }


def _compare(
    run: Path, kind: str, silos: int, number: int, tokens: int, repeats: int, report: dict[str, Any]
) -> dict[str, float]:
    order = sampler(1, "order")
    texts = [f"{text} {place}" for place, text in enumerate(_sentences(number))]
    pairs = [(f"silo-{order.randrange(silos)}", text) for text in texts]
    works: dict[str, Callable[[str], Work]] = {
        "labels": lambda text: Score([text]),
        "text": lambda text: Write(text, max_tokens=tokens),
    }
    models, limits = Models([run], keep=silos), Limits(waiting=10**6, seconds=3600)
    engines = {name: ServingEngine(models, limits, name == "alone") for name in ("mixed", "alone")}
    for engine in engines.values():
        engine.start()
    names = {silo: models.find(silo) for silo in {silo for silo, _ in pairs}}
    ways: dict[str, Callable[[], object]] = {
        name: partial(_ask, engine, names, pairs, works[kind]) for name, engine in engines.items()
    }
    ways["mixed"]()
    served = {silo: models.open(name) for silo, name in names.items()}
    ways |= _peft(served, kind, pairs, tokens)
    times = alternate(ways, repeats)
    for name, seconds in times.items():
        report[f"{kind}_{name}_per_second"] = round(number / statistics.median(seconds), 2)
    for name in ("set_adapter", "names", "alone"):
        report[f"{kind}_{name}_over_mixed"] = ratio(times[name], times["mixed"])
    rate = number / statistics.median(times["mixed"])
    for load in (0.5, 0.9):
        waits = _ask(engines["mixed"], names, pairs, works[kind], load * rate)
        cuts = statistics.quantiles(waits, n=100)
        report[f"{kind}_latency_ms_at_{load:.0%}"] = {f"p{cut}": round(1000 * cuts[cut - 1]) for cut in (50, 95, 99)}
    for engine in engines.values():
        engine.stop()
    return ratio(times["alone"], times["mixed"])


def _sentences(number: int) -> list[str]:
    """Made texts of 6 to 30 words."""
    draws, words = sampler(1, "sentences"), [*PLACES, *QUALITIES, *THINGS]
    return [" ".join(draws.choices(words, k=draws.randint(6, 30))) for _ in range(number)]


def _run(root: Path, kind: str, silos: int, tokens: int) -> Path:
    """Make a run of one silo, and of its model as many as are wanted, each with a LoRA of its own."""
    rows = [
        {"instruction": text, "output": "a b"} if kind == "text" else {"text": text, "label": "ab"[number % 2]}
        for number, text in enumerate(_sentences(24))
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {"text": "instruction", "label": "output", "kind": "generation"}
    silo = {"name": "silo-0", "task": "made", "path": str(root / "rows.jsonl")}
    keys = {
        "method": {"name": "local"},
        "tuner": {"name": "lora", "r": 8},
        "head": {"name": "lm", "max_new_tokens": tokens} if kind == "text" else {"name": "linear"},
        "silos": [silo | (written if kind == "text" else {"text": "text", "label": "label"})],
        "train": {"steps": 1, "batch_size": 4, "max_length": 128},
        "rounds": 1,
        "precision": "fp32",
        "backbone": "smollm2" if kind == "text" else "default",
    }
    (root / "run.yaml").write_text(yaml.safe_dump(keys))
    run = root / kind
    silotune.run(str(root / "run.yaml"), out=run)
    first = run / "models" / "silo-0"
    about, tensors = json.loads((first / "model.json").read_text()), load_file(first / "model.safetensors")
    for number in range(silos):
        folder = run / "models" / f"silo-{number}"
        folder.mkdir(exist_ok=True)
        draws = generator(1, "silo", number)
        moved = {name: each + 0.02 * torch.randn(each.shape, generator=draws) for name, each in tensors.items()}
        save_file(moved, folder / "model.safetensors")
        files = about["files"] | {"model.safetensors": file_sha256(folder / "model.safetensors")}
        (folder / "model.json").write_text(json.dumps(about | {"silo": folder.name, "files": files}))
        for file in first.glob("shared.*"):
            if number:
                (folder / file.name).hardlink_to(file)
    return run


def _ask(
    engine: ServingEngine, names: dict[str, str], pairs: Asked, work: Callable[[str], Work], rate: float | None = None
) -> list[float]:
    """Ask all, at once or so many a second, and return how long each took."""
    ended: queue.Queue[float] = queue.Queue()
    arrivals = sampler(1, "arrivals")

    def deliver(begun: float, event: object) -> None:
        if isinstance(event, Refusal):
            raise event
        if not isinstance(event, TextPiece) or event.reason:
            ended.put(time.perf_counter() - begun)

    def ask() -> None:
        due = time.perf_counter()
        for silo, text in pairs:
            if rate is not None:
                due += arrivals.expovariate(rate)
                time.sleep(max(0.0, due - time.perf_counter()))
            begun = time.perf_counter()
            engine.submit(names[silo], names[silo], work(text), partial(deliver, begun))

    asking = threading.Thread(target=ask)
    asking.start()
    waits = [ended.get() for _ in pairs]
    asking.join()
    return waits


def _peft(served: dict[str, Served], kind: str, pairs: Asked, tokens: int) -> dict[str, Callable[[], object]]:
    """Return the two ways of peft, over a copy of the same backbone with the same adapters."""
    import copy

    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    first = next(iter(served.values()))
    backbone, tuner = first.backbone, first.model.tuner
    task = "CAUSAL_LM" if kind == "text" else "FEATURE_EXTRACTION"
    model: Any = None
    for silo, one in served.items():
        (tensors,) = (own for own in one.model.state.values() if any("lora_A" in name for name in own))
        adapter = MergedAdapter(tensors, tuner.options_of(tensors))
        fields = tuner.peft_config(backbone, adapter, task) or {}
        config = LoraConfig(**{key: value for key, value in fields.items() if key not in ("peft_type", "bias")})
        if model is None:
            model = get_peft_model(copy.deepcopy(backbone.model), config, adapter_name=silo)
        else:
            model.add_adapter(silo, config)
        set_peft_model_state_dict(model, tuner.peft_tensors(backbone, adapter, task), adapter_name=silo)
    model.eval()
    tokenizer: Any = backbone.tokenizer
    prompts = {text: prompt_rows(served[silo].model.encoded([text])).ids[0] for silo, text in pairs}
    pad = backbone.pad_id

    def answer(rows: Asked, names: list[str] | None) -> None:
        adapters = {} if names is None else {"adapter_names": names}
        inputs = tokenizer.pad(
            {"input_ids": [prompts[text] for _, text in rows]},
            return_tensors="pt",
            padding_side="left" if kind == "text" else "right",
        )
        with torch.no_grad():
            if kind == "text":
                model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, **adapters)
                return
            states = model(**inputs, **adapters).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            pooled = (states * mask).sum(1) / mask.sum(1)
            for row, (silo, _) in enumerate(rows):
                head: Tensors = served[silo].model.state["head"]
                torch.nn.functional.linear(pooled[row], head["made.out.weight"], head["made.out.bias"])

    def by_request() -> None:
        for row in pairs:
            model.set_adapter(row[0])
            answer([row], None)

    def in_batches() -> None:
        order = sorted(pairs, key=lambda row: len(prompts[row[1]]))
        for begin in range(0, len(order), BATCH[kind]):
            rows = order[begin : begin + BATCH[kind]]
            answer(rows, [silo for silo, _ in rows])

    return {"set_adapter": by_request, "names": in_batches}
