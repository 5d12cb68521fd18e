"""Train heads before everything else, on what the untouched backbone reads (`method.head_rounds`).

No part acts below a head in these rounds, so a row's vector is computed once for all of them, a step costs about a
hundredth of one through the backbone (docs/results/row-noise.md), and heads alone leave the silos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from silotune.methods.parts import Part, Scope
from silotune.methods.phase import Phase
from silotune.methods.step import Step
from silotune.models.heads import Head

UNTOUCHED = "untouched"
"""The view of the backbone without any part, which heads are trained on."""

HEAD_FIRST = "head-first"
"""The name of the heads' phase."""


@dataclass(frozen=True)
class _CrossEntropies:
    """The sum of these heads' cross-entropies, each of which has a gradient of its own."""

    heads: tuple[str, ...]
    mean_over_rows = True

    def __call__(self, step: Step) -> Tensor:
        losses = [step.cross_entropy(UNTOUCHED, head) for head in self.heads]
        return sum(losses[1:], start=losses[0])


def heads_alone(parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Return the names of the heads that have tensors to train, whatever their scope."""
    return tuple(
        name
        for name, part in parts.items()
        if isinstance(part.module, Head) and part.module.has_tensors and part.scope is not Scope.FIXED
    )


def head_first(phases: Sequence[Phase], parts: Mapping[str, Part], rounds: int, lr: float | None) -> list[Phase]:
    """Return a phase of the heads for the first rounds, and a method's own phases for those that follow.

    The method's rounds are counted from the first of its own, so that odd ones stay odd.
    """
    heads = heads_alone(parts)
    first = Phase(HEAD_FIRST, heads, {UNTOUCHED: {}}, _CrossEntropies(heads), rounds=partial(_up_to, rounds), lr=lr)
    return [first] + [
        replace(phase, from_round=1, rounds=partial(_after, phase, rounds)) if phase.when == "round" else phase
        for phase in phases
    ]


def _up_to(last: int, number: int) -> bool:
    return number <= last


def _after(phase: Phase, rounds: int, number: int) -> bool:
    return number > rounds and phase.runs_in(number - rounds)
