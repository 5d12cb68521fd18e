"""Several views of the same rows in one forward: each view has a copy of the rows of its own.

The forward begins with one copy, because below the first module that any view changes all views are the same. There
the rows become as many copies as there are views, one behind the other, and from then on every frozen matrix product is
one product over all of them, while a site does to each copy what its view wants and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from silotune.errors import InputError
from silotune.models.backbone.forward_plan import ForwardPlan

_RESHAPING = {Tensor.view, Tensor.reshape, torch.reshape}


class ReplicateMode(TorchFunctionMode):
    """Lets tensors of one copy of the rows meet tensors of all copies: the former are then repeated.

    Two rules. An operation that cannot take tensors of `rows` and of `rows · copies` rows is done on the repeated ones
    (ordinary broadcasting would be an error, so nothing that has a meaning of its own is touched). And a reshape to
    `rows` of something that has become copies (models ask a module's input for its shape, and reshape its outputs)
    keeps the copies.
    """

    def __init__(self, rows: int, copies: int) -> None:
        super().__init__()
        self._rows, self._all = rows, rows * copies
        self._repeated: dict[int, tuple[Tensor, Tensor]] = {}  # the original is kept: an id may be used again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides`."""
        kwargs = kwargs or {}
        if func in _RESHAPING:
            args = self._keeping_copies(args)
        elif self._must_meet((*args, *kwargs.values())):
            return func(*self._meet(args), **self._meet(kwargs))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, IndexError):
            if not self._mixed(args, kwargs):
                raise
        return func(*self._meet(args), **self._meet(kwargs))

    def _must_meet(self, args: tuple[Any, ...]) -> bool:
        """Whether two arguments would certainly fail: of equal rank, with rows of one copy and of all."""
        shapes = {(arg.dim(), len(arg)) for arg in args if isinstance(arg, Tensor) and arg.dim() > 2}
        return any((rank, self._all) in shapes for rank, length in shapes if length == self._rows > 1)

    def _keeping_copies(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, *shape = args
        several = len(shape) == 1 and not isinstance(shape[0], int)
        wanted = list(shape[0]) if several else shape
        if tensor.dim() < 3 or len(tensor) != self._all or not wanted or wanted[0] != self._rows:
            return args
        wanted[0] = self._all
        return (tensor, tuple(wanted)) if several else (tensor, *wanted)

    def _mixed(self, *found: Any) -> bool:
        lengths = {len(tensor) for tensor in _tensors(found) if tensor.dim() > 1}
        return {self._rows, self._all} <= lengths

    def _meet(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            return self._of_all(found) if found.dim() > 1 and len(found) == self._rows else found
        if isinstance(found, tuple | list):
            return type(found)(self._meet(one) for one in found)
        if isinstance(found, Mapping):
            return {name: self._meet(one) for name, one in found.items()}
        return found

    def _of_all(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._repeated:
            times = [self._all // self._rows, *([1] * (tensor.dim() - 1))]
            self._repeated[id(tensor)] = tensor, tensor.repeat(times)
        return self._repeated[id(tensor)][1]


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        found = list(found.values())
    return [tensor for one in found for tensor in _tensors(one)] if isinstance(found, tuple | list) else []


def split_replicas(tensor: Tensor, rows: int, copies: int) -> Sequence[Tensor]:
    """Each copy's rows; where there is still one copy, that for each.

    Raises:
        InputError: for a tensor that has no such rows.
    """
    if len(tensor) == rows:
        return [tensor] * copies
    if len(tensor) == rows * copies:
        return torch.split(tensor, rows)
    raise InputError(
        f"views: a site's tensor of shape {tuple(tensor.shape)} has neither {rows} rows nor {copies} copies of them"
    )


def stacked(plans: Sequence[ForwardPlan], rows: int) -> ForwardPlan:
    """One plan for a forward over `rows` rows in which copy i is changed as by `plans[i]`.

    The plans change modules' inputs and outputs only (`ForwardPlan.by_row`). A single plan is returned as it is.
    """
    if len(plans) == 1:
        return plans[0]
    whole = combine_plans(plans, partial(split_replicas, rows=rows, copies=len(plans)))
    whole.rows, whole.copies = rows, len(plans)
    return whole


Split = Callable[[Tensor], Sequence[Tensor]]
"""All rows → those of each plan."""

Wrap = Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]]
"""(which plan's, a change) → the change as it is to be made."""


def combine_plans(plans: Sequence[ForwardPlan], split: Split, wrap: Wrap | None = None) -> ForwardPlan:
    """One plan in which piece i of the rows is changed as by `plans[i]`.

    Args:
        plans: what each piece's changes are.
        split: cuts a site's tensors into the pieces.
        wrap: put around every change.
    """

    def of(found: Sequence[Sequence[Callable[..., Tensor]]]) -> list[list[Callable[..., Tensor]]]:
        return [[wrap(place, one) if wrap else one for one in own] for place, own in enumerate(found)]

    whole = ForwardPlan()
    for site in _in_order(plan.inputs for plan in plans):
        whole.inputs[site].append(partial(_change_inputs, of([plan.inputs.get(site, []) for plan in plans]), split))
    for site in _in_order(plan.outputs for plan in plans):
        whole.outputs[site].append(partial(_change_outputs, of([plan.outputs.get(site, []) for plan in plans]), split))
    return whole


def _in_order(sites: Any) -> list[str]:
    return list(dict.fromkeys(site for own in sites for site in own))


def _change_inputs(changes: Sequence[Sequence[Callable[..., Tensor]]], split: Split, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        found = []
        for own, piece in zip(changes, split(x), strict=True):
            for change in own:
                piece = change(piece)
            found.append(piece)
        return torch.cat(found)


def _change_outputs(changes: Sequence[Sequence[Callable[..., Tensor]]], split: Split, x: Tensor, y: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        found = []
        for own, before, piece in zip(changes, split(x), split(y), strict=True):
            for change in own:
                piece = change(before, piece)
            found.append(piece)
        return torch.cat(found)
