"""Views: one forward of the backbone under a mix of parts, read into one vector per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from silotune.backbone import Backbone, Inputs
from silotune.data.batching import READ_POSITIONS, READ_ROWS, READ_TARGETS, Batch
from silotune.errors import InputError
from silotune.mixing import Ingredient, Mix, make_plan, of_rows, prepared, settled, together
from silotune.plan import Plan

__all__ = ["Ingredient", "Mix", "Reading", "View", "encode_mix", "make_plan", "run_view", "settled"]

Reading = Callable[[Tensor, Inputs], Tensor]
"""(last layer's states (rows, tokens, hidden), inputs) → one tensor whose first dimension is rows."""


def first(states: Tensor, _: Inputs) -> Tensor:
    """The first token's state: [CLS] or <s>."""
    return states[:, 0]


def mean(states: Tensor, inputs: Inputs) -> Tensor:
    """The mean over real tokens."""
    mask = _mask(inputs).unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def last(states: Tensor, inputs: Inputs) -> Tensor:
    """The last real token's state: all that a causal model knows of the text."""
    mask = _mask(inputs)
    positions = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return states[torch.arange(len(states), device=states.device), positions]


def _mask(inputs: Inputs) -> Tensor:
    """The mask that goes with the states: an encoder–decoder's are its decoder's, where it has decoder tokens."""
    return inputs["decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"]


READINGS: dict[str, Reading] = {"first": first, "mean": mean, "last": last}

HeadReading = Callable[[Tensor, Inputs, Plan], Tensor]
"""A reading that a head brings along; it also sees the plan under which the states came about."""

HEAD_INPUTS = (READ_ROWS, READ_POSITIONS, READ_TARGETS)


class View(dict[str, Tensor]):
    """Reading name → tensor of shape (rows, …), rows in the batch's order, at least float32.

    Heads' readings are made when they are first asked for: scoring words costs, and not every view is given to a head.
    """

    def __init__(self, ready: Mapping[str, Tensor], later: Mapping[str, Callable[[], Tensor]] = {}) -> None:
        super().__init__(ready)
        self._later = later

    def __missing__(self, name: str) -> Tensor:
        if name not in self._later:
            raise KeyError(name)
        self[name] = found = self._later[name]()
        return found


def run_view(
    backbone: Backbone,
    batch: Batch,
    mix: Sequence[Ingredient],
    readings: Mapping[str, Reading] = READINGS,
    head_readings: Mapping[str, HeadReading] = {},
) -> View:
    """Run the backbone over a batch under a mix.

    Micro-batches are run one by one and their readings concatenated, so that losses see the whole batch while little
    padding is paid. Gradients flow into the tensors of the mix that require them.
    """
    mix = prepared(mix)
    collected: dict[str, list[Tensor]] = {name: [] for name in readings}
    kept: list[tuple[Tensor, Inputs, Plan]] = []
    start = 0
    for inputs in batch.micro:
        rows = len(inputs["input_ids"])
        moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        here = of_rows(mix, slice(start, start + rows))
        states, plan = encode_mix(backbone, {name: moved[name] for name in moved if name not in HEAD_INPUTS}, here)
        if head_readings and plan is None:
            raise InputError("mix: a head over the vocabulary needs one mix for all rows where weights are replaced")
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        for name, read in readings.items():
            collected[name].append(read(states, moved))
        if head_readings:
            kept.append((states, moved, plan or Plan()))
        start += rows

    def later(read: HeadReading) -> Callable[[], Tensor]:
        return lambda: torch.cat([read(*micro) for micro in kept])

    ready = {name: torch.cat(pieces) for name, pieces in collected.items()}
    return View(ready, {name: later(read) for name, read in head_readings.items()})


def encode_mix(backbone: Backbone, inputs: Inputs, mix: Sequence[Ingredient]) -> tuple[Tensor, Plan | None]:
    """The last layer's states under a mix whose weights may differ by row, and the plan they came about under.

    Rows go through in one forward where the tuners can tell them apart, else in one forward per distinct mix; the
    plan is then None.
    """
    groups = together(backbone, mix, len(inputs["input_ids"]))
    if len(groups) == 1:
        plan = make_plan(backbone, groups[0][1])
        return backbone.encode(inputs, plan), plan
    pieces = []
    for rows, own in groups:
        some = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(some, make_plan(backbone, own)))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)], None
