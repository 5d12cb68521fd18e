"""Install hooks on a model's modules that apply the plan of the current forward; without a plan they do nothing.

They change modules' inputs and outputs, give attention modules their prefixes, record and reuse shared activations, and
run blocks under gradient checkpointing. `Backbone.applied` replaces weights, `ReplicateMode` repeats rows, and
`dropout_of` gives a module the dropout that a plan wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from silotune.models.backbone.forward_plan import ForwardPlan, SharedActivations


class FunctionalWrapper(nn.Module):
    """Wraps a module, so that `torch.func.functional_call` can replace its weights while any function runs.

    Args:
        base: the wrapped module; its parameters are named `base.…` here.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, function: Any) -> Any:
        """Call the function and return its result."""
        return function()


class HookManager:
    """The hooks of one model, and the plan they apply."""

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        self._plan: ForwardPlan | None = None
        self._hooked: set[str] = set()
        self._with_shared_output: set[str] = set()
        self._checkpoints = True

    @contextlib.contextmanager
    def applied(self, plan: ForwardPlan) -> Iterator[None]:
        """Run forwards of the model under this plan while the context lasts."""
        self.register({*plan.outputs, *plan.inputs})
        if plan.shared is not None:
            self._prepare_shared_activations(plan.shared)
        self._plan = plan
        try:
            with _replicate_mode(plan), dropout_of(self._base, plan):
                yield
        finally:
            self._plan = None
            if plan.shared is not None:
                plan.shared.complete = True

    @contextlib.contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Keep all activations while the context lasts, also of blocks under gradient checkpointing."""
        self._checkpoints = False
        try:
            yield
        finally:
            self._checkpoints = True

    def register(self, names: Iterable[str]) -> None:
        """Hook these modules once, so that plans can change their inputs and outputs."""
        for name in names:
            if name not in self._hooked:
                self._hook(name)
                self._hooked.add(name)

    def checkpoint_block(self, name: str) -> None:
        """Run this block under gradient checkpointing; the backward pass recomputes it under the forward's plan."""
        block = self._module(name)
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan
            if plan is None or not torch.is_grad_enabled() or not self._checkpoints:
                return forward(*args, **kwargs)
            weights = {
                f"base.{key.removeprefix(f'{name}.')}": tensor
                for key, tensor in plan.weights.items()
                if key.startswith(f"{name}.")
            }

            def recompute(*args: Any, **kwargs: Any) -> Any:
                current_plan, self._plan = self._plan, plan
                try:
                    with dropout_of(block, plan):
                        if not weights:
                            with _replicate_mode(plan):
                                return forward(*args, **kwargs)
                        return torch.func.functional_call(
                            FunctionalWrapper(block), weights, (lambda: forward(*args, **kwargs),)
                        )
                finally:
                    self._plan = current_plan

            return checkpoint(recompute, *args, use_reentrant=False, **kwargs)

        block.forward = run

    def _prepare_shared_activations(self, shared: SharedActivations) -> None:
        """Hook the modules whose outputs this forward records or reuses."""
        self.register(shared.changed_inputs | shared.changed_outputs)
        for name in shared.modules - self._with_shared_output:
            self._share_output(name)
            self._with_shared_output.add(name)
        shared.recording = not shared.complete

    def _share_output(self, name: str) -> None:
        """Wrap a module's forward, so that a plan can record its output or return a recorded one."""
        module = self._module(name)
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            shared = None if self._plan is None else self._plan.shared
            if shared is None or name not in shared.modules:
                return forward(*args, **kwargs)
            if shared.complete and name in shared.activations:
                return shared.activations[name]
            output = forward(*args, **kwargs)
            if shared.recording:
                shared.activations[name] = output
            return output

        module.forward = run

    def _hook(self, name: str) -> None:
        """Hook a module. Its hooks do nothing under a plan that does not name it."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            plan = self._plan
            if plan is not None and plan.shared is not None and name in plan.shared.changed_inputs:
                plan.shared.stop_recording()
            if plan is None or not (name in plan.inputs or name in plan.past):
                return None
            for function in plan.inputs.get(name, ()):
                args = (function(args[0]), *args[1:])
            if name in plan.past:
                kwargs = {**kwargs, "past_key_values": plan.past[name]}
            return args, kwargs

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            plan = self._plan
            if plan is not None and plan.shared is not None and name in plan.shared.changed_outputs:
                plan.shared.stop_recording()
            if plan is not None and name in plan.outputs:
                for function in plan.outputs[name]:
                    output = function(args[0], output)
            return output

        self._module(name).register_forward_pre_hook(before, with_kwargs=True)
        self._module(name).register_forward_hook(after)

    def _module(self, name: str) -> nn.Module:
        return self._base.get_submodule(name)


def _replicate_mode(plan: ForwardPlan) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if plan.replicas == 1 else ReplicateMode(plan.rows, plan.replicas)


_RESHAPING = {Tensor.view, Tensor.reshape, torch.reshape}


class ReplicateMode(TorchFunctionMode):
    """Repeats tensors that still have one replica where they meet tensors that have all.

    Two rules apply while the mode is active. An operation that cannot take tensors of `rows` together with tensors of
    `rows · replicas` rows is done with the former repeated (ordinary broadcasting would be an error, so no valid
    operation is changed). A reshape to `rows` of a tensor that has all replicas keeps the replicas (models ask a
    module's input for its shape and reshape its outputs).
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
        """Return the arguments of a reshape, with the rows of all replicas in place of the rows of one."""
        tensor, *shape = args
        as_sequence = len(shape) == 1 and not isinstance(shape[0], int)
        sizes = list(shape[0]) if as_sequence else shape
        if tensor.dim() < 3 or len(tensor) != self._all or not sizes or sizes[0] != self._rows:
            return args
        sizes[0] = self._all
        return (tensor, tuple(sizes)) if as_sequence else (tensor, *sizes)

    def _mixed(self, *arguments: Any) -> bool:
        """Whether arguments hold both tensors of one replica and tensors of all."""
        lengths = {len(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim() > 1}
        return {self._rows, self._all} <= lengths

    def _repeat(self, argument: Any) -> Any:
        """Return the argument with every tensor of one replica in it repeated."""
        return tree_map_only(Tensor, self._repeat_rows, argument)

    def _repeat_rows(self, tensor: Tensor) -> Tensor:
        """Repeat a tensor of one replica, (rows, …), to (rows · replicas, …), once per tensor."""
        if tensor.dim() < 2 or len(tensor) != self._rows:
            return tensor
        if id(tensor) not in self._repeated:
            times = [self._all // self._rows, *([1] * (tensor.dim() - 1))]
            self._repeated[id(tensor)] = tensor, tensor.repeat(times)
        return self._repeated[id(tensor)][1]


_RATES = ("attention_dropout", "activation_dropout", "dropout")
"""Attributes by which modules of transformers without a dropout layer keep a rate (Llama, T5, OPT)."""


@contextlib.contextmanager
def dropout_of(module: nn.Module, plan: ForwardPlan) -> Iterator[None]:
    """Set a module's dropout to a plan's within the context, and restore it afterwards."""
    if not plan.dropout and not module.training:
        yield
        return
    places = [] if not plan.dropout_rate else _places(module)
    before = [getattr(place, name) for place, name in places]
    training = module.training
    try:
        for place, name in places:
            setattr(place, name, plan.dropout_rate)
        module.train(plan.dropout)
        yield
    finally:
        module.train(training)
        for (place, name), rate in zip(places, before, strict=True):
            setattr(place, name, rate)


def _places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Find the modules that drop values, each with the attribute that holds its rate."""
    return [
        (inner, name)
        for inner in module.modules()
        for name in (("p",) if isinstance(inner, nn.Dropout) else _RATES)
        if isinstance(getattr(inner, name, None), float | int) and not isinstance(getattr(inner, name), bool)
    ]
