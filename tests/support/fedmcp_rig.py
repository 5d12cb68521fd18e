"""FedMCP on the tiny model in float64: option sets, random parts, and every view by the hand-written BERT forward."""

from __future__ import annotations

import torch

from tests.support import by_hand
from tests.support.numeric_rig import doubled, random_parts, some_rows

PARTS = ["global", "private", "head_full", "head_global"]
GAMMA, MU = 0.3, 0.4

OPTIONS = {
    "paper": {},
    "no backbone loss": {"gamma": 0.0},
    "no contrastive loss": {"mu": 0.0},
    "neither": {"gamma": 0.0, "mu": 0.0},
    "backbone loss alone": {"gamma": 1.0},
    "cosine": {"similarity": "cosine"},
    "first token": {"representation": "first"},
    "cosine of first token": {"similarity": "cosine", "representation": "first"},
    "private view full": {"private_view": "full"},
    "private view full, no backbone loss": {"private_view": "full", "gamma": 0.0},
}


def words_of(options):
    chosen = {"gamma": GAMMA, "mu": MU} | options
    return [f"method.{name}={value}" for name, value in chosen.items()]


def set_up(tiny_federation, task, *words, rows=8, micro_batch=3):
    """Return a federation in float64, a silo, its random parts, another received adapter, and a batch."""
    federation = doubled(tiny_federation("fedmcp", *words))
    silo = federation.silos[task]
    state = random_parts(federation, silo, seed=5)
    received = {"global": random_parts(federation, silo, seed=6)["global"]}
    return federation, silo, state, received, some_rows(federation, silo, rows, micro_batch)


def forward_by_hand(federation, silo, rows, *adapters, loras=()):
    """Run the hand-written BERT over each row alone, so without padding, and return its states.

    `adapters` are (weight, bottleneck adapter), `loras` (weight · alpha / r, LoRA).
    """
    backbone = federation.backbone
    (data,) = silo.train.values()
    weights = {key: tensor.cpu() for key, tensor in backbone.base.state_dict().items()}
    mixed = [(weight, {key: tensor.cpu() for key, tensor in part.items()}) for weight, part in adapters]
    config = backbone.base.config
    return [
        by_hand.bert(
            weights,
            data.ids[row],
            data.types[row],
            heads=config.num_attention_heads,
            eps=config.layer_norm_eps,
            bottlenecks=mixed,
            loras=[(weight, {key: tensor.cpu() for key, tensor in part.items()}) for weight, part in loras],
        )
        for row in rows
    ]


def pooled(states, how):
    return torch.stack([by_hand.pooled(row, how) for row in states])
