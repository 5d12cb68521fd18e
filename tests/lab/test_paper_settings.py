"""The presets of papers have the papers' values, and their comparisons the papers' methods, seeds and variations.

One table per paper: key → (value, where the paper states it). Presets without a paper are held by their own runs.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import pytest

from silotune.config import Config, preset_names, preset_tree
from silotune.config.trees import flat
from silotune.data.loading import load_silos
from silotune.lab.comparison import Comparison, read_comparison
from silotune.runs.build.resolve import read_config
from silotune.training.coordinator import Coordinator
from tests.support.tiny import write_data

Table = dict[str, tuple[object, str]]

FEDMCP: Table = {
    "tuner.name": ("bottleneck", "section IV-B, eq. 2"),
    "tuner.r": (16, "section V-A"),
    "tuner.sites": (["houlsby"], "section IV-B: after attention and feed-forward"),
    "head.name": ("mlp", "section IV-B: MLP classifiers"),
    "head.scope": ("private", "section IV-B"),
    "head.pooling": ("first", "section IV-B: RoBERTa's <s>"),
    "backbone.name": ("FacebookAI/roberta-base", "section V-A"),
    "rounds": (25, "section V-A"),
    "train.lr": (5e-4, "section V-A; of the grid {1e-3, 5e-4, 1e-4, 5e-5}"),
    "train.epochs": (1, "section V-A"),
    "train.batch_size": (64, "section V-A"),
    "train.optimizer": ("adam", "section V-A"),
    "aggregation.name": ("uniform", "Algorithm 1, line 6"),
    "data.merge": (True, "section V-A: train and validation merged"),
    "data.rows_per_silo": (4076, "section V-A: MRPC's rows"),
    "per_method.fedavg.method.adapters": (2, "Table I: 1.16 % trained, two adapters"),
}
TRAINER: Table = {
    "train.optimizer": ("adamw", "Trainer's default"),
    "train.schedule": ("linear", "Trainer's default, in every call of train()"),
    "train.weight_decay": (0.0, "Trainer's default"),
    "train.clip_norm": (1.0, "Trainer's default"),
}
PEFT_IN_FL: Table = TRAINER | {
    "tuner.name": ("bottleneck", "section 5.3"),
    "tuner.r": (24, "Table 2: 0.82 % of BERT-base"),
    "tuner.sites": (["houlsby"], "Table 2"),
    "head.name": ("linear", "Table 2: 1,538 parameters"),
    "head.scope": ("shared", "Algorithm 1"),
    "head.pooling": ("first", "BERT's [CLS]"),
    "backbone.name": ("google-bert/bert-base-uncased", "section 5.3"),
    "rounds": (100, "section 5.3"),
    "train.lr": (1e-3, "Table 5; Table 4 has 5e-5"),
    "train.epochs": (1, "section 5.3"),
    "train.batch_size": (8, "unstated: Trainer's default"),
    "aggregation.name": ("samples", "Algorithm 1: n_c / n"),
    "data.seed": (10, "section 5.3"),
    "partition.name": ("dirichlet", "section 5.2"),
    "partition.alpha": (1.0, "section 5.2: 1.0 and 0.1"),
    "partition.seed": (10, "section 5.3"),
    "partition.balanced": (True, "Flower's partitioner"),
}
FEDPROMPT: Table = {
    "tuner.name": ("prompt", "section 2.2"),
    "tuner.tokens": (20, "section 3.1"),
    "head.name": ("verbalizer", "section 2.1"),
    "backbone.name": ("google-bert/bert-base-uncased", "section 3.1"),
    "rounds": (50, "section 3.1"),
    "train.lr": (0.3, "section 3.1"),
    "train.steps": (1000, "section 3.1: up to 1000 local steps"),
    "train.optimizer": ("adam", "section 3.1; Adafactor for T5"),
    "aggregation.name": ("samples", "eq. 3"),
    "partition.name": ("iid", "section 3.1"),
    "partition.silos": (10, "section 3.1"),
}
FEDDPA: Table = TRAINER | {
    "tuner.name": ("lora", "section 5.1"),
    "tuner.r": (8, "section 5.1"),
    "tuner.alpha": (16.0, "the authors' code"),
    "tuner.dropout": (0.05, "the authors' code"),
    "tuner.sites": (["query", "value"], "section 5.1"),
    "head.name": ("lm", "section 5.1"),
    "head.beams": (4, "the authors' code"),
    "head.max_new_tokens": (80, "the authors' code"),
    "backbone.name": ("huggyllama/llama-7b", "section 5.1"),
    "backbone.quantization": ("auto", "the authors' code: eight bits"),
    "rounds": (20, "section 5.1"),
    "train.lr": (3e-4, "the authors' code"),
    "train.epochs": (10, "section 5.1"),
    "train.batch_size": (32, "section 5.1"),
    "train.max_length": (512, "the authors' code"),
    "aggregation.name": ("uniform", "eq. 2"),
    "evaluation.test_time": (True, "section 3.1"),
    "evaluation.validation": ("metric", "section 5.1: ROUGE-1"),
    "per_method.local.rounds": (1, "section 5.1: 50 epochs"),
    "per_method.local.train.epochs": (50, "section 5.1: 50 epochs"),
}
PAPERS = {"fedmcp": FEDMCP, "peft-in-fl": PEFT_IN_FL, "fedprompt": FEDPROMPT, "feddpa": FEDDPA}
"""Folder of presets → what they share."""

SMALL: Table = {"backbone.name": ("default", "small"), "head.pooling": ("mean", "small"), "rounds": (20, "small")}
OTHERWISE: dict[str, Table] = {
    "table3-peft": {
        "rounds": (1, "Table 3: in one place"),
        "train.lr": (5e-5, "Table 3"),
        "train.epochs": (20, "Table 3"),
    },
    "table4-peft": {"train.lr": (5e-5, "Table 4")},
    **dict.fromkeys(("table45-sst2", "table45-mrpc", "server-only-sst2"), SMALL),
    "uplinks-glue": {"backbone.name": ("default", "small")},
    **{
        name: {"per_method.feddpa-t.method.alpha": (0.3, "section 5.1")}
        for name in ("table2-feddpa", "feddpa-dataset2")
    },
    "feddpa-rates": {
        "sampling.fraction": (0.2, "section 6.2: 0.2 to 1"),
        "sampling.per_task": (True, "appendix A.1"),
        "data.parts": (5, "appendix A.1: 40 silos"),
    },
    **{
        f"{kind}-{task}": {
            "partition.silos": (10 if labels < 300 else 100, "section 5.2: few rows, few silos"),
            "sampling.fraction": (0.3 if labels < 300 else 0.05, "section 5.2"),
            "server.labels_per_class": (labels if kind == "fedfame" else None, "section 5.2"),
        }
        for task, labels in {"sst2": 300, "rte": 120, "qnli": 300, "mnli": 300, "mrpc": 175, "qqp": 300}.items()
        for kind in ("fedfame", "fedavg-peft")
    },
}
"""Preset → values that it alone has."""


def settings(config: Config) -> dict[str, Any]:
    """Dotted key → value; a section that holds its name alone is written as that name."""
    keys = dict(flat(config.model_dump(mode="json")))
    return keys | {f"{key}.name": value for key, value in keys.items() if isinstance(value, str) and "." not in key}


def presets_of(paper: str) -> list[str]:
    return [file.name.removesuffix(".yaml") for file in (resources.files("silotune") / "presets" / paper).iterdir()]


@pytest.mark.parametrize(("paper", "preset"), [(paper, name) for paper in PAPERS for name in presets_of(paper)])
def test_values_are_those_of_the_paper(paper: str, preset: str) -> None:
    expected = {key: value for key, (value, _) in (PAPERS[paper] | OTHERWISE.get(preset, {})).items()}
    found = settings(read_config(preset, ["data.path=."]))
    found |= {key: value for key, value in flat(preset_tree(preset)) if key.startswith("per_method.")}
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("task", ["sst2", "rte", "qnli", "mnli", "mrpc", "qqp"])
def test_fedavg_beside_fedfame_differs_in_the_method_alone(task: str) -> None:
    words = ["method=fedavg", "server.labels_per_class="]
    one, other = (settings(read_config(f"{kind}-{task}", words)) for kind in ("fedfame", "fedavg-peft"))
    assert {key for key in one | other if one.get(key) != other.get(key)} == {"description", "description.name"}


NINE = ["fedavg-full", "local", "fedavg", "fedlr", "fedap", "moon", "fedrep", "fedmatch", "fedmcp"]
BOTH, DUAL, SIX = ["fedavg", "fedfame"], ["feddpa-f", "feddpa-t"], ["centralised", "fedit", "fedlora", "local"]
THREE = (17, 25, 42)
RATES = {1e-3, 5e-5}
LENGTHS: dict[str, set[object]] = {"tuner.name": {"prefix", "bottleneck", "bitfit", "lora"}}
MODELS = {"backbone.name": {"google-bert/bert-base-uncased", "FacebookAI/roberta-base", "google-t5/t5-base"}}
ALPHAS: dict[str, set[object]] = {"partition.alpha": {1.0, 0.1}}

ABLATED: dict[str, set[object]] = {
    "method.mu": {0.05, 0},
    "method.gamma": {0.5, 0},
    "method.similarity": {"cka", "cosine"},
    "method.representation": {"mean", "first"},
    "method.private_view": {"alone", "full"},
}

COMPARED: dict[str, tuple[list[str], tuple[int, ...], int, dict[str, Any]]] = {
    "table1-glue": (
        NINE,
        (1, 2, 3),
        9,
        {"method.adapters": {1, 2, None}},
    ),
    "table2-glue": (["fedmcp"], (1, 2, 3), 6, ABLATED),
    "mixed6": (NINE, (1, 2, 3, 4, 5), 9, {}),
    "sentiment5": (NINE, (1, 2, 3, 4, 5), 9, {}),
    "figure3-glue": (["fedmcp", "fedavg"], (1, 2, 3), 2, {}),
    "grids-glue": (["fedmcp"], (1,), 12, {"train.lr": {5e-4, 1e-3, 1e-4, 5e-5}}),
    "table3-peft": (["centralised"], THREE, 30, {"tuner.name": {*LENGTHS["tuner.name"], "full"}}),
    "table4-peft": (BOTH, THREE, 96, LENGTHS | ALPHAS),
    "table5-peft": (BOTH, THREE, 96, LENGTHS | ALPHAS),
    "table45-sst2": (BOTH, THREE, 12, {"tuner.name": {"bottleneck", "lora"}, "train.lr": RATES} | ALPHAS),
    "table45-mrpc": (BOTH, THREE, 12, {"tuner.name": {"bottleneck", "lora"}, "train.lr": RATES} | ALPHAS),
    "figures13-ten": (BOTH, (42,), 96, LENGTHS | {"sampling.fraction": {0.3, 0.4, 0.5}, "train.lr": RATES}),
    "figures13-hundred": (BOTH, (42,), 192, LENGTHS | {"sampling.fraction": {0.05, 0.1, 0.15}, "train.lr": RATES}),
    "table1-fedprompt": (["fedprompt"], (1,), 6, MODELS | {"tuner.name": {"prompt", "full"}}),
    "table2-fedprompt": (["fedprompt"], (1,), 84, MODELS | {"attack.fraction": {0.0, 0.1}}),
    "table3-fedprompt": (["fedprompt"], (1,), 4, {"tuner.tokens": {1, 5, 10, 20}}),
    "table4-fedprompt": (["fedprompt"], (1,), 18, MODELS | {"uplink.epsilon": {None, 8, 100, 1e4, 1e5}}),
    "table5-fedprompt": (["fedprompt"], (1,), 7, MODELS | {"tuner.name": {"prompt", "p-tuning", "prefix"}}),
    "table1-feddpa": ([*SIX, *DUAL], (1,), 6, {}),
    "table2-feddpa": ([*SIX, *DUAL], (1,), 6, {}),
    "table3-feddpa": (DUAL, (1,), 8, {"method.weighting": {"dynamic", "fixed"}}),
    "table4-feddpa": (["feddpa-t"], (1,), 6, {"method.alpha": {0.3, 0.5, 0.7}}),
    "table8-feddpa": (["fedit", "fedlora", *DUAL], (1,), 4, {"method.mu": {0.01}}),
    "table9-feddpa": (DUAL, (1,), 6, {"method.similarity": {"l2", "pearson", "cosine"}}),
    "table10-feddpa": (DUAL, (1,), 4, {"method.representation": {"mean", "last"}}),
    "table11-feddpa": (DUAL, (1,), 4, {"backbone.name": {"huggyllama/llama-7b", "huggyllama/llama-13b"}}),
    "table14-feddpa": (["fedit", "fedlora", *DUAL], (1,), 4, {}),
    "figure3-feddpa": (["fedit", "fedlora", *DUAL], (1,), 4, {"evaluation.per_round": {True}}),
    "figure5-feddpa": (DUAL, (1,), 10, {"method.samples": {1, 3, 5, 7, 9}}),
    "feddpa-rates": (["fedlora", *DUAL], (1,), 15, {"sampling.fraction": {0.2, 0.4, 0.6, 0.8, 1.0}}),
}
"""Preset → methods, seeds, number of entries, and the values that some keys take."""


@cache
def planned(preset: str) -> Comparison:
    return read_comparison(preset, ["data.path=nowhere"])


@pytest.mark.parametrize("preset", COMPARED)
def test_a_comparison_is_the_papers(preset: str) -> None:
    methods, seeds, entries, varied = COMPARED[preset]
    comparison = planned(preset)
    configs = [settings(cell.config) for cell in comparison.cells]
    assert list(dict.fromkeys(config["method.name"] for config in configs)) == methods
    assert (comparison.seeds, len(comparison.entries)) == (seeds, entries)
    assert len(comparison.cells) == entries * len(seeds)
    assert comparison.ddof == (0 if seeds == THREE else 1)
    assert {key: {config.get(key) for config in configs} for key in varied} == varied


@pytest.mark.parametrize(("preset", "sizes"), [("fractions-sst2", (100, 10)), ("fractions-mrpc", (10, 100))])
def test_client_fractions(preset: str, sizes: tuple[int, int]) -> None:
    """PEFT in FL, section 5.4.1: 5, 10 and 15 of 100 silos a round, 3, 4 and 5 of 10."""
    sampled: dict[str, list[tuple[int, int]]] = {}
    for cell in planned(preset).cells:
        silos = cell.config.partition.silos
        coordinator = Coordinator({}, lambda updates: {}, cell.seed, fraction=cell.config.sampling.fraction)
        chosen = coordinator.choose(1, [str(silo) for silo in range(silos)])
        sampled.setdefault(cell.config.method.name, []).append((silos, len(chosen)))
    counts = {100: (5, 10, 15), 10: (3, 4, 5)}
    assert sampled == {method: [(size, count) for size in sizes for count in counts[size]] for method in BOTH}


def test_whatever_is_over_mrpc_reports_f1(tmp_path) -> None:
    presets = [name for name in preset_names() if name.endswith("-mrpc")]
    assert len(presets) >= 4
    write_data(tmp_path, ["beta"])
    (tmp_path / "beta").rename(tmp_path / "MRPC")
    for preset in presets:
        words = [f"data.path={tmp_path}", "partition.silos=3", "partition.balanced=false"]
        assert {silo.task.metric for silo in load_silos(read_config(preset, words))} == {"f1"}


SET_1 = ("glue_qqp", "snli", "web_nlg_en", "fix_punct", "cola", "wic", "definite_pronoun_resolution", "trec")
SET_2 = ("paws_wiki", "hellaswag", "qnli", "word_segment", "gigaword", "bool_q", "sentiment140", "arc_easy")
TASKS = {
    **dict.fromkeys(("fedmcp-glue", "table1-glue"), ("MRPC", "RTE", "SST-2", "QNLI", "QQP", "MNLI")),
    **{f"fedfame-{task.lower()}": (task,) for task in ("RTE", "QNLI", "MNLI", "MRPC", "QQP")},
    **{f"fedprompt-{task}": (task,) for task in ("imdb", "offenseval", "enron", "lingspam")},
    "feddpa-dataset1": SET_1,
    "feddpa-dataset2": SET_2,
    "table14-feddpa": (*SET_1, "gigaword", "bool_q", "arc_easy"),
}
"""Preset → its tasks: FedMCP, section V-A; PEFT in FL, Table 1; FedPrompt, section 3.1; FedDPA, Table 5."""


@pytest.mark.parametrize("preset", TASKS)
def test_tasks_are_the_papers(preset: str) -> None:
    assert tuple(preset_tree(preset)["data"]["tasks"]) == TASKS[preset]
