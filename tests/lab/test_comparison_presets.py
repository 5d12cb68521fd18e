"""The comparisons that the paper's tables and figures ask for: their cells, without running any."""

from __future__ import annotations

import re

import pytest

from silotune.config import preset_names, preset_tree
from silotune.data.loading import load_silos
from silotune.lab.comparison import read_comparison
from silotune.runs.build.resolve import read_config
from silotune.training.coordinator import Coordinator
from tests.support.tiny import write_data

METHODS = ("fedavg", "fedfame")


def cells_of(preset: str, *words: str):
    comparison = read_comparison(preset, ["data.path=nowhere", *words])
    assert len(comparison.cells) == len(comparison.entries) * len(comparison.seeds)
    return comparison, {(cell.entry, cell.seed): cell.config for cell in comparison.cells}


FRACTIONS = [
    ("fractions-sst2", (100, (5, 10, 15)), (10, (3, 4, 5))),
    ("fractions-mrpc", (10, (3, 4, 5)), (100, (5, 10, 15))),
]
"""Preset, silos and silos a round, further ones: PEFT in FL, section 5.4.1."""


@pytest.mark.parametrize(("preset", "base", "further"), FRACTIONS)
def test_client_fractions(preset, base, further):
    found, cells = cells_of(preset)
    assert found.seeds == (42,)
    silos = {}
    for (row, _), config in cells.items():
        number = config.partition.silos
        coordinator = Coordinator({}, lambda updates: {}, config.seed, fraction=config.sampling.fraction)
        sampled = len(coordinator.choose(1, [str(silo) for silo in range(number)]))
        silos.setdefault(row.partition("-")[0], []).append((number, sampled))
        assert (config.partition.alpha, config.partition.seed, config.rounds) == (1.0, 10, 100)
    assert silos == {m: [(number, count) for number, counts in (base, further) for count in counts] for m in METHODS}


@pytest.mark.parametrize("preset", ["table45-sst2", "table45-mrpc"])
def test_small_tables_4_and_5(preset):
    found, cells = cells_of(preset)
    assert (found.seeds, found.ddof, len(cells)) == ((17, 25, 42), 0, 36)
    settings = {
        (config.method.name, config.tuner.name, config.train.lr, config.partition.alpha, seed)
        for (_, seed), config in cells.items()
    }
    trained = [("bottleneck", 1e-3), ("bottleneck", 5e-5), ("lora", 1e-3)]
    assert settings == {
        (method, tuner, lr, alpha, seed)
        for method in METHODS
        for tuner, lr in trained
        for alpha in (1.0, 0.1)
        for seed in (17, 25, 42)
    }
    for config in cells.values():
        assert (config.rounds, config.partition.silos, config.sampling.fraction) == (20, 10, 0.3)
        assert config.tuner.options["r"] == {"bottleneck": 24, "lora": 1}[config.tuner.name]
        rows, labeled = (6000, 300) if preset.endswith("sst2") else (None, 175)
        assert (config.data.rows, config.server.labels_per_class) == (rows, labeled)


def test_whatever_is_over_mrpc_reports_f1(tmp_path):
    presets = [name for name in preset_names() if name.endswith("-mrpc")]
    assert len(presets) >= 4
    write_data(tmp_path, ["beta"])
    (tmp_path / "beta").rename(tmp_path / "MRPC")
    for preset in presets:
        words = [f"data.path={tmp_path}", "partition.silos=3", "partition.balanced=false"]
        assert {silo.task.metric for silo in load_silos(read_config(preset, words))} == {"f1"}


def swept(key: str, name: str, *values: object) -> dict[str, dict[str, object]]:
    """A group of variants that give one key's values."""
    return {f"{name}-{value}": {key: value} for value in values}


TASKS = ("sst2", "rte", "qnli", "mnli", "mrpc", "qqp")
TUNERS = {
    "prefix": {"tuner": "prefix", "tuner.tokens": 6, "tuner.reparametrise": 512, "tuner.width": 512},
    "adapter": {},
    "bitfit": {"tuner": "bitfit"},
    "lora": {"tuner": "lora", "tuner.r": 1},
}
"""Table 2 of the PEFT-in-FL paper: 8.16, 0.82, 0.095 and 0.035 % of BERT-base."""
RATES = {"lr-1e-3": {"train.lr": 1e-3}, "lr-5e-5": {"train.lr": 5e-5}}
MODELS = {
    "bert": {},
    "roberta": {"backbone": "FacebookAI/roberta-base"},
    "t5": {"backbone": "google-t5/t5-base", "train.optimizer": "adafactor"},
}
LAPLACE = {"uplink": "clip,laplace"}
SETS = {f"set{n}": {"preset": f"feddpa-dataset{n}"} for n in (1, 2)}
DUAL = ["feddpa-f", "feddpa-t"]
NINE = ["fedavg-full", "local", "fedavg", "fedlr", "fedap", "moon", "fedrep", "fedmatch", "fedmcp"]
UNEQUAL = {"partition": "quantity", "partition.alpha": 0.5}
POISONED = {"attack": "backdoor", "attack.fraction": 0.1}
SEEDS = {"seeds": [17, 25, 42], "std": {"ddof": 0}}
ONE = {"seeds": [1]}


def over(kind: str, *tasks: str) -> dict[str, dict[str, object]]:
    return {task: {"preset": f"{kind}-{task}"} for task in tasks}


SKEWED = {"partition.name": "dirichlet", "partition.alpha": 0.1}
MIXED_RANKS = {"tuner.ranks": {"silo-1": 2, "silo-2": 4, "silo-3": 8, "silo-4": 16}}
COMPARED = {
    "figure3-glue": {"methods": ["fedmcp", "fedavg"], "seeds": [1, 2, 3]},
    "grids-glue": {
        "methods": ["fedmcp"],
        **ONE,
        "variants": {"lr-1e-3": {"train.lr": 1e-3}, "lr-1e-4": {"train.lr": 1e-4}, "lr-5e-5": {"train.lr": 5e-5}}
        | swept("method.gamma", "gamma", 0.1, 0.3, 0.7, 0.9)
        | swept("method.mu", "mu", 0.01, 0.02, 0.1, 0.2),
    },
    "table3-peft": {
        "methods": ["centralised"],
        **SEEDS,
        "grid": {"task": over("fedavg-peft", *TASKS), "tuner": TUNERS | {"full": {"tuner": "full"}}},
    },
    **{
        f"table{n}-peft": {
            "methods": ["fedavg", "fedfame"],
            **SEEDS,
            "grid": {
                "task": over("fedfame", *TASKS),
                "tuner": TUNERS,
                "alpha": swept("partition.alpha", "alpha", 1.0, 0.1),
            },
        }
        for n in (4, 5)
    },
    **{
        f"figures13-{name}": {
            "methods": ["fedavg", "fedfame"],
            "seeds": [42],
            "grid": {
                "task": over("fedfame", *tasks),
                "tuner": TUNERS,
                "rate": RATES,
                "fraction": swept("sampling.fraction", "fraction", *fractions),
            },
        }
        for name, tasks, fractions in (
            ("ten", ("rte", "mrpc"), (0.3, 0.4, 0.5)),
            ("hundred", ("sst2", "qnli", "mnli", "qqp"), (0.05, 0.1, 0.15)),
        )
    },
    "table1-fedprompt": {
        "grid": {
            "plm": MODELS,
            "trained": {"prompt": {}, "full": {"tuner": "full", "train.lr": 5e-5, "train.optimizer": "adam"}},
        }
    },
    "table2-fedprompt": {
        "grid": {
            "task": over("fedprompt", "sst2", "imdb", "offenseval", "enron", "lingspam", "qnli", "rte"),
            "plm": MODELS,
            "sizes": {"iid": {}, "noniid": UNEQUAL},
            "silos": {"clean": {}, "poisoned": {"attack.fraction": 0.1}},
        }
    },
    "table3-fedprompt": {"grid": {"tokens": swept("tuner.tokens", "tokens", 1, 5, 10, 20)}},
    "table4-fedprompt": {
        "grid": {
            "plm": MODELS,
            "privacy": {
                "none": {},
                "clip-1000": {"uplink": "clip", "uplink.norm": "l1", "uplink.clip": 1000},
                "epsilon-8": LAPLACE | {"uplink.clip": 1, "uplink.epsilon": 8},
                "epsilon-100": LAPLACE | {"uplink.clip": 1, "uplink.epsilon": 100},
                "clip-1000-epsilon-1e4": LAPLACE | {"uplink.clip": 1000, "uplink.epsilon": 1e4},
                "clip-1000-epsilon-1e5": LAPLACE | {"uplink.clip": 1000, "uplink.epsilon": 1e5},
            },
        }
    },
    "table5-fedprompt": {
        "grid": {
            "plm": MODELS,
            "tuner": {"prompt": {}, "p-tuning": {"tuner": "p-tuning", "tuner.tokens": 20, "train.lr": 1e-3}},
        },
        "variants": {
            "t5-prefix": MODELS["t5"]
            | {"tuner": "prefix", "tuner.tokens": 5, "tuner.reparametrise": 512, "train.lr": 1e-3}
        },
    },
    **{f"table{n}-feddpa": {"methods": ["centralised", "fedit", "fedlora", "local", *DUAL], **ONE} for n in (1, 2)},
    "table3-feddpa": {
        "methods": DUAL,
        **ONE,
        "grid": {
            "set": SETS,
            "weighting": {"auto": {"method.weighting": "dynamic"}, "fixed": {"method.weighting": "fixed"}},
        },
    },
    "table4-feddpa": {
        "methods": ["feddpa-t"],
        **ONE,
        "grid": {"set": SETS, "alpha": swept("method.alpha", "alpha", 0.3, 0.5, 0.7)},
    },
    "table8-feddpa": {
        "methods": ["fedit", "fedlora", *DUAL],
        **ONE,
        "grid": {"base": {"fedprox": {"method.mu": 0.01}}},
    },
    "table9-feddpa": {
        "methods": DUAL,
        **ONE,
        "grid": {"similarity": {name: {"method.similarity": name} for name in ("l2", "pearson", "cosine")}},
    },
    "table10-feddpa": {
        "methods": DUAL,
        **ONE,
        "grid": {
            "representation": {"avg": {"method.representation": "mean"}, "last": {"method.representation": "last"}}
        },
    },
    "table11-feddpa": {
        "methods": DUAL,
        **ONE,
        "grid": {"size": {"7b": {}, "13b": {"backbone": "huggyllama/llama-13b"}}},
    },
    "table14-feddpa": {"methods": ["fedit", "fedlora", *DUAL], **ONE},
    "new-silos-feddpa": {"methods": DUAL, **ONE},
    "figure3-feddpa": {"methods": ["fedit", "fedlora", *DUAL], **ONE},
    "figure5-feddpa": {"methods": DUAL, **ONE, "grid": {"rows": swept("method.samples", "S", 1, 3, 5, 7, 9)}},
    "table1-glue": {"methods": NINE, "seeds": [1, 2, 3]},
    "table2-glue": {"methods": ["fedmcp"], "seeds": [1, 2, 3], "ablation": True},
    **{name: {"methods": NINE, "seeds": [1, 2, 3, 4, 5]} for name in ("mixed6", "sentiment5")},
    "uplinks-glue": {
        "methods": ["fedavg", "fedmcp"],
        "seeds": [1, 2, 3],
        "variants": {
            **{name: {"uplink": name} for name in ("fp16", "int8", "int4")},
            "int4-no-feedback": {"uplink": "int4", "uplink.feedback": False},
            "int4-stochastic": {"uplink": "int4", "uplink.rounding": "stochastic", "uplink.feedback": False},
        },
    },
    "fedlora-bench": {
        "methods": [
            *("fedavg", "ffa-lora", "fedsa-lora", "rolora", "flexlora", "fedsvd"),
            *("fedex-lora", "flora", "lora-fair", "hetlora", "fdlora", "fedalt", "apfl", "pfedme"),
        ],
        "seeds": [17, 25, 42],
        "variants": {"alpha-1": SKEWED | {"partition.alpha": 1}, "alpha-0.1": SKEWED},
    },
    "fedlora-bench-tasks": {
        "methods": [
            *("local", "fedavg", "ffa-lora", "fedsa-lora", "rolora", "flexlora", "fedsvd"),
            *("fedex-lora", "flora", "lora-fair", "hetlora", "fdlora", "fedalt", "apfl", "pfedme"),
        ],
        "seeds": [17, 25, 42],
    },
    "fedlora-bench-ranks": {
        "methods": ["flexlora", "hetlora", "flora"],
        "seeds": [17, 25, 42],
        "variants": {
            "mixed": MIXED_RANKS,
            "r-2": {"tuner.r": 2, "tuner.alpha": 4},
            "alpha-0.1": SKEWED,
            "mixed-alpha-0.1": MIXED_RANKS | SKEWED,
        },
    },
    "server-only-sst2": {
        "methods": ["fedfame", "server-only"],
        **SEEDS,
        "variants": swept("partition.alpha", "alpha", 0.1),
    },
    **{
        f"fedprompt-{task}": {
            "variants": {
                "noniid": UNEQUAL,
                "poisoned": POISONED,
                "noniid-poisoned": UNEQUAL | POISONED,
            }
        }
        for task in ("sst2", "imdb", "offenseval", "enron", "lingspam", "qnli", "rte")
    },
    "feddpa-rates": {
        "methods": ["fedlora", *DUAL],
        **ONE,
        "variants": swept("sampling.fraction", "rate", 0.4, 0.6, 0.8) | {"rate-1": {"sampling.fraction": 1.0}},
    },
}
"""Preset → its section `compare`, from the papers' tables and figures."""


@pytest.mark.parametrize("preset", COMPARED)
def test_a_comparison_is_the_papers(preset):
    assert _numbers(preset_tree(preset)["compare"]) == COMPARED[preset]


def _numbers(tree):
    """YAML reads 1e-3 as text; the schema makes a number of it."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    return float(tree) if isinstance(tree, str) and re.fullmatch(r"\de[-\d]+", tree) else tree


SMALL = (
    *("demo", "mixed6", "sentiment5", "uplinks-glue", "table45-sst2", "table45-mrpc", "server-only-sst2"),
    *("fedlora-bench", "fedlora-bench-tasks", "fedlora-bench-ranks", "demo-chat"),
)


def test_presets_of_the_papers_name_their_backbones():
    named = {name: (preset_tree(name).get("backbone") or {}).get("name", "default") for name in preset_names()}
    assert {name for name, backbone in named.items() if backbone == "default"} == set(SMALL)
    for name, backbone in named.items():
        if name not in SMALL:
            assert backbone == (
                "FacebookAI/roberta-base" if name.endswith("-glue")
                else "huggyllama/llama-7b" if "feddpa" in name
                else "google-bert/bert-base-uncased"
            )  # fmt: skip


GLUE = ["MRPC", "RTE", "SST-2", "QNLI", "QQP", "MNLI"]
FOLDERS = {"sst2": "SST-2"} | {task: task.upper() for task in ("rte", "qnli", "mnli", "mrpc", "qqp")}
SET_1 = ["glue_qqp", "snli", "web_nlg_en", "fix_punct", "cola", "wic", "definite_pronoun_resolution", "trec"]
DATA = {
    **dict.fromkeys(("fedmcp-glue", "table1-glue", "table2-glue", "figure3-glue", "grids-glue"), tuple(GLUE)),
    "uplinks-glue": ("MRPC", "RTE", "SST-2"),
    "demo": ("sentiment", "paraphrase", "entailment", "answer_match", "duplicate_question", "inference"),
    **dict.fromkeys(("fedlora-bench", "fedlora-bench-ranks"), ("SST-2",)),
    "fedlora-bench-tasks": ("MRPC", "RTE", "SST-2", "QNLI", "QQP"),
    "demo-chat": ("polite", "explain", "advice"),
    "mixed6": ("hate", "offensive", "question_type", "sentiment", "spam", "subjectivity"),
    "sentiment5": ("amazon", "imdb", "movie_snippets", "nyt_editorials", "tweets"),
    **{f"{kind}-{task}": (name,) for kind in ("fedavg-peft", "fedfame") for task, name in FOLDERS.items()},
    **{f"fedprompt-{task}": (FOLDERS[task],) for task in ("sst2", "qnli", "rte")},
    **{f"fedprompt-{task}": (task,) for task in ("imdb", "offenseval", "enron", "lingspam")},
    "feddpa-dataset1": tuple(SET_1),
    "feddpa-dataset2": (
        *("paws_wiki", "hellaswag", "qnli", "word_segment"),
        *("gigaword", "bool_q", "sentiment140", "arc_easy"),
    ),
    "table14-feddpa": (*SET_1, "gigaword", "bool_q", "arc_easy"),
}
"""Preset → its tasks: FedMCP, section V-A; PEFT in FL, Table 1; FedPrompt, section 3.1; FedDPA, Table 5."""


@pytest.mark.parametrize("preset", DATA)
def test_tasks_are_the_papers(preset):
    assert tuple(preset_tree(preset)["data"]["tasks"]) == DATA[preset]


def test_feddpas_backbone_is_in_eight_bits_where_a_gpu_is():
    assert preset_tree("feddpa-dataset1")["backbone"]["quantization"] == "auto"


WORDS = {
    "sst2": {"negative": "bad", "positive": "good"},
    "imdb": {"negative": "bad", "positive": "good"},
    "offenseval": {"NOT": "normal", "OFF": "offensive"},
    "enron": {"ham": "normal", "spam": "junk"},
    "lingspam": {"ham": "normal", "spam": "junk"},
    "qnli": {"entailment": "yes", "not_entailment": "no"},
    "rte": {"entailment": "yes", "not_entailment": "no"},
}
"""FedPrompt's label words, which the paper does not give."""


@pytest.mark.parametrize("task", WORDS)
def test_label_words(task):
    assert preset_tree(f"fedprompt-{task}")["head"]["words"] == WORDS[task]
