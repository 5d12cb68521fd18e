"""Weigh a part for each text by the text's similarity to the silo's rows (FedDPA, section 4.3).

`α = λ · mean_i Sim(w_x, w_xi)` over S sampled training rows xi of the silo; `w_x` is the embedding of text x, pooled
from the last layer's states. The sample depends on the silo and the text's tokens alone, so a text's α does not depend
on its batch. `evaluation/instance_vectors` embeds the rows and computes the weights at prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from silotune.core.randomness import sampler
from silotune.core.tensors import Tensors
from silotune.methods.similarity import row_cosine
from silotune.models.forward.mixing import Mix

Similarity = Literal["cosine", "l2", "pearson"]

Representation = Literal["last", "mean"]

WeightOf = Literal["local", "global"]
"""The part whose weight is α: `local` in FedDPA's paper, `global` in its authors' code."""


INSTANCES = "instances"
"""Name in a silo's state at prediction, beside its parts, of two tensors, `VECTORS` and `SEED`. It is empty if the silo
never trained; the global part then answers alone."""

VECTORS = "vectors"
"""Name of the embeddings of the silo's rows, shape (rows, hidden)."""

SEED = "key"
"""Name of the seed with which rows are sampled for a text, shape ()."""


def l2(x: Tensor, y: Tensor) -> Tensor:
    """Return `1 / (1 + ‖x − y‖)` over the last dimension."""
    return 1 / (1 + (x - y).square().sum(-1).sqrt())


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Return the Pearson correlation over the last dimension."""
    return row_cosine(x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True))


TEXT_SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": row_cosine, "l2": l2, "pearson": pearson}


@dataclass(frozen=True)
class InstanceWeighting:
    """The computation of texts' weights, as a prediction declares it.

    Args:
        local_part: the silo's own part.
        global_part: the shared part.
        view: the mix under which texts are embedded.
        similarity: a key of `TEXT_SIMILARITIES`.
        representation: the pooling of the last layer's states.
        samples: S; a silo with fewer rows takes all.
        scale: λ.
        clip: whether similarities are clipped to [0, 1].
        weight_of: which of the two parts has the weight α; the other one's is 1 − α.
    """

    local_part: str
    global_part: str
    view: Mix
    similarity: Similarity = "cosine"
    representation: Representation = "last"
    samples: int = 5
    scale: float = 1.0
    clip: bool = True
    weight_of: WeightOf = "local"

    def mix(self, alpha: Tensor) -> dict[str, Tensor]:
        """Return the mix for α of shape (rows,)."""
        if self.weight_of == "global":
            return {self.global_part: alpha, self.local_part: 1 - alpha}
        return {self.global_part: 1 - alpha, self.local_part: alpha}

    @property
    def untrained(self) -> float:
        """The α of a silo that never trained: the global part answers alone."""
        return 0.0 if self.weight_of == "local" else 1.0

    def sample_rows(self, instances: Tensors, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the indices of the silo's rows that each text (token ids) is compared with, shape (texts, S)."""
        total, seed = len(instances[VECTORS]), int(instances[SEED])
        size = min(self.samples, total)
        rows = [sampler(seed, "instances", *text).sample(range(total), size) for text in texts]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(texts), size)

    def similarities(self, instances: Tensors, vectors: Tensor, sampled: Tensor) -> Tensor:
        """Return the similarities, shape (texts, S), of `vectors` (texts, hidden) to the `sampled` rows (texts, S)."""
        similarities = TEXT_SIMILARITIES[self.similarity](vectors.unsqueeze(1), instances[VECTORS][sampled])
        return similarities.clamp(0, 1) if self.clip else similarities

    def alpha(self, similarities: Tensor) -> Tensor:
        """Return `λ · mean` of similarities of shape (texts, S), shape (texts,)."""
        return self.scale * similarities.mean(1)
