"""Describe a method's parts on a loaded backbone: their sizes, and which leave a silo (`silotune parts`)."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from silotune.communication.messages import size
from silotune.core.randomness import generator
from silotune.core.tensors import count_parameters
from silotune.data.tasks import Task
from silotune.methods.parts import Scope
from silotune.methods.validation import check_method
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.models.tuners import tuner_of
from silotune.runs.build.resolve import make_method, read_config

EXAMPLE_TASK = Task("task", ("no", "yes"))


def describe(method: str, overrides: list[str]) -> dict[str, Any]:
    """Describe a method on the demo's setting: its parts with their sizes, and sentences on what leaves and comes down.

    `tuned` are the backbone's modules that parts act on: their name, how many there are, and their percentage of the
    backbone's weights.
    """
    config = read_config("demo", [f"method={method}", *overrides])
    instance = make_method(config)
    check_method(instance)
    # Float32, since a part that copies the backbone's weights has them in float32. No part holds the LM head's weights.
    backbone = load_backbone(config.backbone, precision="fp32")
    rows, sent, received = [], [], []
    tuned: dict[str, None] = {}
    for name, part in instance.parts().items():
        tensors = part.module.init(backbone, [EXAMPLE_TASK], generator(config.seed, "init", name))
        if not tensors:  # the verbalizer and the language-model head have none
            continue
        rows.append(
            {
                "part": name,
                "module": part.module.name,
                "scope": str(part.scope),
                "tensors": len(tensors),
                "parameters": count_parameters(tensors),
                "bytes": size(tensors),
            }
        )
        if (tuner := tuner_of(part.module)) is not None:
            tuned |= dict.fromkeys(tuner.target_modules(tensors))
        if name in instance.sends():
            sent.append(rows[-1])
        elif part.scope is Scope.SHARED:
            received.append(rows[-1])
    leaves = _sentence(sent, config.uplink.name, instance.collects_rows)
    down = f"What only comes down: the tensors of {_sizes(received)}." if received else ""
    return {
        "method": method,
        "backbone": config.backbone.name,
        "parts": rows,
        "tuned": _tuned(backbone, list(tuned)),
        "leaves": leaves,
        "comes_down": down,
    }


def _tuned(backbone: Backbone, modules: list[str]) -> list[dict[str, Any]]:
    numbers: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for module in modules:
        kind = re.sub(r"\.\d+\.", ".*.", module, count=1)
        experts = module in backbone.experts
        tensors = [backbone.base.get_parameter(module)] if experts else backbone.module(module).parameters()
        numbers[kind] += 1
        weights[kind] += sum(tensor.numel() for tensor in tensors)
    total = sum(tensor.numel() for tensor in backbone.base.parameters())
    return [
        {"modules": kind, "number": number, "percent": 100 * weights[kind] / total} for kind, number in numbers.items()
    ]


def _sentence(sent: list[dict[str, Any]], uplink: list[str], collects_rows: bool) -> str:
    if collects_rows:
        return "What leaves a silo: all its rows; this method is no federation."
    if not sent:
        return "What leaves a silo: nothing."
    what = f"the tensors of {_sizes(sent)}"
    if uplink:
        what = f"the change of {_names(sent)} ({_parameters(sent):,} parameters) after {', '.join(uplink)}"
    return (
        f"What leaves a silo: {what}, the "
        "round number, the silo's name and its number of training rows. Texts, their labels and all other parts stay. "
        "Between machines also the names of its task and of the labels, and the numbers in its silo config's `share`."
    )


def _sizes(parts: list[dict[str, Any]]) -> str:
    size_in_all = sum(part["bytes"] for part in parts)
    return f"{_names(parts)} ({_parameters(parts):,} parameters, {size_in_all:,} bytes a round)"


def _names(parts: list[dict[str, Any]]) -> str:
    return ", ".join(f"{part['part']!r}" for part in parts)


def _parameters(parts: list[dict[str, Any]]) -> int:
    return sum(int(part["parameters"]) for part in parts)
