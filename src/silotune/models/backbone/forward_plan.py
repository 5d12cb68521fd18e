"""Describe how a forward of the backbone is changed: tuners write a `ForwardPlan`, and `Backbone.encode` applies it.

Below the first module that any view of a batch changes, all views are the same. These activations are computed once
(`SharedActivations`, `Backbone.record`). Then the rows go through once for each view, behind one another in one forward
that is given these activations: every frozen matrix product is one product over all of them, while a changed module
treats each copy of the rows as its view's plan says (`segments.segment_plans`).
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
from silotune.models.backbone.architectures import Architecture
from silotune.models.backbone.virtual_tokens import Prefix, Prompt

OutputChange = Callable[[Tensor, Tensor], Tensor]
"""(a module's input, its output so far) → its new output; each of shape (rows, tokens, width).

The output so far holds the module's bias and the changes that come earlier in the plan, also those of other parts.
"""

InputChange = Callable[[Tensor], Tensor]
"""A module's input, shape (rows, tokens, width) → its new input, same shape."""


@dataclass(frozen=True)
class SharedOutput:
    """What a module below the first change yields.

    Args:
        states: shape (rows, …); None if nothing reads them, because the next module of the chain is shared, too.
        tuple_length: length of the tuple whose first element the states are; 0: the output is the states.
    """

    states: Tensor | None
    tuple_length: int


class StopForward(Exception):
    """Ends a forward that records, where something depends on a change."""


@dataclass
class SharedActivations:
    """Outputs of modules below the first changed one, shared by all forwards over the same rows.

    They are constants: no part acts on them. A forward records them (`Backbone.record`) and ends at the first module
    whose input is another than the first changed module's; so all projections of one input are shared.

    Args:
        modules: modules whose outputs may be shared. A module inside another is only asked for if the outer one's
            output is not shared.
        chain: those of them of which each reads the one before: the embeddings and the blocks.
        changed_inputs: modules whose input some plan changes.
        changed_outputs: modules whose output some plan changes; their own output, before any change, is still shared.
        outputs: module → its output, as far as it is recorded.
    """

    modules: frozenset[str]
    chain: frozenset[str]
    changed_inputs: frozenset[str]
    changed_outputs: frozenset[str]
    outputs: dict[str, SharedOutput] = field(default_factory=dict)
    _reached: list[str] = field(init=False, default_factory=list)
    _input: Tensor | None = field(init=False, default=None)
    """The first changed module's input."""

    @classmethod
    def below_first_change(
        cls, base: Any, architecture: Architecture | None, inputs: frozenset[str], outputs: frozenset[str]
    ) -> SharedActivations:
        """Return an empty record for forwards over the same rows.

        It can hold the outputs of the embeddings, of the blocks below the first with a change, and of that block's
        modules before the change. Nothing is shared in families without an entry and in encoder–decoders, whose
        embeddings run twice.
        """
        if architecture is None or base.config.is_encoder_decoder:
            return cls(frozenset(), frozenset(), inputs, outputs)
        chain, inner = [architecture.embeddings], list[str]()
        for block in range(len(base.get_submodule(architecture.blocks))):
            name = f"{architecture.blocks}.{block}"
            chain.append(name)
            if any(changed.startswith(f"{name}.") for changed in inputs | outputs):
                inner = [f"{name}.{each}" for each, _ in base.get_submodule(name).named_modules() if each]
                break
        return cls(frozenset(chain + inner), frozenset(chain), inputs, outputs)

    def enter(self, args: tuple[Any, ...]) -> None:
        """Note that a module runs; ends the forward if the module may read what is changed."""
        if self._reached and not (args and args[0] is self._input):
            raise StopForward

    def add(self, name: str, output: Any) -> None:
        """Record a module's output, which stands for those inside it, and in the chain for the one before it."""
        if any(changed.startswith(f"{name}.") for changed in self._reached):
            raise StopForward
        states, length = (output[0], len(output)) if isinstance(output, tuple) else (output, 0)
        below = {other: each for other, each in self.outputs.items() if not other.startswith(f"{name}.")}
        if name in self.chain:
            below = {other: replace(each, states=None) for other, each in below.items()}
        self.outputs = below | {name: SharedOutput(states, length)}

    def reach(self, name: str, own_input: Tensor) -> None:
        """Note that a module has run whose output is changed from here on."""
        if not self._reached:
            self._input = own_input
        self._reached.append(name)

    def repeated(self, copies: int) -> dict[str, Any]:
        """Return each module's output for so many copies of the rows, behind one another."""
        recorded = (each.states for each in self.outputs.values() if each.states is not None)
        states = {
            name: repeat_rows(each.states, copies) for name, each in self.outputs.items() if each.states is not None
        }
        some = next(recorded, torch.zeros(0))
        unread = some.new_full((), torch.nan).expand(copies * len(some), *some.shape[1:])
        return {
            name: (states.get(name, unread), *[None] * (each.tuple_length - 1))
            if each.tuple_length
            else states.get(name, unread)
            for name, each in self.outputs.items()
        }


def repeat_rows(tensor: Tensor, copies: int) -> Tensor:
    """Put copies of a tensor's rows behind one another: shape (rows, …) becomes (copies · rows, …)."""
    return tensor if copies == 1 else tensor.repeat(copies, *[1] * (tensor.dim() - 1))


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
        repeats: module → its output, which is not computed again (`SharedActivations.repeated`).
        record: receives the activations below the first change, where the forward then ends; None: it runs to its end.
    """

    outputs: defaultdict[str, list[OutputChange]] = field(default_factory=lambda: defaultdict(list))
    inputs: defaultdict[str, list[InputChange]] = field(default_factory=lambda: defaultdict(list))
    prompts: list[Prompt] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    dropout: bool = False
    dropout_rate: float | None = None
    repeats: Mapping[str, Any] = field(default_factory=dict)
    record: SharedActivations | None = None

    def with_dropout(self, dropout: Dropout) -> ForwardPlan:
        """Return the plan with dropout at the backbone's `own` rates or at one rate; with None, the plan itself."""
        if dropout is None:
            return self
        return replace(self, dropout=bool(dropout), dropout_rate=None if isinstance(dropout, str) else dropout)

    @property
    def by_row(self) -> bool:
        """Whether the plan only changes modules' inputs and outputs, row by row."""
        return not (self.prompts or self.prefixes or self.weights or self.dropout)


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
    pieces = []
    for piece_changes, (*before, piece) in zip(changes, zip(*map(split, tensors), strict=True), strict=True):
        for change in piece_changes:
            piece = change(*before, piece)
        pieces.append(piece)
    return torch.cat(pieces)
