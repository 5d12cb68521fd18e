"""The readings of a batch that losses and heads use: one view per mix, pooled from the last states.

`ConstantViews` keeps the views in which nothing trains in a phase. Anchors (FedMCP's averaged adapter, MOON's and
FedFAME's previous and global model) and parts that a phase does not train give a row the same representation in every
local epoch; only the first epoch computes it. `activation_cache` has a table of how the two caches differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from silotune.data.batching import Batch
from silotune.data.tokenized import WINDOWS, Inputs, TokenizedRows
from silotune.models.backbone.forward_plan import ForwardPlan


class View(dict[str, Tensor]):
    """A batch under one mix: name of a pooling or head → tensor of shape (rows, …), at least float32.

    Rows are in the batch's order. A head's tensor is computed when it is first read: scores of words are expensive, and
    some views are never given to a head.

    Args:
        pooled: pooling's name → tensor of shape (rows, hidden).
        deferred: head's name → function that computes its tensor of shape (rows, …).
    """

    def __init__(self, pooled: Mapping[str, Tensor], deferred: Mapping[str, Callable[[], Tensor]] = {}) -> None:
        super().__init__(pooled)
        self._deferred = deferred

    def __missing__(self, name: str) -> Tensor:
        if name not in self._deferred:
            raise KeyError(name)
        self[name] = reading = self._deferred[name]()
        return reading

    def constant(self) -> View:
        """Return the same readings without gradient."""
        return self._changed(lambda name: self[name].detach())

    def leaves(self) -> View:
        """Return the same readings as leaves of a new graph, in which a loss leaves their gradients."""

        def leaf(name: str) -> Tensor:
            with torch.no_grad():
                reading = self[name].detach()
            return reading.requires_grad_(reading.is_floating_point())

        return self._changed(leaf)

    def _changed(self, change: Callable[[str], Tensor]) -> View:
        return View({name: change(name) for name in self}, {name: partial(change, name) for name in self._deferred})


Pooling = Callable[[Tensor, Inputs], Tensor]
"""(last layer's states of shape (rows, tokens, hidden), inputs) → tensor of shape (rows, …)."""

HeadReading = Callable[[Tensor, Inputs, ForwardPlan], Tensor]
"""As a `Pooling`, provided by a head; it is also given the plan under which the states were computed."""


def first(states: Tensor, _: Inputs) -> Tensor:
    """Return the first token's state ([CLS] or <s>): (rows, tokens, hidden) → (rows, hidden)."""
    return states[:, 0]


def mean(states: Tensor, inputs: Inputs) -> Tensor:
    """Return the mean over tokens that are not padding: (rows, tokens, hidden) → (rows, hidden)."""
    mask = _mask(inputs).unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def last(states: Tensor, inputs: Inputs) -> Tensor:
    """Return the state of the last token that is not padding: (rows, tokens, hidden) → (rows, hidden).

    In a causal model no other state depends on the whole text.
    """
    mask = _mask(inputs)
    positions = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return states[torch.arange(len(states), device=states.device), positions]


def _mask(inputs: Inputs) -> Tensor:
    """Return the mask of the states, shape (rows, tokens): the decoder's if the inputs have decoder tokens."""
    return inputs["decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"]


def by_windows(vectors: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Divide vectors of sequences, shape (sequences, …), among their rows.

    Returns:
        The vectors of each row's windows, shape (rows, most windows, …), zeros where a row has fewer; and the share of
        each in the row's mean, shape (rows, most windows).
    """
    marks = inputs.get(WINDOWS, torch.ones(len(vectors), 1))
    pieces = torch.split(vectors, (marks > 0).sum(1).tolist())
    padded = nn.utils.rnn.pad_sequence([*pieces], batch_first=True)
    missing = marks.shape[1] - padded.shape[1]
    padded = nn.functional.pad(padded, (0, 0) * (padded.dim() - 2) + (0, missing))
    real = (marks == 1).to(vectors)
    return padded, real / real.sum(1, keepdim=True)


def mean_of_windows(vectors: Tensor, inputs: Inputs) -> Tensor:
    """Return each row's mean over its windows: (sequences, hidden) → (rows, hidden)."""
    if WINDOWS not in inputs:
        return vectors
    padded, shares = by_windows(vectors, inputs)
    return (padded * shares.unsqueeze(-1)).sum(1)


POOLINGS: dict[str, Pooling] = {"first": first, "mean": mean, "last": last}


@dataclass
class _Poolings:
    """One view's poolings of a set of rows.

    Args:
        source: the set; held, so that its id is not used again.
        filled: shape (rows of the set,), bool, on the CPU: the rows whose poolings are kept.
        poolings: pooling's name → tensor of shape (rows of the set, hidden).
    """

    source: TokenizedRows
    filled: Tensor
    poolings: dict[str, Tensor] = field(default_factory=dict)


class ConstantViews:
    """Caches one silo's constant views, by view and set of rows, for one phase; nothing is evicted."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._tables: dict[tuple[str, int], _Poolings] = {}

    def get(self, view: str, batch: Batch, rows: slice) -> dict[str, Tensor] | None:
        """Read a view's poolings of some rows of a batch.

        Returns:
            Pooling's name → tensor of shape (rows, hidden); None unless all rows are kept.
        """
        table = self._tables.get((view, id(batch.source)))
        indices = batch.rows[rows]
        if table is None or not bool(table.filled[indices].all()):
            return None
        return {name: values[indices.to(values.device)] for name, values in table.poolings.items()}

    def put(self, view: str, batch: Batch, rows: slice, poolings: Mapping[str, Tensor]) -> None:
        """Keep a view's poolings of some rows of a batch, each of shape (rows, hidden), without gradient."""
        source = batch.source
        if source is None:
            return
        key = (view, id(source))
        if key not in self._tables:
            self._tables[key] = _Poolings(source, torch.zeros(len(source), dtype=torch.bool))
        table = self._tables[key]
        indices = batch.rows[rows]
        table.filled[indices] = True
        for name, values in poolings.items():
            if name not in table.poolings:
                table.poolings[name] = values.new_zeros(len(source), *values.shape[1:])
            table.poolings[name][indices.to(values.device)] = values.detach()
