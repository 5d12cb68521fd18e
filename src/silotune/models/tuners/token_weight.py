"""Compute a part's weight for each token from the input of the target module (FedALT's mixer)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from silotune.core.tensors import Tensors


@dataclass(frozen=True, eq=False)
class TokenWeight:
    """The weight `softmax(G·x)[index]` of a token, where x is the input of a target module, and G its matrix.

    Args:
        tensors: `{module}.mixer.weight` of shape (parts of the mix, in), for every target module.
        index: the part's row of G.
    """

    tensors: Tensors
    index: int

    def at(self, module: str, x: Tensor) -> Tensor:
        """Return the weight of every token of x (rows, tokens, in), shape (rows, tokens, 1)."""
        scores = nn.functional.linear(x, self.tensors[f"{module}.mixer.weight"].to(x.device, x.dtype))
        return scores.softmax(-1)[..., self.index : self.index + 1]
