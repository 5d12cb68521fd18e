"""Every defense works with every method: whole runs, with noise and with an attacker."""

from __future__ import annotations

import math

import pytest

from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.runs.run import run
from silotune.runs.storage.readers import events
from tests.support.method_cases import KINDS_OF_METHODS, of_kinds

DEFENCES = {
    "median": ("aggregation=median", "aggregation.clip=1"),
    "trimmed-mean": ("aggregation=trimmed-mean", "aggregation.trim=0.3", "uplink=clip,laplace"),
    "krum": ("aggregation=krum", "uplink=clip,gaussian,int8"),
    "multi-krum": ("aggregation=multi-krum", "aggregation.clip=1", "server.optimizer=adam"),
}
FIXED_AGGREGATION = [method for method in METHODS if METHODS[method].aggregations is not None]
"""Methods that are nothing without the aggregation that they bring."""
_ALL = [
    (method, defence)
    for method in METHODS
    for defence in DEFENCES
    if method not in (*FIXED_AGGREGATION, "fedproto")  # it refuses them, see below
]
_SHORT = [pair for place, pair in enumerate(pair for pair in _ALL if pair[0] in KINDS_OF_METHODS) if place % 5 == 0]
"""One defense or two for each kind of method."""
PAIRS = [pytest.param(*pair, marks=() if pair in _SHORT else pytest.mark.long, id="-".join(pair)) for pair in _ALL]


@pytest.mark.parametrize("method", FIXED_AGGREGATION)
def test_a_method_of_one_aggregation_refuses_the_robust_ones(method, tiny_config):
    (own,) = METHODS[method].aggregations
    for words in DEFENCES.values():
        with pytest.raises(InputError, match=rf"{words[0]}: method {method} is not defined for it; allowed: {own}"):
            tiny_config(method, *words)


@pytest.mark.parametrize("method", of_kinds(FIXED_AGGREGATION, KINDS_OF_METHODS))
def test_a_method_of_one_aggregation_clips(method, tiny_config, tmp_path):
    words = ("rounds=2", "train.steps=1", "attack=backdoor", "attack.target=good", "attack.fraction=0.3")
    uplink = "uplink=clip,int8" if method == "ifca" else "uplink=clip,laplace"  # its choices have no noise
    config = tiny_config(method, *words, "attack.scale=10", "aggregation.clip=1", uplink)
    done = run(config, out=tmp_path / "run")
    assert math.isfinite(done.summary["average"])
    assert not [event for event in events(tmp_path / "run") if "refused" in event.get("event", "")]


@pytest.mark.parametrize("key", [*(words[0] for words in DEFENCES.values()), "server.optimizer=adam", "server.lr=0.5"])
def test_fedproto_averages_prototypes_in_its_own_way_and_refuses_any_other(key, tiny_config, tmp_path):
    name = key.partition("=")[0]
    with pytest.raises(InputError, match=rf"^{name}: method fedproto aggregates parts in its own way"):
        run(tiny_config("fedproto", key), out=tmp_path / "run")


@pytest.mark.parametrize(("method", "defence"), PAIRS)
def test_every_method_is_defended(method, defence, tiny_config, tmp_path):
    words = ["rounds=2", "train.steps=1", "attack=backdoor", "attack.target=good", "attack.fraction=0.3"]
    words += ["attack.scale=10"] if method not in ("local", "centralised", "server-only") else []
    config = tiny_config(method, *words, *DEFENCES[defence])
    done = run(config, out=tmp_path / "run")
    assert done.summary["attack"]["malicious"]
    assert math.isfinite(done.summary["average"])
    assert not [event for event in events(tmp_path / "run") if "refused" in event.get("event", "")]
