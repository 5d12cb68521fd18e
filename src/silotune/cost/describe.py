"""`describe` (`silotune parts`): loads the backbone, sizes a method's parts, says what leaves a silo."""

from __future__ import annotations

from typing import Any

from silotune.communication.messages import size
from silotune.core.randomness import generator
from silotune.core.tensors import count_parameters
from silotune.data.tasks import Task
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.resolve import make_method, read_config

EXAMPLE_TASK = Task("task", ("no", "yes"))


def describe(method: str, overrides: list[str]) -> dict[str, Any]:
    """Describe a method on the demo's setting.

    Args:
        method: the method's id.
        overrides: `key=value` words.

    Returns:
        `method`, `backbone`, `parts` (a list of name, module, scope and sizes) and `leaves`, the sentence.

    Raises:
        InputError: for an unknown method or a bad option.
    """
    config = read_config("demo", [f"method={method}", *overrides])
    made = make_method(config)
    # Float32, since a part that copies the backbone's weights has them in float32. No part holds the LM head's weights.
    backbone = load_backbone(config.backbone, precision="fp32")
    rows, sent = [], []
    for name, part in made.parts().items():
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
        if name in made.sends():
            sent.append(rows[-1])
    leaves = _sentence(sent, config.uplink.name, made.collects_rows)
    return {"method": method, "backbone": config.backbone.name, "parts": rows, "leaves": leaves}


def _sentence(sent: list[dict[str, Any]], uplink: list[str], collects_rows: bool) -> str:
    if collects_rows:
        return "What leaves a silo: all its rows; this method is no federation."
    if not sent:
        return "What leaves a silo: nothing."
    names = ", ".join(f"{part['part']!r}" for part in sent)
    parameters, size_sent = (sum(part[key] for part in sent) for key in ("parameters", "bytes"))
    what = f"the tensors of {names} ({parameters:,} parameters, {size_sent:,} bytes a round)"
    if uplink:
        what = f"the change of {names} ({parameters:,} parameters) after {', '.join(uplink)}"
    return (
        f"What leaves a silo: {what}, the "
        "round number, the silo's name and its number of training rows. Texts, their labels and all other parts stay. "
        "Between machines also the names of its task and of the labels, and the numbers in its silo config's `share`."
    )
