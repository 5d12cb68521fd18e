"""Independent computations in NumPy and plain torch that tests compare with. Imports nothing of silotune.

Every function is written from the papers' formulas and the libraries' published shapes, not from the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Arrays = Mapping[str, np.ndarray]


# -- similarity (NumPy) -----------------------------------------------------------------------------------------------


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """`tr(K·H·L·H) / (n − 1)²` with linear kernels and the centring matrix H written out (FedMCP eq. 7)."""
    n = len(x)
    h = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(x @ x.T @ h @ y @ y.T @ h)) / (n - 1) ** 2


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """FedMCP eq. 6."""
    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


def kornblith(x: np.ndarray, y: np.ndarray) -> float:
    """Linear CKA as published: `‖YᵀX‖² / (‖XᵀX‖·‖YᵀY‖)` over centered columns (Kornblith et al. 2019, section 3)."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    frobenius = np.linalg.norm
    return float(frobenius(y.T @ x) ** 2 / (frobenius(x.T @ x) * frobenius(y.T @ y)))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Mean over rows of the cosine of the angle between the rows."""
    values = [float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) for a, b in zip(x, y, strict=True)]
    return sum(values) / len(values)


def model_contrast(z: np.ndarray, z_glob: np.ndarray, z_prev: np.ndarray, tau: float) -> float:
    """Contrastive loss of each row (MOON eq. 3, FedFAME eq. 2): −log of the softmax share of z_glob beside z_prev."""

    def sim(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

    losses = []
    for row, positive, negative in zip(z, z_glob, z_prev, strict=True):
        up, down = math.exp(sim(row, positive) / tau), math.exp(sim(row, negative) / tau)
        losses.append(-math.log(up / (up + down)))
    return sum(losses) / len(losses)


# -- heads and cross-entropy (NumPy) ----------------------------------------------------------------------------------


def mlp_head(tensors: Arrays, task: str, x: np.ndarray) -> np.ndarray:
    """`W_out·tanh(W_dense·x + b) + b`, row by row."""
    rows = []
    for row in x:
        hidden = np.tanh(tensors[f"{task}.dense.weight"] @ row + tensors[f"{task}.dense.bias"])
        rows.append(tensors[f"{task}.out.weight"] @ hidden + tensors[f"{task}.out.bias"])
    return np.stack(rows)


def linear_head(tensors: Arrays, task: str, x: np.ndarray) -> np.ndarray:
    """`W_out·x + b`, row by row."""
    return np.stack([tensors[f"{task}.out.weight"] @ row + tensors[f"{task}.out.bias"] for row in x])


def cross_entropy(logits: np.ndarray, labels: Sequence[int]) -> float:
    """Mean of `−log softmax(logits)[label]`."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        probabilities = np.exp(row - row.max())
        probabilities /= probabilities.sum()
        losses.append(-math.log(probabilities[int(label)]))
    return sum(losses) / len(losses)


# -- BERT with adapters (plain torch, differentiable) -----------------------------------------------------------------

Bottleneck = tuple[float, Mapping[str, Tensor]]
"""(weight, tensors named `<site>.down.weight` …)."""
LoRA = tuple[float, Mapping[str, Tensor]]
"""(weight · alpha / r, tensors named `<site>.lora_A.weight` and `<site>.lora_B.weight`)."""


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _layer_norm(x: Tensor, state: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * state[f"{name}.weight"] + state[f"{name}.bias"]


def bert(
    state: Mapping[str, Tensor],
    ids: Sequence[int],
    types: Sequence[int],
    *,
    heads: int,
    eps: float,
    bottlenecks: Sequence[Bottleneck] = (),
    loras: Sequence[LoRA] = (),
) -> Tensor:
    """BERT's last layer for one text, without padding or mask: shape (tokens, hidden).

    Written from Devlin et al. 2019 and the names of the published weights. Bottleneck adapters add
    `Σ weight · (gelu(h·W_down + b_down)·W_up + b_up)` to the output h of the two sublayers before the residual sum,
    LoRA adds `Σ weight · B·A·x` to a linear layer's output.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        for weight, tensors in loras:
            if f"{name}.lora_A.weight" in tensors:
                y = y + (weight(name, x) if callable(weight) else weight) * (
                    (x @ tensors[f"{name}.lora_A.weight"].T) @ tensors[f"{name}.lora_B.weight"].T
                )
        return y

    def adapted(h: Tensor, site: str) -> Tensor:
        added = torch.zeros_like(h)
        for weight, tensors in bottlenecks:
            hidden = _gelu(h @ tensors[f"{site}.down.weight"].T + tensors[f"{site}.down.bias"])
            added = added + weight * (hidden @ tensors[f"{site}.up.weight"].T + tensors[f"{site}.up.bias"])
        return h + added

    x = state["embeddings.word_embeddings.weight"][list(ids)]
    x = x + state["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + state["embeddings.token_type_embeddings.weight"][list(types)]
    x = _layer_norm(x, state, "embeddings.LayerNorm", eps)
    block = 0
    while f"encoder.layer.{block}.output.dense.weight" in state:
        layer = f"encoder.layer.{block}"
        q, k, v = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        width = q.shape[-1] // heads
        contexts = []
        for head in range(heads):
            columns = slice(head * width, (head + 1) * width)
            scores = q[:, columns] @ k[:, columns].T / math.sqrt(width)
            contexts.append(torch.softmax(scores, dim=-1) @ v[:, columns])
        site = f"{layer}.attention.output.dense"
        h = adapted(linear(torch.cat(contexts, dim=-1), site), site)
        x = _layer_norm(x + h, state, f"{layer}.attention.output.LayerNorm", eps)
        site = f"{layer}.output.dense"
        h = adapted(linear(_gelu(linear(x, f"{layer}.intermediate.dense")), site), site)
        x = _layer_norm(x + h, state, f"{layer}.output.LayerNorm", eps)
        block += 1
    return x


def pooled(states: Tensor, how: str) -> Tensor:
    """Pool one unpadded text: the first token's state, or the mean over all tokens."""
    return states[0] if how == "first" else states.mean(0)
