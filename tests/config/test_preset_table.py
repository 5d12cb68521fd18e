"""Every value of every preset beside the place in its paper, or the word why it is so.

Whoever changes a value of a preset, adds one or takes one away changes this table as well. Descriptions aside,
backbones, tasks, label words and comparisons are held elsewhere (`tests/lab/test_comparison_presets.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from silotune.config import preset_names, preset_tree
from silotune.config.trees import flat
from silotune.runs.build.resolve import read_config

ELSEWHERE = ("description", "backbone", "compare", "data.tasks", "head.words")

ALONE = ("method.name", "aggregation.name")

Table = dict[str, tuple[object, str]]

TWO_ADAPTERS: Table = {
    f"per_method.{method}.method.adapters": (2, "Table I: 1.16 % trained, two adapters")
    for method in ("local", "centralised", "fedavg", "fedprox", "moon", "fedrep", "fedper")
}
FEDMCP: Table = {
    "method": ("fedmcp", ""),
    "tuner.name": ("bottleneck", "section IV-B, eq. 2"),
    "tuner.r": (16, "section V-A"),
    "tuner.sites": (["houlsby"], "section IV-B: after attention and feed-forward"),
    "head.name": ("mlp", "section IV-B: MLP classifiers"),
    "head.scope": ("private", "section IV-B"),
    "head.pooling": ("first", "section IV-B: RoBERTa's <s>"),
    "rounds": (25, "section V-A"),
    "train.lr": (5e-4, "section V-A; of the grid {1e-3, 5e-4, 1e-4, 5e-5}"),
    "train.epochs": (1, "section V-A"),
    "train.batch_size": (64, "section V-A"),
    "train.optimizer": ("adam", "section V-A"),
    "train.max_length": (128, "unstated"),
    "aggregation": ("uniform", "Algorithm 1, line 6"),
    "data.set": ("glue", "section V-A"),
    "data.merge": (True, "section V-A: train and validation merged"),
    "data.rows_per_silo": (4076, "section V-A: MRPC's rows"),
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
    "rounds": (100, "section 5.3"),
    "train.lr": (1e-3, "Table 5; Table 4 has 5e-5"),
    "train.epochs": (1, "section 5.3"),
    "train.batch_size": (8, "unstated: Trainer's default"),
    "train.dropout": ("own", "the Trainer trains in training mode"),
    "train.max_length": (128, "unstated"),
    "aggregation": ("samples", "Algorithm 1: n_c / n"),
    "data.set": ("glue", "section 5.2"),
    "data.seed": (10, "section 5.3"),
    "partition.name": ("dirichlet", "section 5.2"),
    "partition.alpha": (1.0, "section 5.2: 1.0 and 0.1"),
    "partition.seed": (10, "section 5.3"),
    "partition.balanced": (True, "Flower's partitioner"),
}
TEN: Table = {"partition.silos": (10, "section 5.2"), "sampling.fraction": (0.3, "section 5.2")}
HUNDRED: Table = {"partition.silos": (100, "section 5.2"), "sampling.fraction": (0.05, "section 5.2")}
F1: Table = {"data.metric": ("f1", "section 5.2: MRPC by F1")}
FEDPROMPT: Table = {
    "method": ("fedprompt", ""),
    "tuner.name": ("prompt", "section 2.2"),
    "tuner.tokens": (20, "section 3.1"),
    "head.name": ("verbalizer", "section 2.1"),
    "head.template": ("{text} is {mask}.", "section 2.1"),
    "rounds": (50, "section 3.1"),
    "train.lr": (0.3, "section 3.1"),
    "train.steps": (1000, "section 3.1: up to 1000 local steps"),
    "train.batch_size": (32, "unstated"),
    "train.optimizer": ("adam", "section 3.1; Adafactor for T5"),
    "train.max_length": (128, "unstated"),
    "aggregation": ("samples", "eq. 3"),
    "data.set": ("fedprompt", "section 3.1; GLUE's three tasks aside"),
    "partition.name": ("iid", "section 3.1"),
    "partition.silos": (10, "section 3.1"),
    "attack.trigger": ("cf", "unstated"),
}
PAIRS: Table = {"head.template": ("{a}? {mask}, {b}", "unstated")}
FEDDPA: Table = TRAINER | {
    "method": ("feddpa-t", ""),
    "tuner.name": ("lora", "section 5.1"),
    "tuner.r": (8, "section 5.1"),
    "tuner.alpha": (16.0, "the authors' code"),
    "tuner.dropout": (0.05, "the authors' code"),
    "tuner.sites": (["query", "value"], "section 5.1"),
    "head.name": ("lm", "section 5.1"),
    "head.beams": (4, "the authors' code"),
    "head.max_new_tokens": (80, "the authors' code"),
    "rounds": (20, "section 5.1"),
    "train.lr": (3e-4, "the authors' code"),
    "train.epochs": (10, "section 5.1"),
    "train.batch_size": (32, "section 5.1"),
    "train.max_length": (512, "the authors' code"),
    "aggregation": ("uniform", "eq. 2"),
    "data.set": ("feddpa", "section 5.1"),
    "data.validation_rows": (0, "no rows are held back"),
    "evaluation.test_time": (True, "section 3.1"),
    "evaluation.validation": ("metric", "section 5.1: ROUGE-1"),
}
FIFTY: Table = {
    f"per_method.{method}.{key}": (value, "section 5.1: 50 epochs")
    for method in ("local", "centralised")
    for key, value in (("rounds", 1), ("train.epochs", 50))
}
SWEPT_RATES = {
    **dict.fromkeys(["rolora", "fedalt", "pfedme"], 0.001),
    **dict.fromkeys(["flexlora", "hetlora", "fdlora", "local"], 0.002),
    **dict.fromkeys(["ffa-lora", "fedsa-lora", "fedsvd", "fedex-lora", "flora", "lora-fair", "apfl"], 0.005),
}
"""Of `fedlora-bench`, beside `train.lr`: the best of 1e-3, 2e-3, 5e-3 and 1e-2."""

TASKS_CUT = {"data.rows_per_silo": 200, "data.validation_rows": 200, "data.test_rows": 400}

FEDLORA_BENCH: Table = {
    "method": ("fedavg", "no paper has this setting"),
    **{key: (value, "small") for key, value in {"rounds": 5, "data.rows": 500, "data.seed": 10}.items()},
    "data.set": ("glue", "SST-2"),
    **{key: (value, "usual") for key, value in {"tuner.name": "lora", "tuner.r": 8, "tuner.alpha": 16}.items()},
    "tuner.sites": (["query", "value"], "usual"),
    "head.name": ("linear", "chosen"),
    "head.scope": ("shared", "chosen: one task"),
    "head.pooling": ("mean", "MiniLM's"),
    "per_method.pfedme.method.eta": (0.05, "chosen: few rounds"),
    "per_method.fdlora.method.sync": (3, "chosen: few rounds"),
    "per_method.fedalt.head.scope": ("private", "by its definition"),
    "train.lr": (1e-3, "fedavg's, swept"),
    **{f"per_method.{method}.train.lr": (rate, "swept on validation rows") for method, rate in SWEPT_RATES.items()},
    "train.epochs": (1, "chosen"),
    "train.batch_size": (8, "small"),
    "train.optimizer": ("adam", "chosen"),
    "train.max_length": (64, "small"),
    "partition.name": ("iid", "one of two"),
    "partition.silos": (5, "small"),
    "partition.seed": (10, "chosen"),
}
SET_2: Table = {"per_method.feddpa-t.method.alpha": (0.3, "section 5.1: 0.3 on data set 2")}
CENTRAL: Table = {
    "rounds": (1, "Table 3: in one place"),
    "train.lr": (5e-5, "Table 3"),
    "train.epochs": (20, "Table 3"),
}
CLEAN: Table = {
    "attack.name": ("backdoor", "Table 2: the success rate of clean federations, too"),
    "attack.fraction": (0.0, "Table 2"),
}
SMALL: Table = {
    "head.pooling": ("mean", "as MiniLM was trained"),
    "rounds": (6, "small"),
    "train.lr": (1e-3, "small"),
    "train.batch_size": (16, "small"),
}
DEMO_CHAT: Table = {
    key: (value, "small")
    for key, value in {
        "method": "fedit", "aggregation": "uniform", "data.merge": True, "rounds": 3,
        "tuner.name": "lora", "tuner.r": 8, "tuner.alpha": 16, "tuner.sites": ["query", "value"],
        "head.name": "lm", "head.max_new_tokens": 24,
        "train.lr": 1e-3, "train.schedule": "linear", "train.schedule_over": "run", "train.epochs": 1,
        "train.batch_size": 6, "train.optimizer": "adamw", "train.weight_decay": 0, "train.max_length": 128,
    }.items()
}  # fmt: skip
CUT: Table = {f"data.{split}_rows": (n, "small") for split, n in (("train", 200), ("validation", 200), ("test", 500))}


def folder(name: str) -> Table:
    return {"data.set": (name, "the folder's name")}


GLUE: Table = {"data.set": ("glue", "section 3.1")}
ONE_TASK: Table = {
    "data.task": ("sentiment", "five domains of one task"),
    "data.labels": (["negative", "positive"], "five domains of one task"),
}


def labels(number: int) -> Table:
    return {"method": ("fedfame", ""), "server.labels_per_class": (number, "section 5.2")}


def without(table: Table, *keys: str) -> Table:
    return {key: value for key, value in table.items() if key not in keys}


LABELS = {"sst2": 300, "rte": 120, "qnli": 300, "mnli": 300, "mrpc": 175, "qqp": 300}
SIZES = {task: TEN if task in ("rte", "mrpc") else HUNDRED for task in LABELS}
TARGETS = {"sst2": "positive", "imdb": "positive", "offenseval": "NOT", "enron": "ham", "lingspam": "ham"}
TARGETS |= {"qnli": "entailment", "rte": "entailment"}
CPU: Table = TEN | {"head.pooling": ("mean", "as MiniLM was trained"), "rounds": (20, "small")}

PRESETS: dict[str, Table] = {
    **dict.fromkeys(("fedmcp-glue", "table1-glue", "table2-glue", "figure3-glue", "grids-glue"), FEDMCP | TWO_ADAPTERS),
    "uplinks-glue": FEDMCP | {key: TWO_ADAPTERS[key] for key in ("per_method.fedavg.method.adapters",)},
    "mixed6": without(FEDMCP, "data.merge", "data.rows_per_silo") | TWO_ADAPTERS | SMALL | CUT | folder("mixed6"),
    "sentiment5": without(FEDMCP, "data.merge", "data.rows_per_silo")
    | TWO_ADAPTERS
    | SMALL
    | CUT
    | folder("sentiment5")
    | ONE_TASK,
    "fedlora-bench": FEDLORA_BENCH,
    "fedlora-bench-tasks": without(FEDLORA_BENCH, "partition.silos")
    | {
        "head.scope": ("private", "chosen: unlike tasks"),
        "data.rows": (None, "rows_per_silo instead"),
        **{key: (rows, "small") for key, rows in TASKS_CUT.items()},
        "partition.name": ("none", "a silo per task"),
    },
    "fedlora-bench-ranks": FEDLORA_BENCH
    | {
        "method": ("flexlora", "no paper has this setting"),
        "tuner.r": (64, "the largest of the silos'"),
        "tuner.alpha": (128, "alpha / r as in fedlora-bench"),
        "train.lr": (2e-3, "flexlora's"),
    },
    "demo-chat": DEMO_CHAT | folder("demo"),
    "demo": without(FEDMCP, "data.rows_per_silo")
    | TWO_ADAPTERS
    | SMALL
    | folder("demo")
    | {"train.max_length": (64, "small")},
    **{
        f"fedavg-peft-{task}": PEFT_IN_FL | SIZES[task] | {"method": ("fedavg", "")} | (F1 if task == "mrpc" else {})
        for task in LABELS
    },
    **{
        f"fedfame-{task}": PEFT_IN_FL | SIZES[task] | labels(number) | (F1 if task == "mrpc" else {})
        for task, number in LABELS.items()
    },
    "fractions-sst2": PEFT_IN_FL | HUNDRED | labels(300),
    "fractions-mrpc": PEFT_IN_FL | TEN | labels(175) | F1,
    "table45-sst2": PEFT_IN_FL | CPU | labels(300) | {"data.rows": (6000, "small")},
    "server-only-sst2": PEFT_IN_FL | CPU | labels(300) | {"data.rows": (6000, "small")},
    "table45-mrpc": PEFT_IN_FL | CPU | labels(175) | F1,
    **{
        f"fedprompt-{task}": FEDPROMPT
        | (PAIRS if task in ("qnli", "rte") else {})
        | (GLUE if task in ("sst2", "qnli", "rte") else {})
        | {"attack.target": (target, "unstated")}
        for task, target in TARGETS.items()
    },
    "table3-peft": PEFT_IN_FL | HUNDRED | {"method": ("fedavg", "")} | CENTRAL,
    "table4-peft": PEFT_IN_FL | HUNDRED | labels(300) | {"train.lr": (5e-5, "Table 4")},
    "table5-peft": PEFT_IN_FL | HUNDRED | labels(300),
    "figures13-ten": PEFT_IN_FL | TEN | labels(120),
    "figures13-hundred": PEFT_IN_FL | HUNDRED | labels(300),
    **{
        f"table{number}-fedprompt": FEDPROMPT
        | GLUE
        | {"attack.target": ("positive", "unstated")}
        | (CLEAN if number == 2 else {})
        for number in range(1, 6)
    },
    **dict.fromkeys((f"table{number}-feddpa" for number in (1, 3, 4, 8, 9, 10, 11)), FEDDPA | FIFTY),
    "figure5-feddpa": FEDDPA | FIFTY,
    "table2-feddpa": FEDDPA | FIFTY | SET_2,
    "table14-feddpa": FEDDPA | FIFTY | {"evaluation.unseen": (["gigaword", "bool_q", "arc_easy"], "their kinds alone")},
    "new-silos-feddpa": FEDDPA
    | FIFTY
    | {"evaluation.new_silos": (["definite_pronoun_resolution", "trec"], "unstated")},
    "figure3-feddpa": FEDDPA
    | FIFTY
    | {f"evaluation.{key}": (True, "section 6.1") for key in ("per_round", "finish_per_round")},
    "feddpa-dataset1": FEDDPA | FIFTY,
    "feddpa-dataset2": FEDDPA | FIFTY | SET_2,
    "feddpa-rates": FEDDPA
    | FIFTY
    | {
        "sampling.fraction": (0.2, "section 6.2: 0.2 to 1"),
        "sampling.per_task": (True, "appendix A.1"),
        "data.parts": (5, "appendix A.1: 40 silos"),
    },
}
"""Preset → key → (value, place)."""


def given(preset: str) -> dict[str, Any]:
    """The keys that a preset gives, its base's among them, with the values that they have after it was read."""
    resolved = _named(read_config(preset, ["data.path=."]).model_dump(mode="json"))
    written = _named(preset_tree(preset))
    return {key: value if key.startswith("per_method.") else resolved[key] for key, value in written.items()}


def _named(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys, where `x` stands for `x.name` if that is all there is, and without those that are held elsewhere."""
    keys = {key.removesuffix(".name") if key in ALONE else key: value for key, value in flat(tree)}
    return {key: value for key, value in keys.items() if not key.startswith(ELSEWHERE)}


@pytest.mark.parametrize("preset", PRESETS)
def test_values_are_those_of_the_paper(preset):
    assert given(preset) == {key: value for key, (value, _) in PRESETS[preset].items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_a_method_brings_along_are_the_papers_for_other_methods_too(preset):
    """Under its own method a preset's value of these keys has no effect: the method's own is over it."""
    written = _named(preset_tree(preset))
    for key in ("aggregation", "tuner.name", "tuner.tokens"):
        assert written.get(key) == PRESETS[preset].get(key, (None, ""))[0]


def test_every_preset_has_a_table():
    assert {*PRESETS} == {*preset_names()}
