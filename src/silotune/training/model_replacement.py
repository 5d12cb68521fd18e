"""What a malicious silo does to its update before it leaves. Its rows are poisoned in `data/poison.py`."""

from __future__ import annotations

from collections.abc import Mapping

from silotune.core.tensors import State
from silotune.methods.parts import Part, Scope


def scale_update(state: State, received: State, parts: Mapping[str, Part], scale: float) -> State:
    """The state with the shared parts' change multiplied: `received + scale·(trained − received)`.

    Model replacement (Bagdasaryan et al. 2020, eq. 3): where a silo weighs w in the mean, a scale of 1/w makes the
    aggregate the attacker's model, as far as the others' changes cancel. Under a uniform mean of n silos that is n, by
    rows N/n_k.
    Private parts stay as they are; so does everything at a scale of 1, to the bit.
    """
    if scale == 1:
        return state
    shared = {name for name, part in parts.items() if part.scope is Scope.SHARED}
    return {
        name: {
            key: (received[name][key].double() + scale * (tensor.double() - received[name][key].double())).to(tensor)
            for key, tensor in tensors.items()
        }
        if name in shared
        else tensors
        for name, tensors in state.items()
    }
