"""Views: one forward of the backbone under a mix of parts, read into one vector per row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from silotune.backbone import Backbone, Inputs
from silotune.data.batching import READ_POSITIONS, READ_ROWS, READ_TARGETS, Batch
from silotune.errors import InputError
from silotune.mixing import Ingredient, Mix, make_plan, of_rows, prepared, settled, stacks, together
from silotune.plan import Plan
from silotune.shared_prefix import Below
from silotune.stacking import of_copies, stacked

if TYPE_CHECKING:
    from silotune.frozen_prefix import FrozenPrefix

__all__ = ["Ingredient", "Mix", "Reading", "View", "encode_mix", "make_plan", "run_view", "run_views", "settled"]

Key = TypeVar("Key", bound=Hashable)

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
    """Run the backbone over a batch under one mix; see `run_views`."""
    return run_views(backbone, batch, {"": mix}, readings, head_readings)[""]


def run_views(
    backbone: Backbone,
    batch: Batch,
    mixes: Mapping[str, Sequence[Ingredient]],
    readings: Mapping[str, Reading] = READINGS,
    head_readings: Mapping[str, HeadReading] = {},
    cache: FrozenPrefix | None = None,
) -> dict[str, View]:
    """Run the backbone over a batch under several mixes, by the views' names.

    Micro-batches are run one by one and their readings concatenated, so that losses see the whole batch while little
    padding is paid. Gradients flow into the tensors of the mixes that require them. Views share what they can, see
    `encode_mixes`; equal mixes are one view. `cache` keeps what lies below the first part from batch to batch.
    """
    names = {name: _identity(mix) for name, mix in mixes.items()}
    own = {key: prepared(mixes[name]) for name, key in reversed(names.items())}
    collected: dict[Hashable, dict[str, list[Tensor]]] = {key: {name: [] for name in readings} for key in own}
    kept: dict[Hashable, list[tuple[Tensor, Inputs, Plan]]] = {key: [] for key in own}
    start = 0
    for inputs in batch.micro:
        rows = len(inputs["input_ids"])
        moved = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        here = {key: of_rows(mix, slice(start, start + rows)) for key, mix in own.items()}
        text = {name: moved[name] for name in moved if name not in HEAD_INPUTS}
        fill = None
        if cache is not None and batch.source is not None:
            chosen, width = batch.rows[start : start + rows].tolist(), inputs["input_ids"].shape[1]
            fill = partial(cache.fill, backbone, batch.source, chosen, width)
        for key, (states, plan) in encode_mixes(backbone, text, here, fill).items():
            if head_readings and plan is None:
                raise InputError(
                    "mix: a head over the vocabulary needs one mix for all rows where weights are replaced"
                )
            states = states.to(torch.promote_types(states.dtype, torch.float32))
            for name, read in readings.items():
                collected[key][name].append(read(states, moved))
            if head_readings:
                kept[key].append((states, moved, plan or Plan()))
        start += rows

    def later(key: Hashable, read: HeadReading) -> Callable[[], Tensor]:
        return lambda: torch.cat([read(*micro) for micro in kept[key]])

    def view(key: Hashable) -> View:
        ready = {name: torch.cat(pieces) for name, pieces in collected[key].items()}
        return View(ready, {name: later(key, read) for name, read in head_readings.items()})

    views = {key: view(key) for key in own}
    return {name: views[key] for name, key in names.items()}


def _identity(mix: Sequence[Ingredient]) -> Hashable:
    """Equal for mixes of the same tensors with the same weights."""
    return tuple(
        (
            id(part.tuner),
            tuple((name, id(tensor)) for name, tensor in part.tensors.items()),
            id(part.weight) if isinstance(part.weight, Tensor) else part.weight,
        )
        for part in mix
        if part.present
    )


Encoded = tuple[Tensor, Plan | None]
"""The last layer's states, and the plan they came about under; None where that were several."""


def encode_mixes(
    backbone: Backbone,
    inputs: Inputs,
    mixes: Mapping[Key, Sequence[Ingredient]],
    fill: Callable[[Below], None] | None = None,
) -> dict[Key, Encoded]:
    """The last layer's states of the same rows under several mixes.

    Mixes that have gradients go through in one forward over stacked rows, constant ones in another without gradient,
    and what lies below the first changed module is computed once for all (`silotune.stacking`). Tuners that cannot tell
    rows apart on this backbone, or that bring tokens or weights of their own, take one forward for each mix. `fill`
    puts in what is known already of what lies below.
    """
    rows = len(inputs["input_ids"])
    encoded: dict[Key, Encoded] = {}
    trained: dict[Key, Plan] = {}
    constant: dict[Key, Plan] = {}
    for key, mix in mixes.items():
        groups = together(backbone, mix, rows)
        if len(groups) > 1:
            encoded[key] = _encode_groups(backbone, inputs, groups), None
            continue
        plan = make_plan(backbone, groups[0][1])
        if not _stacks(backbone, mix, plan):
            encoded[key] = backbone.encode(inputs, plan), plan
        elif _learns(mix):
            trained[key] = plan
        else:
            constant[key] = plan
    below = None
    if (trained and constant) or (fill is not None and (trained or constant)):
        below = backbone.below([*trained.values(), *constant.values()])
        if fill is not None:
            fill(below)
    for plans in (trained, constant):
        if not plans:
            continue
        whole = replace(stacked(list(plans.values()), rows), below=below)
        with torch.set_grad_enabled(torch.is_grad_enabled() and plans is trained):
            states = backbone.encode(inputs, whole)
        for (key, plan), piece in zip(plans.items(), of_copies(states, rows, len(plans)), strict=True):
            encoded[key] = piece, plan
    return encoded


def encode_mix(backbone: Backbone, inputs: Inputs, mix: Sequence[Ingredient]) -> Encoded:
    """The last layer's states under a mix whose weights may differ by row; see `encode_mixes`."""
    return encode_mixes(backbone, inputs, {"": mix})[""]


def _encode_groups(backbone: Backbone, inputs: Inputs, groups: Sequence[tuple[Tensor, list[Ingredient]]]) -> Tensor:
    """One forward per distinct mix, rows in their order."""
    pieces = []
    for rows, own in groups:
        some = {name: tensor[rows.to(tensor.device)] for name, tensor in inputs.items()}
        pieces.append(backbone.encode(some, make_plan(backbone, own)))
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return torch.cat(pieces)[back.to(pieces[0].device)]


def _stacks(backbone: Backbone, mix: Sequence[Ingredient], plan: Plan) -> bool:
    """Whether it can share a forward with other mixes of the same rows."""
    return backbone.known is not None and plan.by_row and all(stacks(backbone, part.tuner) for part in mix)


def _learns(mix: Sequence[Ingredient]) -> bool:
    """Whether gradients flow into it."""
    tensors = [tensor for part in mix for tensor in (*part.tensors.values(), part.weight) if isinstance(tensor, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
