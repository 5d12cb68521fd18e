"""Views: one forward of the backbone under a mix of parts, read into one vector per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silotune.backbone import Backbone, Inputs
from silotune.data.batching import READ_POSITIONS, READ_ROWS, READ_TARGETS, Batch
from silotune.errors import InputError
from silotune.parts import State, Tensors
from silotune.plan import Plan
from silotune.tuners.base import Tuner, Weight, Weighted

Learned = Callable[[State], Weight]
"""A weight that is itself learned: read from the silo's state in every step."""
Mix = Mapping[str, Weight | Learned]
"""Part (or anchor) name → weight."""


def settled(mix: Mix, state: State) -> dict[str, Weight]:
    """A mix with its learned weights read from a state; without gradient they are plain numbers."""
    weights: dict[str, Weight] = {}
    for name, weight in mix.items():
        if callable(weight) and not isinstance(weight, Tensor):
            weight = weight(state)
            weight = weight if isinstance(weight, Tensor) and weight.requires_grad else float(weight)
        weights[name] = weight
    return weights


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


@dataclass(frozen=True)
class Ingredient:
    """One resolved entry of a mix: how the part acts, its tensors, its weight (a number, or one per row)."""

    tuner: Tuner
    tensors: Tensors
    weight: Weight

    @property
    def present(self) -> bool:
        """Whether it acts at all."""
        return isinstance(self.weight, Tensor) or self.weight != 0


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
    mix = [replace(part, tensors=part.tuner.fold(part.tensors)) for part in mix if part.present]
    collected: dict[str, list[Tensor]] = {name: [] for name in readings}
    kept: list[tuple[Tensor, Inputs, Plan]] = []
    start = 0
    for inputs in batch.micro:
        rows = len(inputs["input_ids"])
        moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        here = [replace(part, weight=_of_rows(part.weight, slice(start, start + rows))) for part in mix]
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
    by_row = [
        part
        for part in mix
        if isinstance(part.weight, Tensor) and part.weight.dim() and not part.tuner.mixes_rows(backbone)
    ]
    if not by_row:
        plan = make_plan(backbone, mix)
        return backbone.encode(inputs, plan), plan
    columns = [torch.as_tensor(part.weight, dtype=torch.float64).cpu() for part in by_row]
    distinct, group = torch.unique(torch.stack(columns, 1), dim=0, return_inverse=True)
    pieces, order = [], []
    for number, weights in enumerate(distinct.tolist()):
        rows = (group == number).nonzero().flatten()
        fixed = dict(zip(map(id, by_row), weights, strict=True))
        chosen = [replace(part, weight=fixed.get(id(part), _of_rows(part.weight, rows))) for part in mix]
        some = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(some, make_plan(backbone, chosen)))
        order.append(rows)
    back = torch.cat(order).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)], None


def _of_rows(weight: Weight, rows: slice | Tensor) -> Weight:
    if not isinstance(weight, Tensor):
        return weight
    if weight.dim() == 0:  # a learned number, the same for all rows
        return weight
    return weight[rows if isinstance(rows, slice) else rows.to(weight.device)]


def make_plan(backbone: Backbone, mix: Sequence[Ingredient], rows: slice = slice(None)) -> Plan:
    """The plan of a mix for some rows of a batch. A part of weight 0 is absent, exactly."""
    plan = Plan()
    by_tuner: dict[int, tuple[Tuner, list[Weighted]]] = {}
    for part in mix:
        if part.present:
            by_tuner.setdefault(id(part.tuner), (part.tuner, []))[1].append(
                Weighted(part.tensors, _of_rows(part.weight, rows))
            )
    for tuner, weighted in by_tuner.values():
        tuner.act(backbone, weighted, plan)
    return plan
