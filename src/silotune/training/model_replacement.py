"""Scale a malicious silo's update before it is sent, so that it outweighs the others."""

from __future__ import annotations

from collections.abc import Mapping

from silotune.core.tensors import State
from silotune.methods.parts import Part, Scope


def scale_update(state: State, received: State, parts: Mapping[str, Part], scale: float) -> State:
    """Scale the change of the shared parts: `received + scale·(trained − received)`.

    Model replacement (Bagdasaryan et al. 2020, eq. 3): if a silo has weight w in the mean, a scale of 1/w makes the
    aggregate the attacker's model, as far as the others' changes cancel. Under a uniform mean 1/w is the number of
    silos in the round; under a mean by rows it is the number of all their rows over that of the attacker's. Private
    parts are returned unchanged; at a scale of 1 all parts are, to the bit.
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
