"""`silotune config`, the schema for editors, suggestions across sections, and what a shell completes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jsonschema import Draft202012Validator

from silotune.cli.console import complete_key, complete_source, complete_word
from silotune.config import preset_names, preset_text
from silotune.core.files import load_yaml
from tests.support.command_line import Silotune


def test_a_key_a_section_and_all(silotune: Silotune) -> None:
    said = silotune("config", "train.lr").out
    assert "train.lr: the learning rate." in said
    assert "allowed: number > 0" in said
    assert "default: 0.001" in said
    assert "docs/configuration.md" in said
    mcp = [key for key in json.loads(silotune("config", "method.mu", "--json").out) if "method=fedmcp" in key["owners"]]
    assert [key["default"] for key in mcp] == ["`0.05`"]
    assert {key["name"] for key in json.loads(silotune("config", "cache", "--json").out)} == {"cache.name", "cache.mib"}
    everything = silotune("config").out
    assert all(word in everything for word in ("partition", "rounds", "per_method"))


def test_the_schema_takes_all_presets_and_finds_slips(silotune: Silotune) -> None:
    schema = json.loads(silotune("config", "--json-schema").out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for name in preset_names():
        assert [error.message for error in validator.iter_errors(load_yaml(preset_text(name)))] == [], name
    own = {
        "preset": "demo",
        "method": "moon",
        "tuner": {"name": "lora", "r": 4},
        "head": "linear",
        "train.lr": 1e-3,
        "silos": [{"name": "a", "path": "a.csv", "text": ["x", "y"], "labels": [0, 1]}],
        "train": None,
        "uplink": "clip,laplace",
        "data": {"tasks": "a,b"},
        "compare": {"seeds": [1, 2], "std": {"ddof": 0}},
    }
    assert [error.message for error in validator.iter_errors(own)] == []
    for slip in ({"train": {"rl": 1}}, {"rounds": "many"}, {"silos": [{"name": "a"}]}, {"trian": {}}, {"preset": "x"}):
        assert list(validator.iter_errors(slip)), slip
    assert schema["$defs"]["TrainConfig"]["properties"]["lr"]["description"] == "the learning rate."


def test_what_a_shell_completes(place) -> None:
    assert complete_source("fed") == [name for name in preset_names() if name.startswith("fed")] + ["federation.yaml"]
    assert complete_word("train.l") == ["train.lr=", "train.label_smoothing="]
    assert "method=fedmcp" in complete_word("method=fedm")
    assert "cache.mib" in complete_key("cach")


@pytest.mark.long
def test_the_help_begins_with_run(silotune: Silotune) -> None:
    command = [sys.executable, "-m", "silotune", "-h"]  # commands are in the order in which a process imports them
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    places = [said.index(f"│ {name} ") for name in ("run", "compare", "config", "report", "federation")]
    assert places == sorted(places)
    assert "Before a run" in said
    assert "--install-completion" in said
    assert "--dry-run" in silotune("run", "-h").out
