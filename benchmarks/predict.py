"""Personalized prediction and generation: batched against row by row, and dynamic weighting against none.

Classification: FedDPA-F with LoRA (r = 8) on MiniLM over the demo's test rows; every text has a mix of its own, and
goes through in batches of 64 (`batched`) or alone (`single`). `fixed` is the same model with one mix for all texts.
Parts are untrained but moved from their start: it is time that is measured. Generation: a Llama of random weights
(width 256, 4 blocks, vocabulary 2,000), 32 prompts of 8 to 64 words, 32 new tokens each, greedy, in the same ways.
`…_dynamic_over_fixed`: a text is embedded before its answer is looked for or written. The last key is rows per second,
batched over row by row, of classification under dynamic weighting.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import alternate, ratio
from benchmarks.random_llama import random_llama
from silotune.core.randomness import generator
from silotune.core.tensors import State
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.evaluation import predict
from silotune.evaluation.federation_scores import current_model_state
from silotune.models.backbone.backbone import Backbone
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.context import TrainingContext
from silotune.training.federation import Federation
from silotune.training.silo import SiloState

PROMPTS, NEW_TOKENS, WIDTH, VOCABULARY = 32, 32, 256, 2000


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own options."""
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")


def measure(repeats: int, rows: int, threads: int, precision: str) -> dict[str, Any]:
    """Rows per second of each way, and the ratios."""
    report: dict[str, Any] = {"repeats": repeats, "rows": rows}
    classify, number = _classification(rows, threads, precision, report)
    times = alternate(classify, repeats)
    generation = alternate(_generation(threads, precision), repeats)
    for name, seconds in times.items():
        report[f"classify_{name}_rows_per_second"] = round(number / statistics.median(seconds), 1)
    for name, seconds in generation.items():
        report[f"generate_{name}_tokens_per_second"] = round(PROMPTS * NEW_TOKENS / statistics.median(seconds), 1)
    report["generate_batched_over_single"] = ratio(generation["single"], generation["batched"])["ratio"]
    report["generate_dynamic_over_fixed"] = ratio(generation["batched"], generation["fixed"])["ratio"]
    report["classify_dynamic_over_fixed"] = ratio(times["batched"], times["fixed"])["ratio"]
    return report | ratio(times["single"], times["batched"])


Judged = tuple[TrainingContext, TrainingContext, State, TokenizedRows]
"""Weights for each text, one weight for all, a silo's model, and texts for it."""
Predict = Callable[[TrainingContext, State, TokenizedRows], object]


def _classification(
    rows: int, threads: int, precision: str, report: dict[str, Any]
) -> tuple[dict[str, Callable[[], object]], int]:
    """The three ways over some of every silo's test rows."""
    words = ["tuner=lora", "head=mlp", f"threads={threads}", f"precision={precision}"]
    dynamic, fixed = _both(words)
    report |= {"precision": dynamic.backbone.precision, "threads": torch.get_num_threads()}
    judged = _judged(dynamic, fixed, rows)
    return _ways(judged, predict.logits), sum(len(texts) for *_, texts in judged)


def _generation(threads: int, precision: str) -> dict[str, Callable[[], object]]:
    """The three ways over one silo's prompts."""
    draws = generator(1, "prompts")

    def written(count: int) -> list[Row]:
        lengths = torch.randint(8, 65, (count,), generator=draws).tolist()
        words = [torch.randint(5, VOCABULARY, (length,), generator=draws).tolist() for length in lengths]
        return [Row((" ".join(f"w{number}" for number in row), ""), 0, "w5") for row in words]

    silo = SiloData(
        "writer", Task("writing", (), "rouge1", "generation"), Splits(written(PROMPTS), [], written(PROMPTS))
    )
    words = ["tuner=lora", "head=lm", f"head.max_new_tokens={NEW_TOKENS}", f"threads={threads}", "head.beams=1"]
    dynamic, fixed = _both([*words, f"precision={precision}"], _llama(precision), [silo])
    return _ways(_judged(dynamic, fixed, PROMPTS), predict.answers)


def _both(words: list[str], backbone: Backbone | None = None, data: list[SiloData] | None = None) -> list[Federation]:
    """FedDPA-F with a weight for each text, and with one for all."""
    dynamic = build(read_config("demo", ["method=feddpa-f", *words]), backbone, data)
    fixed = build(read_config("demo", ["method=feddpa-f", "method.weighting=fixed", *words]), dynamic.backbone, data)
    return [dynamic, fixed]


def _judged(dynamic: Federation, fixed: Federation, rows: int) -> list[Judged]:
    cases = []
    for silo in dynamic.silos.values():
        silo.state = SiloState(_moved(dynamic.context.state_of(silo).private))
        test = next(iter(silo.evaluations.values())).test
        cases.append((dynamic.context, fixed.context, current_model_state(dynamic, silo), _chosen(test, range(rows))))
    return cases


def _ways(judged: Sequence[Judged], run: Predict) -> dict[str, Callable[[], object]]:
    def batched() -> None:
        for training, _, state, texts in judged:
            run(training, state, texts)

    def single() -> None:
        for training, _, state, texts in judged:
            for row in range(len(texts)):
                run(training, state, _chosen(texts, [row]))

    def without() -> None:
        for _, training, state, texts in judged:
            run(training, state, texts)

    return {"batched": batched, "single": single, "fixed": without}


def _chosen(rows: TokenizedRows, indices: Sequence[int]) -> TokenizedRows:
    """Some of the rows."""
    places = [row for row in indices if row < len(rows)]

    def of(values: list[Any] | None) -> list[Any] | None:
        return None if values is None else [values[row] for row in places]

    lists: dict[str, Any] = {name: of(getattr(rows, name)) for name in ("types", "reads", "targets", "answers")}
    return TokenizedRows(rows.task, [rows.ids[row] for row in places], labels=rows.labels[places], **lists)


def _moved(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    draws = generator(1, "moved")
    return {
        part: {name: tensor + 0.02 * torch.randn(tensor.shape, generator=draws) for name, tensor in tensors.items()}
        for part, tensors in state.items()
    }


def _llama(precision: str) -> Backbone:
    from silotune.models.backbone.device import resolve_precision

    return Backbone(*random_llama(WIDTH, vocabulary=VOCABULARY), precision=resolve_precision(precision))
