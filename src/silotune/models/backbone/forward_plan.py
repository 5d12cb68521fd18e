"""Describe how a forward of the backbone is changed: tuners write a `ForwardPlan`, and `Backbone.encode` applies it.

Plans of several views of the same rows are stacked into one (`stack_plans`). Its forward begins with one replica of the
rows, because below the first module that any view changes all views are the same. There the rows become one replica per
view, concatenated (`ReplicateMode` of `hooks`); from then on every frozen matrix product is one product over all of
them, while a changed module treats each replica as its view's plan says. Forwards that cannot be stacked may still
share what lies below the first change (`SharedActivations`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from silotune.config.train import Dropout
from silotune.errors import InputError
from silotune.models.backbone.architectures import Architecture
from silotune.models.backbone.virtual_tokens import Prefix, Prompt

OutputChange = Callable[[Tensor, Tensor], Tensor]
"""(a module's input, its output so far) → its new output; each of shape (rows, tokens, width).

The output so far holds the module's bias and the changes that come earlier in the plan, also those of other parts.
"""

InputChange = Callable[[Tensor], Tensor]
"""A module's input, shape (rows, tokens, width) → its new input, same shape."""


@dataclass
class SharedActivations:
    """Outputs of modules below the first changed one, shared by several forwards over the same rows.

    The first forward records them and the later ones read them. They are constants: no part acts on them.

    Args:
        modules: modules whose outputs may be shared. A module inside another is only asked for if the outer one's
            output is not shared.
        changed_inputs: modules whose input some plan changes.
        changed_outputs: modules whose output some plan changes; their own output, before any change, is still shared.
        activations: module → its output: a tensor of shape (rows, tokens, hidden), or a tuple that begins with one.
        recording: whether the running forward records outputs; it stops at the first change.
        complete: whether a forward has ended: later ones read `activations`.
        prefix_only: whether nothing but the shared activations is wanted: the forward stops at the first change.
    """

    modules: frozenset[str]
    changed_inputs: frozenset[str]
    changed_outputs: frozenset[str]
    activations: dict[str, Any] = field(default_factory=dict)
    recording: bool = True
    complete: bool = False
    prefix_only: bool = False

    @classmethod
    def below_first_change(
        cls, base: Any, architecture: Architecture | None, inputs: frozenset[str], outputs: frozenset[str]
    ) -> SharedActivations:
        """Return an empty record for forwards over the same rows, the first of which fills it.

        It holds the outputs of the embeddings, of the blocks below the first with a change, and of that block's modules
        before the change. Nothing is shared in families without an entry and in encoder–decoders, whose embeddings run
        twice.
        """
        if architecture is None or base.config.is_encoder_decoder:
            return cls(frozenset(), inputs, outputs)
        names = [architecture.embeddings]
        for block in range(len(base.get_submodule(architecture.blocks))):
            name = f"{architecture.blocks}.{block}"
            names.append(name)
            if any(changed.startswith(f"{name}.") for changed in inputs | outputs):
                names += [f"{name}.{inner}" for inner, _ in base.get_submodule(name).named_modules() if inner]
                break
        return cls(frozenset(names), inputs, outputs)

    def stop_recording(self) -> None:
        """Note that the running forward has reached a change: outputs of later modules are not shared.

        Raises:
            StopForward: if only the shared activations are wanted.
        """
        self.recording = False
        if self.prefix_only:
            raise StopForward

    @property
    def outermost(self) -> list[str]:
        """The recorded modules that lie inside no other recorded module, in the order in which they ended."""
        recorded = self.activations
        return [name for name in recorded if not any(name.startswith(f"{other}.") for other in recorded)]


class StopForward(Exception):
    """Ends a forward at the first change."""


@dataclass
class ForwardPlan:
    """Lists what one forward pass of the backbone changes: inputs, outputs, weights, virtual tokens and dropout.

    Args:
        outputs: module's name → changes of its output, applied in order.
        inputs: module's name → changes of its input, applied in order.
        prompts: virtual tokens before the text, in order.
        prefixes: keys and values before the text's own, in order.
        past: module's name → its past keys and values, in models whose attention modules are given a prefix one by
            one; filled in by the backbone.
        weights: parameter's name → the tensor used instead.
        dropout: whether the model runs in training mode.
        dropout_rate: the rate of its dropout there; None: each place's own.
        rows: rows of the batch, in a plan for several views.
        replicas: how many views the plan is for; each has a replica of the rows.
        shared: activations shared with other forwards over the same rows; None: none are.
    """

    outputs: defaultdict[str, list[OutputChange]] = field(default_factory=lambda: defaultdict(list))
    inputs: defaultdict[str, list[InputChange]] = field(default_factory=lambda: defaultdict(list))
    prompts: list[Prompt] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dropout: bool = False
    dropout_rate: float | None = None
    rows: int = 0
    replicas: int = 1
    shared: SharedActivations | None = None

    def with_dropout(self, dropout: Dropout) -> ForwardPlan:
        """Return the plan with dropout at the backbone's `own` rates or at one rate; with None, the plan itself."""
        if dropout is None:
            return self
        return replace(self, dropout=bool(dropout), dropout_rate=None if isinstance(dropout, str) else dropout)

    @property
    def by_row(self) -> bool:
        """Whether the plan only changes modules' inputs and outputs, row by row."""
        return not (self.prompts or self.prefixes or self.weights or self.dropout)


def split_replicas(tensor: Tensor, rows: int, replicas: int) -> Sequence[Tensor]:
    """Split a tensor of shape (rows · replicas, …) into its replicas; one of shape (rows, …) is used for each.

    Returns:
        One tensor of shape (rows, …) per replica.
    """
    if len(tensor) == rows:
        return [tensor] * replicas
    if len(tensor) == rows * replicas:
        return torch.split(tensor, rows)
    raise InputError(
        f"views: a target module's tensor of shape {tuple(tensor.shape)} has neither {rows} rows nor {replicas} copies "
        "of them"
    )


def stack_plans(plans: Sequence[ForwardPlan], rows: int) -> ForwardPlan:
    """Combine plans into one, for a forward over `rows` rows in which replica i is changed as by `plans[i]`.

    The plans change modules' inputs and outputs only (`ForwardPlan.by_row`). A single plan is returned as it is.
    """
    if len(plans) == 1:
        return plans[0]
    combined = combine_plans(plans, partial(split_replicas, rows=rows, replicas=len(plans)))
    combined.rows, combined.replicas = rows, len(plans)
    return combined


Change = Callable[..., Tensor]
"""An `InputChange` or an `OutputChange`."""

Split = Callable[[Tensor], Sequence[Tensor]]
"""A tensor of all rows → each plan's rows of it."""

Wrap = Callable[[int, Change], Change]
"""(index of a plan, one of its changes) → the change to make instead."""


def combine_plans(plans: Sequence[ForwardPlan], split: Split, wrap: Wrap | None = None) -> ForwardPlan:
    """Combine plans into one in which piece i of the rows is changed as by `plans[i]`.

    Args:
        plans: one per piece.
        split: cuts a module's input or output, shape (rows, tokens, width), into the pieces.
        wrap: applied to every change; None: changes stay as they are.
    """

    def combine(changed: Sequence[Mapping[str, Sequence[Change]]], combined: Mapping[str, list[Any]]) -> None:
        for module in dict.fromkeys(name for of_plan in changed for name in of_plan):  # in the order of first mention
            changes: Sequence[Sequence[Change]] = [of_plan.get(module, []) for of_plan in changed]
            if wrap:
                changes = [[wrap(index, change) for change in own] for index, own in enumerate(changes)]
            combined[module].append(partial(_change_pieces, changes, split))

    plan = ForwardPlan()
    combine([each.inputs for each in plans], plan.inputs)
    combine([each.outputs for each in plans], plan.outputs)
    return plan


def _change_pieces(changes: Sequence[Sequence[Change]], split: Split, *tensors: Tensor) -> Tensor:
    """Change each piece of a module's input, or of its output given its input; returns the pieces concatenated."""
    with torch._C.DisableTorchFunction():
        pieces = []
        for piece_changes, (*before, piece) in zip(changes, zip(*map(split, tensors), strict=True), strict=True):
            for change in piece_changes:
                piece = change(*before, piece)
            pieces.append(piece)
        return torch.cat(pieces)
