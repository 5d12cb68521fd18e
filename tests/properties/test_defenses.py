"""Every defense works with every method: whole runs, with noise and with an attacker."""

from __future__ import annotations

import math

import pytest

from silotune.methods import METHODS
from silotune.runs.run import run
from silotune.runs.storage.readers import events

DEFENCES = {
    "median": ("aggregation=median", "aggregation.clip=1"),
    "trimmed-mean": ("aggregation=trimmed-mean", "aggregation.trim=0.3", "uplink=clip,laplace"),
    "krum": ("aggregation=krum", "uplink=clip,gaussian,int8"),
    "multi-krum": ("aggregation=multi-krum", "aggregation.clip=1", "server.optimizer=adam"),
}
_ALL = [(method, defence) for method in METHODS for defence in DEFENCES]
PAIRS = [
    pytest.param(*pair, marks=() if place % 5 == 0 else pytest.mark.long, id="-".join(pair))
    for place, pair in enumerate(_ALL)
]


@pytest.mark.parametrize(("method", "defence"), PAIRS)
def test_every_method_is_defended(method, defence, tiny_config, tmp_path):
    words = ["rounds=2", "train.steps=1", "attack=backdoor", "attack.target=good", "attack.fraction=0.3"]
    words += ["attack.scale=10"] if method not in ("local", "centralised", "server-only") else []
    config = tiny_config(method, *words, *DEFENCES[defence])
    done = run(config, out=tmp_path / "run")
    assert done.summary["attack"]["malicious"]
    assert math.isfinite(done.summary["average"])
    assert not [event for event in events(tmp_path / "run") if "refused" in event.get("event", "")]
