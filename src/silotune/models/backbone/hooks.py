"""Install hooks on a model's modules that apply the plan of the current forward; without a plan they do nothing.

They change modules' inputs and outputs, give attention modules their prefixes, record and reuse shared activations, and
run blocks under gradient checkpointing. `Backbone.applied` replaces weights, and `dropout_of` gives a module the
dropout that a plan wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silotune.models.backbone.forward_plan import ForwardPlan, StopForward


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
        if plan.record is not None:
            self.register(plan.record.changed_inputs | plan.record.changed_outputs)
            for name in plan.record.modules - self._with_shared_output:
                self._share_output(name)
                self._with_shared_output.add(name)
        self._plan = plan
        try:
            with dropout_of(self._base, plan):
                yield
        finally:
            self._plan = None

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
                            return forward(*args, **kwargs)
                        return torch.func.functional_call(
                            FunctionalWrapper(block), weights, (lambda: forward(*args, **kwargs),)
                        )
                finally:
                    self._plan = current_plan

            return checkpoint(recompute, *args, use_reentrant=False, **kwargs)

        block.forward = run

    def _share_output(self, name: str) -> None:
        """Wrap a module's forward, so that a plan can record its output or bring it."""
        module = self._module(name)
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan
            if plan is not None and name in plan.repeats:
                return plan.repeats[name]
            if plan is None or plan.record is None or name not in plan.record.modules:
                return forward(*args, **kwargs)
            plan.record.enter(args)
            output = forward(*args, **kwargs)
            plan.record.add(name, output)
            return output

        module.forward = run

    def _hook(self, name: str) -> None:
        """Hook a module. Its hooks do nothing under a plan that does not name it."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            plan = self._plan
            if plan is not None and plan.record is not None and name in plan.record.changed_inputs:
                raise StopForward
            if plan is None or not (name in plan.inputs or name in plan.past):
                return None
            for function in plan.inputs.get(name, ()):
                args = (function(args[0]), *args[1:])
            if name in plan.past:
                kwargs = {**kwargs, "past_key_values": plan.past[name]}
            return args, kwargs

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            plan = self._plan
            if plan is not None and plan.record is not None and name in plan.record.changed_outputs:
                plan.record.reach(name, args[0])
            if plan is not None and name in plan.outputs:
                for function in plan.outputs[name]:
                    output = function(args[0], output)
            return output

        self._module(name).register_forward_pre_hook(before, with_kwargs=True)
        self._module(name).register_forward_hook(after)

    def _module(self, name: str) -> nn.Module:
        return self._base.get_submodule(name)


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
