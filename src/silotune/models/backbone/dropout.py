"""`dropout_of`: a context in which a frozen module has the dropout rate that a plan wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from silotune.models.backbone.forward_plan import ForwardPlan

_RATES = ("attention_dropout", "activation_dropout", "dropout")
"""Attributes by which modules of transformers without a dropout layer keep a rate (Llama, T5, OPT)."""


@contextlib.contextmanager
def dropout_of(module: nn.Module, plan: ForwardPlan) -> Iterator[None]:
    """Put a module into the mode of its plan while the context lasts, with the plan's rate; then back as it was.

    Args:
        module: the whole model, or a block that runs again for the backward pass.
        plan: its `dropout` and `dropout_rate`.
    """
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
    """The modules inside one, itself included, that drop values, each with the attribute that holds its rate."""
    return [
        (inner, name)
        for inner in module.modules()
        for name in (("p",) if isinstance(inner, nn.Dropout) else _RATES)
        if isinstance(getattr(inner, name, None), float | int) and not isinstance(getattr(inner, name), bool)
    ]
