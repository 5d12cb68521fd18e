"""`stack_plans`: several views of the same rows in one forward, on replicas of the rows (`ReplicateMode`).

The forward begins with one replica, because below the first module that any view changes all views are the same. There
the rows become one replica per view, concatenated; from then on every frozen matrix product is one product over all of
them, while a changed module treats each replica as its view's plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from silotune.errors import InputError
from silotune.models.backbone.forward_plan import ForwardPlan

_RESHAPING = {Tensor.view, Tensor.reshape, torch.reshape}


class ReplicateMode(TorchFunctionMode):
    """Repeats tensors that still have one replica where they meet tensors that have all.

    Two rules apply while the mode is active. An operation that cannot take tensors of `rows` together with tensors of
    `rows · replicas` rows is done with the former repeated (ordinary broadcasting would be an error, so no valid
    operation is changed). A reshape to `rows` of a tensor that has all replicas keeps the replicas (models ask a
    module's input for its shape and reshape its outputs).

    Args:
        rows: rows of one replica.
        replicas: number of replicas.
    """

    def __init__(self, rows: int, replicas: int) -> None:
        super().__init__()
        self._rows, self._all = rows, rows * replicas
        self._repeated: dict[int, tuple[Tensor, Tensor]] = {}  # holds the original, so that its id is not used again

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RESHAPING:
            args = self._reshape_arguments(args)
        elif self._certainly_mixed((*args, *kwargs.values())):
            return func(*self._repeat(args), **self._repeat(kwargs))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, IndexError):
            if not self._mixed(args, kwargs):
                raise
        return func(*self._repeat(args), **self._repeat(kwargs))

    def _certainly_mixed(self, args: tuple[Any, ...]) -> bool:
        """Whether the operation would fail: two arguments of equal rank have rows of one replica and of all."""
        shapes = {(arg.dim(), len(arg)) for arg in args if isinstance(arg, Tensor) and arg.dim() > 2}
        return any((rank, self._all) in shapes for rank, length in shapes if length == self._rows > 1)

    def _reshape_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a reshape, with the rows of all replicas in place of the rows of one."""
        tensor, *shape = args
        as_sequence = len(shape) == 1 and not isinstance(shape[0], int)
        sizes = list(shape[0]) if as_sequence else shape
        if tensor.dim() < 3 or len(tensor) != self._all or not sizes or sizes[0] != self._rows:
            return args
        sizes[0] = self._all
        return (tensor, tuple(sizes)) if as_sequence else (tensor, *sizes)

    def _mixed(self, *arguments: Any) -> bool:
        """Whether arguments hold both tensors of one replica and tensors of all."""
        lengths = {len(tensor) for tensor in _tensors(arguments) if tensor.dim() > 1}
        return {self._rows, self._all} <= lengths

    def _repeat(self, argument: Any) -> Any:
        """The argument with every tensor of one replica in it repeated."""
        if isinstance(argument, Tensor):
            return self._repeat_rows(argument) if argument.dim() > 1 and len(argument) == self._rows else argument
        if isinstance(argument, tuple | list):
            return type(argument)(self._repeat(item) for item in argument)
        if isinstance(argument, Mapping):
            return {name: self._repeat(item) for name, item in argument.items()}
        return argument

    def _repeat_rows(self, tensor: Tensor) -> Tensor:
        """(rows, …) → (rows · replicas, …), repeated once per tensor."""
        if id(tensor) not in self._repeated:
            times = [self._all // self._rows, *([1] * (tensor.dim() - 1))]
            self._repeated[id(tensor)] = tensor, tensor.repeat(times)
        return self._repeated[id(tensor)][1]


def _tensors(argument: Any) -> list[Tensor]:
    """All tensors in nested sequences and mappings."""
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, Mapping):
        argument = list(argument.values())
    return [tensor for item in argument for tensor in _tensors(item)] if isinstance(argument, tuple | list) else []


def split_replicas(tensor: Tensor, rows: int, replicas: int) -> Sequence[Tensor]:
    """Split a tensor into its replicas; a tensor of one replica stands for each of them.

    Args:
        tensor: shape (rows, …) or (rows · replicas, …).
        rows: rows of one replica.
        replicas: number of replicas.

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

    def wrapped(changes: Sequence[Sequence[Change]]) -> list[list[Change]]:
        return [
            [wrap(index, change) if wrap else change for change in piece_changes]
            for index, piece_changes in enumerate(changes)
        ]

    combined = ForwardPlan()
    for module in _in_order(plan.inputs for plan in plans):
        changes = wrapped([plan.inputs.get(module, []) for plan in plans])
        combined.inputs[module].append(partial(_change_inputs, changes, split))
    for module in _in_order(plan.outputs for plan in plans):
        changes = wrapped([plan.outputs.get(module, []) for plan in plans])
        combined.outputs[module].append(partial(_change_outputs, changes, split))
    return combined


def _in_order(modules: Iterable[Iterable[str]]) -> list[str]:
    """Return every module once, in the order of first mention."""
    return list(dict.fromkeys(module for plan_modules in modules for module in plan_modules))


def _change_inputs(changes: Sequence[Sequence[Change]], split: Split, x: Tensor) -> Tensor:
    """Change each piece of an input of shape (rows, tokens, width); returns the pieces concatenated."""
    with torch._C.DisableTorchFunction():
        pieces = []
        for piece_changes, piece in zip(changes, split(x), strict=True):
            for change in piece_changes:
                piece = change(piece)
            pieces.append(piece)
        return torch.cat(pieces)


def _change_outputs(changes: Sequence[Sequence[Change]], split: Split, x: Tensor, y: Tensor) -> Tensor:
    """Change each piece of an output, shape (rows, tokens, out), given its input; returns the pieces concatenated."""
    with torch._C.DisableTorchFunction():
        pieces = []
        for piece_changes, before, piece in zip(changes, split(x), split(y), strict=True):
            for change in piece_changes:
                piece = change(before, piece)
            pieces.append(piece)
        return torch.cat(pieces)
