"""`methods`, `presets`, `parts`, `--version`: what there is, for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml
from safetensors.torch import load_file

import silotune as package
from silotune.cli.app import _MODULES, add_commands, app
from silotune.config import preset_names
from tests.support.command_line import Silotune
from tests.support.method_cases import every_method
from tests.support.tiny import METHODS

PROMISED_METHODS = {"local", "centralised", "fedavg", "fedavg-full", "fedprox", "fedmcp"}
PROMISED_PRESETS = {"demo", "fedmcp-glue", "mixed6", "sentiment5"}


def parsed(silotune: Silotune, *words: object) -> object:
    outcome = silotune(*words, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_version(silotune: Silotune) -> None:
    outcome = silotune("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{package.__version__}\n", "")


def shown(silotune: Silotune, *words: object) -> str:
    """What a list is for people."""
    outcome = silotune(*words)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def test_papers_as_bibtex(silotune: Silotune) -> None:
    """Each paper is one entry that names its methods; baselines have none."""
    entries = shown(silotune, "methods", "--cite").split("@misc")[1:]
    noted = [name for entry in entries for name in entry.split("note = {method ")[1].split("}")[0].split(", ")]
    assert set(METHODS) - {*noted} == {"local", "centralised", "server-only", "fedavg-server"}
    assert len(noted) == len({*noted})
    (apfl,) = [entry for entry in entries if entry.startswith("{apfl")]
    assert "author = {Deng and Kamani and Mahdavi}," in apfl
    assert "title = {{Adaptive Personalized Federated Learning}}," in apfl
    assert "year = {2020}," in apfl


def test_methods(silotune: Silotune) -> None:
    entries = {entry["method"]: entry for entry in parsed(silotune, "methods")}
    listed = shown(silotune, "methods")
    assert all(name in listed for name in METHODS)
    assert set(entries) == set(METHODS) >= PROMISED_METHODS
    assert all(entry["paper"] for entry in entries.values())
    options = entries["fedmcp"]["options"]
    assert (options["gamma"], options["mu"]) == (0.5, 0.05)  # the paper's


def test_presets(silotune: Silotune) -> None:
    entries = {entry["preset"]: entry for entry in parsed(silotune, "presets")}
    listed = shown(silotune, "presets")
    assert all(name in listed for name in preset_names())
    assert set(entries) == set(preset_names()) >= PROMISED_PRESETS
    assert all(entry["description"] and entry["method"] in METHODS for entry in entries.values())


@every_method
def test_parts_of_every_method(silotune: Silotune, method: str, backbone_folder: Callable[[str], Path]) -> None:
    values = parsed(silotune, "parts", method, f"backbone={backbone_folder('bert')}")
    assert values["method"] == method
    assert {part["scope"] for part in values["parts"]} <= {"shared", "private", "fixed"}
    for part in values["parts"]:
        assert part["bytes"] == 4 * part["parameters"]  # float32
        assert part["tensors"] >= 1
    of_delta = {name: {"delta"} for name in ("fedex-lora", "flora", "fedmomentum")}
    only_down = ({"fedsvd": {"lora_A"}, "ifca": {"global-1", "head-1"}} | of_delta).get(method, set())
    shared = [part for part in values["parts"] if part["scope"] == "shared" and part["part"] not in only_down]
    leaves = values["leaves"]
    if shared:
        assert all(repr(part["part"]) in leaves for part in shared)
        assert f"{sum(part['parameters'] for part in shared):,} parameters" in leaves
    elif method == "centralised":
        assert leaves == "What leaves a silo: all its rows; this method is no federation."
    else:
        assert leaves == "What leaves a silo: nothing."
    for part in values["parts"]:
        assert part in shared or repr(part["part"]) not in leaves
        assert (repr(part["part"]) in values["comes_down"]) == (part["part"] in only_down)


def test_parts_counted_by_hand(silotune: Silotune, backbone_folder: Callable[[str], Path]) -> None:
    """Two blocks, two sites each, 32 wide, r = 4: 4·32 + 4 + 32·4 + 32 a site; MLP head 32·32 + 32 + 2·32 + 2."""
    values = parsed(silotune, "parts", "fedmcp", f"backbone={backbone_folder('bert')}", "tuner.r=4")
    adapter, head = 4 * (4 * 32 + 4 + 32 * 4 + 32), 32 * 32 + 32 + 2 * 32 + 2
    counted = {part["part"]: (part["scope"], part["tensors"], part["parameters"]) for part in values["parts"]}
    assert counted == {
        "global": ("shared", 16, adapter),
        "private": ("private", 16, adapter),
        "head_full": ("private", 4, head),
        "head_global": ("private", 4, head),
    }
    assert f"{adapter:,} parameters, {4 * adapter:,} bytes" in values["leaves"]
    listed = shown(silotune, "parts", "fedmcp", f"backbone={backbone_folder('bert')}")
    for word in ("global", "private", "head_full", "head_global", "shared", "What leaves a silo"):
        assert word in listed


def test_what_parts_promises_is_what_a_run_stores(silotune: Silotune, place: Path) -> None:
    path = place / "federation.yaml"
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = parsed(silotune, "parts", "fedmcp", f"backbone={keys['backbone']}", "tuner.r=4")
    assert silotune("run", path, "--out", "out").code == 0
    stored = load_file(place / "out" / "checkpoints" / "shared-0001.safetensors")
    (shared,) = [part for part in values["parts"] if part["scope"] == "shared"]
    assert sum(tensor.numel() for tensor in stored.values()) == shared["parameters"]
    summary = json.loads((place / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["sent_parameters"] == shared["parameters"]
    assert summary["trainable_parameters"] == sum(part["parameters"] for part in values["parts"])


def test_every_command_is_in_the_module_that_is_imported_when_it_is_named() -> None:
    add_commands()
    commands = [info for info in app.registered_commands if info.callback.__module__.startswith("silotune.cli.")]
    homes = {info.name or info.callback.__name__: info.callback.__module__ for info in commands}
    assert homes == {name: f"silotune.cli.{module}" for name, module in _MODULES.items()}
