"""Defaults are the papers': the options of methods and tuners, and the keys that methods bring along.

Each value stands beside the place that says it. A changed default, and an option without an entry here, fail.
"""

from __future__ import annotations

import pytest

from silotune.methods import METHODS
from silotune.models.tuners import TUNERS

Values = dict[str, tuple[object, str]]

ADAPTERS: Values = {"adapters": (1, "one adapter a site, as all papers but FedMCP's Table I, whose presets set 2")}
FEDPROX_TERM: Values = {"mu": (0.0, "FedAvg; FedDPA's Table 8 sets FedProx's term")}
DUAL: Values = FEDPROX_TERM | {
    "alpha": (0.5, "FedDPA, section 5.1: 0.5 on data set 1"),
    "weighting": ("dynamic", "FedDPA, section 4.3"),
    "weight_of": ("local", "FedDPA, section 4.3: α is the local adapter's weight"),
    "scale": (None, "FedDPA, section 4.3: λ is 1 for F and α for T"),
    "similarity": ("cosine", "FedDPA, section 4.3"),
    "representation": ("last", "FedDPA, section 4.3: the last token's state"),
    "samples": (5, "FedDPA, section 5.1: S = 5"),
    "embed": ("global", "FedDPA, section 4.3: w under the global adapter"),
    "clip": (True, "FedDPA, section 4.3: similarities in [0, 1]"),
}
METHOD_OPTIONS: dict[str, Values] = {
    "local": ADAPTERS,
    "centralised": ADAPTERS,
    "server-only": ADAPTERS,
    "fedavg": ADAPTERS,
    "fedavg-full": ADAPTERS,
    "fedprox": ADAPTERS | {"mu": (0.01, "Li et al. 2020, section 5: of {0.001, 0.01, 0.1, 1}")},
    "scaffold": ADAPTERS,
    "feddyn": ADAPTERS | {"alpha": (0.01, "Acar et al. 2021, section 4: of {0.1, 0.01, 0.001}")},
    "fedproto": ADAPTERS
    | {
        "lam": (1.0, "Tan et al. 2022, section 5.1: λ = 1"),
        "representation": ("mean", "silotune's own: MiniLM was trained with mean pooling"),
    },
    "fedap": ADAPTERS,
    "fedlr": ADAPTERS,
    "moon": ADAPTERS
    | {
        "mu": (1.0, "Li et al. 2021, section 4.1: of {0.1, 1, 5, 10}"),
        "tau": (0.5, "Li et al. 2021, section 4.1"),
        "representation": ("mean", "as FedMCP's own contrast"),
    },
    "fedrep": ADAPTERS | {"head_epochs": (1, "Collins et al. 2021, Algorithm 1: the head first")},
    "fedper": ADAPTERS,
    "fedmatch": {},
    "ditto": {"lam": (0.1, "Li et al. 2021 (Ditto), section 4: of {0.1, 1, 2}")},
    "apfl": {
        "alpha": (0.5, "silotune's own: the paper's text was not at hand"),
        "adaptive": (True, "Deng et al. 2020: α by gradient descent"),
    },
    "pfedme": {
        "lam": (15.0, "Dinh et al. 2020, the authors' code: lamda"),
        "steps": (5, "Dinh et al. 2020, the authors' code: K"),
        "eta": (0.005, "Dinh et al. 2020, the authors' code: learning_rate"),
    },
    "fedmcp": {
        "gamma": (0.5, "FedMCP, section V-A"),
        "mu": (0.05, "FedMCP, section V-A"),
        "similarity": ("cka", "FedMCP, eqs. 6 and 7"),
        "representation": ("mean", "FedMCP, section IV-D"),
        "private_view": ("alone", "FedMCP, eq. 5 and the list before it"),
    },
    "fedfame": {
        "tau": (0.5, "unstated"),
        "projection": (256, "PEFT in FL, appendix A.1"),
        "server_epochs": (1, "PEFT in FL, section 5.3"),
        "guard": (True, "eq. 3 has no gradient where both models are one"),
    },
    "fedprompt": ADAPTERS,
    "fedit": FEDPROX_TERM,
    "fedlora": FEDPROX_TERM,
    "feddpa-f": DUAL,
    "feddpa-t": DUAL
    | {
        "order": ("global-first", "FedDPA, Algorithm 2"),
        "sees": ("trained", "FedDPA, Algorithm 2: the local phase follows the global one"),
    },
    "ffa-lora": {},
    "fedsa-lora": {},
    "rolora": {},
    "flexlora": ADAPTERS,
    "hetlora": ADAPTERS | {"prune": (None, "off: the paper's γ is not at hand"), "penalty": (None, "belongs to prune")},
    "fedsvd": {},
    "fedalt": {},
    "fdlora": {
        "sync": (10, "unsure: the paper's text was not at hand"),
        "first_epochs": (None, "as every other phase"),
        "fusion_epochs": (None, "as every other phase"),
        "l1": (0.05, "LoraHub (Huang et al. 2023), whose search AdaFusion follows"),
    },
    "fedex-lora": {},
    "flora": {},
    "lora-fair": ADAPTERS,
}
"""Method → option → (default, where the paper says it)."""

BROUGHT: dict[str, Values] = {
    "fedavg-full": {"tuner": ("full", "McMahan et al. 2017")},
    "fedap": {"tuner": ("bottleneck", "Zhang et al. 2023")},
    "fedlr": {"tuner": ("lora", "Zhang et al. 2023"), "tuner.r": (16, "FedMCP, section V-A")},
    "fedmcp": {"aggregation": ("uniform", "FedMCP, Algorithm 1, line 6: 1/m")},
    "fedprompt": {
        "tuner": ("prompt", "FedPrompt, section 2.2"),
        "tuner.tokens": (20, "FedPrompt, section 3.1"),
        "head": ("verbalizer", "FedPrompt, section 2.1"),
        "aggregation": ("samples", "FedPrompt, eq. 3: n_k / N_t"),
    },
    "fedit": {
        "tuner": ("lora", "FedDPA, section 5.1"),
        "head": ("lm", "FedDPA, section 5.1"),
        "aggregation": ("uniform", "FedDPA, eq. 2"),
    },
}
LORA: Values = {"tuner": ("lora", "the method is one of LoRA")}
BROUGHT |= dict.fromkeys(("ffa-lora", "fedsa-lora", "rolora"), LORA)
BROUGHT["flexlora"] = LORA | {"aggregation": ("flexlora", "Bai et al. 2024")}
BROUGHT["hetlora"] = LORA | {"aggregation": ("hetlora", "Cho et al. 2024")}
BROUGHT["fedex-lora"] = LORA | {"aggregation": ("fedex-lora", "Singhal et al. 2024")}
BROUGHT["flora"] = LORA | {"aggregation": ("flora", "Wang et al. 2024")}
BROUGHT["scaffold"] = {
    "train.optimizer": ("sgd", "Karimireddy et al. 2020, Algorithm 1"),
    "aggregation": ("uniform", "Karimireddy et al. 2020, Algorithm 1, line 16"),
}
BROUGHT["feddyn"] = {"aggregation": ("uniform", "Acar et al. 2021, Algorithm 1")}
BROUGHT["lora-fair"] = LORA | {"aggregation": ("lora-fair", "Bian et al. 2024")}
BROUGHT["fedsvd"] = LORA | {"aggregation": ("fedsvd", "Lee et al. 2025")}
BROUGHT["fedalt"] = LORA | {"aggregation": ("rest-of-world", "Bian et al. 2025: the mean of the others")}
BROUGHT["fdlora"] = LORA | {
    "aggregation": ("uniform", "Qi et al. 2024: the mean over silos counts each once"),
    "server.optimizer": ("nesterov", "Qi et al. 2024, Algorithm 1: OuterOpt"),
    "server.lr": (0.7, "DiLoCo (Douillard et al. 2023)"),
}
BROUGHT |= dict.fromkeys(("fedlora", "feddpa-f", "feddpa-t"), BROUGHT["fedit"])
"""Method → key that it sets where the user does not → (value, place)."""

TUNER_OPTIONS: dict[str, Values] = {
    "bottleneck": {
        "r": (16, "FedMCP, section V-A"),
        "reduction": (None, "a width is given"),
        "sites": (("houlsby",), "FedMCP, section IV-B: after attention and feed-forward"),
    },
    "lora": {
        "r": (8, "FedDPA, section 5.1"),
        "alpha": (16.0, "FedDPA, the authors' code"),
        "dropout": (0.0, "FedDPA's presets set the authors' 0.05"),
        "sites": (("query", "value"), "FedDPA, section 5.1; Hu et al. 2022, section 4.2"),
        "ranks": ({}, "one rank for all silos"),
        "scaling": ("standard", "Hu et al. 2022, section 4.1; Kalajdzievski 2023 where chosen"),
        "init": ("uniform", "Hu et al. 2022, the authors' code"),
        "lr_ratio": (1.0, "Hu et al. 2022; Hayou et al. 2024, section 4: 16 (2⁴) where chosen"),
    },
    "vera": {
        "r": (256, "Kopiczko et al. 2024, Table 8: RoBERTa-large; peft"),
        "d_initial": (0.1, "Kopiczko et al. 2024, Table 8"),
        "seed": (0, "any; peft's projection_prng_key"),
        "dropout": (0.0, "peft"),
        "sites": (("query", "value"), "Kopiczko et al. 2024, section 4.1"),
    },
    "prefix": {
        "tokens": (6, "PEFT in FL: 8.16 % of BERT-base (Table 2)"),
        "reparametrise": (512, "PEFT in FL, Table 2; Li and Liang 2021, section 4.3"),
        "width": (None, "the keys'"),
        "stack": ("encoder", "FedPrompt, Table 5: 9,853,184 on T5"),
    },
    "prompt": {
        "tokens": (20, "FedPrompt, section 3.1"),
        "init": ("vocabulary", "Lester et al. 2021, section 3.2"),
        "words": ("", "of init=words"),
    },
    "p-tuning": {
        "tokens": (20, "FedPrompt, section 3.1"),
        "encoder": ("lstm", "Liu et al. 2021, section 3.2"),
        "width": (None, "the word embeddings'"),
        "layers": (2, "FedPrompt, Table 5: 25.420 M"),
        "offset": (True, "FedPrompt, Table 5: 25.420 M hold two embeddings"),
        "init": ("vocabulary", "as prompt"),
        "words": ("", "of init=words"),
    },
    "bitfit": {"sites": (("*",), "Ben Zaken et al. 2022: every bias")},
    "ia3": {
        "sites": (("key", "value"), "Liu et al. 2022, section 3.3"),
        "feedforward": (("feedforward_output",), "Liu et al. 2022, section 3.3"),
    },
    "full": {},
    "loha": {
        "r": (8, "peft"),
        "alpha": (8.0, "peft"),
        "sites": (("query", "value"), "as LoRA's"),
    },
}
TUNER_OPTIONS["dora"] = TUNER_OPTIONS["lora"]  # Liu et al. 2024 compare at LoRA's rank; alpha is 2·r there, too
"""Tuner → option → (default, place)."""


def values(places: Values) -> dict[str, object]:
    return {key: value for key, (value, _) in places.items()}


@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_of_methods(method):
    assert METHODS[method].Options().model_dump() == values(METHOD_OPTIONS[method])
    assert dict(METHODS[method].defaults) == values(BROUGHT.get(method, {}))


@pytest.mark.parametrize("tuner", TUNER_OPTIONS)
def test_of_tuners(tuner):
    assert TUNERS[tuner].Options().model_dump() == values(TUNER_OPTIONS[tuner])


def test_every_method_and_tuner_of_silotune_has_an_entry():
    for registry, table in ((METHODS, METHOD_OPTIONS), (TUNERS, TUNER_OPTIONS)):
        own = {name for name, kind in registry.items() if kind.__module__.startswith("silotune.")}  # tests add others
        assert own == {*table}
