"""How plans reach the modules of a frozen model: hooks and replaced forwards that do nothing while no plan runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.shared_activations import SharedActivations
from silotune.models.backbone.stacking import ReplicateMode
from silotune.models.backbone.virtual_tokens import FunctionalWrapper


class HookManager:
    """What stays in a model so that a plan can change a forward of it.

    Args:
        base: the model. Its modules' names and weights stay as they are.
    """

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        self._plan: ForwardPlan | None = None
        self._hooked: set[str] = set()
        self._kept: set[str] = set()

    @contextlib.contextmanager
    def applied(self, plan: ForwardPlan) -> Iterator[None]:
        """While it lasts, forwards of the model run under this plan."""
        self.reach({*plan.outputs, *plan.inputs})
        if plan.below is not None:
            self._prepare(plan.below)
        self._plan = plan
        try:
            with _copying(plan):
                if plan.dropout:
                    self._base.train()
                yield
        finally:
            self._plan = None
            if plan.below is not None:
                plan.below.filled = True
            if plan.dropout:
                self._base.eval()

    def reach(self, names: Iterable[str]) -> None:
        """Let plans reach these modules."""
        for name in names:
            self._hook(name)

    def checkpoint(self, name: str) -> None:
        """Run this block under gradient checkpointing; it is computed again under the plan it first ran under."""
        block = self._site(name)
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self._plan
            if plan is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            own = {
                f"base.{key.removeprefix(f'{name}.')}": tensor
                for key, tensor in plan.weights.items()
                if key.startswith(f"{name}.")
            }

            def again(*args: Any, **kwargs: Any) -> Any:
                outer, training, self._plan = self._plan, block.training, plan
                try:
                    block.train(plan.dropout)
                    if not own:
                        with _copying(plan):
                            return forward(*args, **kwargs)
                    return torch.func.functional_call(
                        FunctionalWrapper(block), own, (lambda: forward(*args, **kwargs),)
                    )
                finally:
                    self._plan = outer
                    block.train(training)

            return checkpoint(again, *args, use_reentrant=False, **kwargs)

        block.forward = run

    def _prepare(self, below: SharedActivations) -> None:
        self.reach(below.inputs | below.outputs)
        for name in below.modules - self._kept:
            self._keep(name)
            self._kept.add(name)
        below.open = not below.filled

    def _keep(self, name: str) -> None:
        """Let what forwards have in common reach this module: its output is kept, or taken instead of being made."""
        module = self._site(name)
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            below = None if self._plan is None else self._plan.below
            if below is None or name not in below.modules:
                return forward(*args, **kwargs)
            if below.filled and name in below.found:
                return below.found[name]
            output = forward(*args, **kwargs)
            if below.open:
                below.found[name] = output
            return output

        module.forward = run

    def _hook(self, name: str) -> None:
        """Let plans reach this module. The hooks stay, and do nothing where no plan names the module."""
        if name in self._hooked:
            return

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            plan = self._plan
            if plan is not None and plan.below is not None and name in plan.below.inputs:
                plan.below.changed()
            if plan is None or not (name in plan.inputs or name in plan.past):
                return None
            for function in plan.inputs.get(name, ()):
                args = (function(args[0]), *args[1:])
            if name in plan.past:
                kwargs = {**kwargs, "past_key_values": plan.past[name]}
            return args, kwargs

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            plan = self._plan
            if plan is not None and plan.below is not None and name in plan.below.outputs:
                plan.below.changed()
            if plan is not None and name in plan.outputs:
                for function in plan.outputs[name]:
                    output = function(args[0], output)
            return output

        self._site(name).register_forward_pre_hook(before, with_kwargs=True)
        self._site(name).register_forward_hook(after)
        self._hooked.add(name)

    def _site(self, name: str) -> nn.Module:
        return self._base.get_submodule(name)


def _copying(plan: ForwardPlan) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if plan.copies == 1 else ReplicateMode(plan.rows, plan.copies)
