"""The arguments of a loss: a batch, its views, the silo's parts and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from silotune.core.tensors import State, Tensors, detached
from silotune.data.batching import Batch
from silotune.errors import InputError
from silotune.methods.parts import HEAD, Part
from silotune.models.forward.mixing import Mix, parse_name, parts_in, resolve_weights
from silotune.models.forward.views import View
from silotune.models.heads import PLAIN, Head, LossRecipe
from silotune.models.tuners.base import TokenWeight

Value = TypeVar("Value")

REFERENCE = "reference"
"""The view of the backbone without any part, for heads that read it (`Head.reads_reference`)."""

PREVIOUS = "previous"
"""Prefix of the tensor names under which a silo's memory keeps the parts in `Method.remembers`."""


WhichHead = str | Mix
"""A head's part, or part (or `frozen(part)`, `received(part)`) → weight: the head with the tensors `Σ weight · tensor`.

A mix of linear heads has the mixed logits; one of MLP heads is the head of mixed parameters, as in papers that mix
whole models."""


def heads_of(head: WhichHead) -> list[str]:
    """Return the names of the parts that a head is made of."""
    return [head] if isinstance(head, str) else parts_in(head)


def head_tensors(head: WhichHead, state: State, received: State | None = None) -> Tensors:
    """Return the tensors of a head.

    `received` are the parts that this round's message brought, for `received(part)`.
    """
    if isinstance(head, str):
        return state.get(head, {})
    total: Tensors = {}
    for name, weight in resolve_weights(head, state).items():
        assert not isinstance(weight, TokenWeight), "a head reads states, not tokens' inputs"
        anchor, part = parse_name(name)
        tensors = (received or {}).get(part, {}) if anchor == "received" else state.get(part, {})
        for key, tensor in (detached(tensors) if anchor == "frozen" else tensors).items():
            term = tensor if isinstance(weight, float | int) and weight == 1 else weight * tensor
            total[key] = total[key] + term if key in total else term
    return total


def previous_tensors(memory: Tensors, part: str) -> Tensors:
    """Return the tensors of a remembered part; empty before the silo's first participation."""
    prefix = f"{PREVIOUS}/{part}/"
    return {key.removeprefix(prefix): memory[key] for key in memory if key.startswith(prefix)}


def proximal(tensors: Tensors, anchor: Tensors) -> Tensor:
    """Return `‖w − anchor‖²` over all tensors of a part, shape (); 0 of a part without tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.stack([(tensor - anchor[name]).square().sum() for name, tensor in tensors.items()]).sum()


_WORK = ("loss", "steps", "skipped_steps", "rows", "real_tokens", "padded_tokens", "seconds")

EVENT_KEYS = frozenset(("event", "time", "round", "silo", "note", "bytes_up", "bytes_down", *_WORK))
"""Keys of the events of a silo's round; a term of a loss cannot have such a name."""


class Named(dict[str, Value]):
    """Values by name, whose absence is said with the names that there are; of a loss's views, for example."""

    def __init__(self, what: str, values: Mapping[str, Value]) -> None:
        super().__init__(values)
        self._what = what

    def __missing__(self, name: str) -> Value:
        raise InputError(f"a method's function asks for the {self._what} {name!r}; there are {', '.join(self)}")


@dataclass
class Step:
    """The arguments of a loss: one batch, its views, and the silo's parts, anchors and memory.

    A loss may draw with torch's own generator, which is seeded for each step.

    Args:
        batch: the rows.
        views: name → computed view.
        state: part → tensors, with gradients where the phase trains the part.
        received: part → tensors as this round's message brought them.
        memory: tensors that the silo keeps between participations.
        modules: the method's parts by name.
        terms: terms of the loss for the log, filled by `log`.
        recipe: label smoothing and class weights of training.
        apart: collects the terms passed to `without_rows`; None: they are added to the loss.
        whole: the batch of which `batch` is a piece, whose loss is weighed by its rows; None: `batch` is the whole.
    """

    batch: Batch
    views: dict[str, View]
    state: State
    received: State
    memory: Tensors
    modules: Mapping[str, Part]
    terms: dict[str, Tensor] = field(default_factory=dict)
    recipe: LossRecipe = PLAIN
    apart: list[Tensor] | None = None
    whole: Batch | None = None

    def __post_init__(self) -> None:
        self.views = Named("view", self.views)

    def logits(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return a head's logits over a view, shape (rows, classes)."""
        module, tensors = self._head(head)
        return module.logits(tensors, self.views[view], self.batch.task)

    def cross_entropy(self, view: str, head: WhichHead = HEAD) -> Tensor:
        """Return the head's loss, shape (): the mean cross-entropy of labels or of responses' tokens, or DPO's loss."""
        module, tensors = self._head(head)
        if module.reads_reference:
            return module.referenced_loss(tensors, self.views[view], self.views[REFERENCE], self.batch)
        if self.whole is None:
            return module.training_loss(tensors, self.views[view], self.batch, self.recipe)
        units, of_whole = module.loss_units(self.batch), module.loss_units(self.whole)
        assert of_whole, "only losses that are such means are computed of pieces"
        if not units:
            return torch.zeros(())
        # a mean over tokens weighs by tokens, as a piece weighs by rows; 1 where the loss is a mean over rows
        factor = (units / of_whole) / (len(self.batch) / len(self.whole))
        return factor * module.training_loss(tensors, self.views[view], self.batch, self.recipe)

    def without_rows(self, term: Tensor) -> Tensor:
        """Mark a loss term that depends on no row, such as a proximal one; add the returned value to the loss.

        With noise on rows (`privacy.unit`) the loss is one row's, and such a term's gradient is added after the noise.

        Args:
            term: shape ().

        Returns:
            The term, or zero where it is added later.
        """
        if self.apart is None:
            return term
        self.apart.append(term)
        return torch.zeros_like(term)

    def label_counts(self) -> Tensor:
        """Return how many of the silo's rows each label has, shape (classes,); of its batch, where that is alone.

        Raises:
            InputError: the step has noise on rows, and a count would say more of a row than its gradient.
        """
        if self.apart is not None:
            raise InputError("privacy.unit: the method's loss counts the silo's labels; allowed: another method")
        if not self.batch.task.rules.one_label:
            raise InputError(
                f"method: its loss counts the rows of each label, and these are {self.batch.task.rules.rows}"
            )
        labels = self.batch.labels if self.batch.source is None else self.batch.source.labels
        return torch.bincount(labels, minlength=len(self.batch.task.labels))

    def previous(self, part: str) -> Tensors:
        """Return a part as of the end of the silo's last participation; in its first one, as received."""
        return previous_tensors(self.memory, part) or self.received[part]

    def _head(self, head: WhichHead) -> tuple[Head, Tensors]:
        name = heads_of(head)[0]
        module = self.modules[name].module
        assert isinstance(module, Head), f"part {name!r} is no head"
        return module, head_tensors(head, self.state, self.received)

    def log(self, **terms: Tensor) -> None:
        """Record terms of the loss, shape () each, for the event log.

        Raises:
            ValueError: the log itself uses a term's name.
        """
        clashes = sorted(terms.keys() & EVENT_KEYS)
        if clashes:
            raise ValueError(f"a loss term may not be called {clashes[0]!r}: the event log uses that name itself")
        self.terms.update({name: term.detach() for name, term in terms.items()})


@dataclass(frozen=True)
class LocalTraining:
    """The local training of the silo at work in the present round (`Method.train`).

    Args:
        lr: its learning rate, `train.lr`.
        steps: phase → number of optimizer steps (K in many papers).
        rate_sums: phase → sum of the learning rates of its steps: K·η where the rate is constant.
    """

    lr: float
    steps: Mapping[str, int]
    rate_sums: Mapping[str, float]


AT_WORK: ContextVar[LocalTraining] = ContextVar("the silo at work")


@contextmanager
def local_training(training: LocalTraining) -> Iterator[None]:
    """Let methods see a silo's local training as `Method.train` while their functions are called for it."""
    token = AT_WORK.set(training)
    try:
        yield
    finally:
        AT_WORK.reset(token)


Loss = Callable[[Step], Tensor]
"""A phase's loss: the scalar to minimize, shape ()."""


def mean_over_rows(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a loss that is a mean over rows or tokens, so that the rows of a batch may be trained apart.

    Such a loss adds up only cross-entropies of heads, terms that depend on no row, and other means over rows, and draws
    no random numbers. With `train.tokens_at_once` it takes one pass instead of two; noise on rows (`privacy.unit`)
    needs it. A method that overrides a marked loss has to mark its own.
    """
    loss.mean_over_rows = True  # type: ignore[attr-defined]
    return loss
