"""Twenty runs as people start them: a trusting silo answers all; a private one those that noise on rows can cover."""

from __future__ import annotations

import pytest

RUNS = {
    "defaults": ("fedavg",),
    "fedprox": ("fedprox",),
    "fedper": ("fedper",),
    "fedrep": ("fedrep",),
    "fedmcp": ("fedmcp",),
    "fedmcp without similarity": ("fedmcp", "method.mu=0"),
    "ditto": ("ditto",),
    "apfl": ("apfl",),
    "scaffold": ("scaffold", "train.optimizer=sgd"),
    "feddpa-t": ("feddpa-t", "tuner=lora"),
    "ffa-lora": ("ffa-lora", "tuner=lora"),
    "flora": ("flora", "tuner=lora", "aggregation=flora"),
    "moon": ("moon",),
    "prompts": ("fedavg", "tuner=prompt", "tuner.tokens=4"),
    "ia3": ("fedavg", "tuner=ia3"),
    "full": ("fedavg", "tuner=full"),
    "one row a step": ("fedavg", "train.batch_size=1"),
    "large steps": ("fedavg", "train.lr=1", "train.optimizer=sgd"),
    "one step": ("fedavg", "train.steps=1"),
    "three hundred rounds": ("fedavg", "rounds=300"),
    "few bytes": ("fedavg", "uplink=topk"),
    "balanced": ("fedavg", "train.class_weights=balanced"),
}

NO_NOISE = {"fedmcp": "couples the rows", "moon": "couples the rows", "full": "tuner", "balanced": "class_weights"}
"""Runs that noise on rows cannot cover, with words of the reason."""

SHORT = ("defaults", "fedmcp", "scaffold", "flora", "full", "one row a step", "three hundred rounds", "few bytes")
CASES = [
    *(pytest.param("trusting", name, marks=() if name in SHORT else pytest.mark.long) for name in RUNS),
    *(("private", name) for name in RUNS),
]


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_an_ordinary_run(policy, name, attack):
    method, *words = RUNS[name]
    settings = {"policy": {"preset": policy}, "caps": False}
    noise = {} if policy == "trusting" else {"privacy__unit": "row", "privacy__epsilon": 4.0}
    if noise:
        settings["privacy"] = {"epsilon": 8.0}
    attacker = attack((method, "rounds=2", *words), changes=noise, **settings)
    reason = attacker.reason("hello")
    if noise and name in NO_NOISE:
        assert NO_NOISE[name] in reason
    else:
        assert reason == ""
        assert attacker.reason("round") == ""
