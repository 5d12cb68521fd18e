"""Instance-wise dynamic weighting (FedDPA, section 4.3): how much of a part each text gets, by its likeness to others.

`α = λ · mean_i Sim(w_x, w_xi)` over S rows drawn from the silo's training rows; w is read off the last layer's states.
The draw follows from the silo and the text's tokens alone, so that a text's α does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from silotune.core.randomness import sampler
from silotune.core.tensors import Tensors
from silotune.models.forward.mixing import Mix

Similarity = Literal["cosine", "l2", "pearson"]

Representation = Literal["last", "mean"]


INSTANCES = "instances"
"""Where a silo's state at prediction holds what its own rows are known by, beside its parts: `vectors` of shape
(rows, hidden), and `key`, from which draws are derived. Nothing there: the silo never trained, and α is 0."""

VECTORS, KEY = "vectors", "key"


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """The angle's cosine, over the last dimension."""
    return nn.functional.cosine_similarity(x, y, dim=-1)


def l2(x: Tensor, y: Tensor) -> Tensor:
    """`1 / (1 + ‖x − y‖)`."""
    return 1 / (1 + (x - y).square().sum(-1).sqrt())


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """The correlation of the two vectors' entries."""
    return cosine(x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True))


TEXT_SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "l2": l2, "pearson": pearson}


@dataclass(frozen=True)
class InstanceWeighting:
    """How rows' weights come about.

    Args:
        near: the part that gets α.
        far: the part that gets 1 − α.
        view: the mix under which texts are embedded.
        similarity: of `TEXT_SIMILARITIES`.
        representation: the reading of the last layer's states that stands for a text.
        samples: S; a silo with fewer rows takes all.
        scale: λ.
        clip: similarities to [0, 1].
    """

    near: str
    far: str
    view: Mix
    similarity: Similarity = "cosine"
    representation: Representation = "last"
    samples: int = 5
    scale: float = 1.0
    clip: bool = True

    def mix(self, alpha: Tensor) -> dict[str, Tensor]:
        """The mix of rows whose α, shape (rows,), is known."""
        return {self.far: 1 - alpha, self.near: alpha}

    def drawn(self, instances: Tensors, texts: Sequence[Sequence[int]]) -> Tensor:
        """Which of the silo's rows each text is compared with, shape (texts, S); texts as token ids."""
        total, key = len(instances[VECTORS]), int(instances[KEY])
        size = min(self.samples, total)
        rows = [sampler(key, "instances", *text).sample(range(total), size) for text in texts]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(texts), size)

    def similarities(self, instances: Tensors, vectors: Tensor, drawn: Tensor) -> Tensor:
        """Shape (texts, S): of texts' vectors, shape (texts, hidden), to the drawn rows'."""
        found = TEXT_SIMILARITIES[self.similarity](vectors.unsqueeze(1), instances[VECTORS][drawn])
        return found.clamp(0, 1) if self.clip else found

    def alpha(self, similarities: Tensor) -> Tensor:
        """`λ · mean`, shape (texts,)."""
        return self.scale * similarities.mean(1)
