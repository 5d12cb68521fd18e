"""`WhichHead`: the head of a loss or prediction: a part, or a mix of heads whose tensors are added up by weight."""

from __future__ import annotations

from silotune.core.tensors import State, Tensors, detached
from silotune.models.forward.mixing import Mix, parse_name, parts_in, resolve_weights
from silotune.models.tuners.token_weight import TokenWeight

WhichHead = str | Mix
"""A head's part, or part (or `frozen(part)`, `received(part)`) → weight: the head with the tensors `Σ weight · tensor`.

A mix of linear heads has the mixed logits; one of MLP heads is the head of mixed parameters, as in papers that mix
whole models."""


def heads_of(head: WhichHead) -> list[str]:
    """Return the names of the parts that a head is made of."""
    return [head] if isinstance(head, str) else parts_in(head)


def head_tensors(head: WhichHead, state: State, received: State | None = None) -> Tensors:
    """Return the tensors of a head.

    Args:
        head: the part, or the mix.
        state: the silo's parts.
        received: the parts that this round's message brought, for `received(part)`.
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
