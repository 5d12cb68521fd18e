"""Compare two answers of a silo that adds noise to its change: equal ones say that no row has a label.

Both broadcasts of one round are sure of the first label, so that rows with it have no gradient at all. If no row has
the second label, the change is 0 under both. Noise that depended on the change alone would then make messages equal,
byte for byte, and tell for certain what no ε allows to be told.
"""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.leakage.low_bits import certain
from benchmarks.leakage.one_silo import OneSilo, demo
from silotune.communication.messages import broadcast_message
from silotune.training.federation import Federation

ROWS = 32


def measure(seed: int) -> dict[str, float]:
    """Return whether both messages are equal: of a silo without the second label, and of one with a row of it."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        noise = "uplink=clip,laplace", "uplink.clip=1", "uplink.epsilon=1", f"privacy.secret={secret}"
        federation = demo(seed, "head.scope=shared", "rounds=1", "train.steps=4", *noise)
        return {f"{name}, equal": attack(federation, rare) for name, rare in (("no row", 0), ("one row", 1))}


def attack(federation: Federation, rare: int) -> float:
    """Return 1 if both messages of a silo with so many rows of the second label are equal, else 0."""
    silo, client, messages = OneSilo.of(federation, ROWS), federation.client(), set()
    labels = torch.zeros_like(silo.rows.labels)
    labels[:rare] = 1
    silo = replace(silo, rows=replace(silo.rows, labels=labels))
    for add in (0.0, 0.01):
        (reply,) = client.rounds([silo.silo()], broadcast_message(certain(silo.start(add)), 1))
        messages.add(reply.message)
    return float(len(messages) == 1)
