"""Play the game that ε is about: is one row there, or is its place empty? The attacker knows all other rows.

The coordinator sends a broadcast, honest or sure of the label that all other rows have (`rare-row`), once or twice for
one round. It multiplies each update by the row's true gradient, the strongest simple statistic. The silo's noise is
drawn anew in every game. `found` is the share of games with the row above a threshold that a tenth of those without it
exceed; under (ε, δ) it is at most 0.1·e^ε + δ. `at least` is the 95 % lower limit of that share (Clopper and Pearson).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.leakage.one_silo import OneSilo, demo, private
from benchmarks.leakage.rare_row import sure_head
from silotune.core.tensors import State
from silotune.runs.release import exact_interval
from silotune.training.federation import Federation

ROWS, GAMES, ALARMS = 30, 100, 0.1


def measure(seed: int) -> dict[str, float]:
    """Return what the attacker finds without noise and at ε = 1, for each kind of broadcast."""
    words = "head.scope=shared", "train.steps=2"
    results: dict[str, float] = {}
    for policy in ("trusting", "private"):
        for name, answers in (("honest", 1), ("sure", 1), ("sure, twice", 2)):  # a budget of ε = 1 pays for all answers
            more = private(answers) if policy == "private" else ("rounds=1",)
            played = attack(demo(seed, *words, *more), name.startswith("sure"), answers == 2)
            results |= {f"{policy}, {name}, {key}": value for key, value in played.items()}
    return results


def attack(federation: Federation, sure: bool, twice: bool) -> dict[str, float]:
    """Play games with the first row there and games without it."""
    silo = OneSilo.of(federation, ROWS)
    labels = torch.zeros_like(silo.rows.labels)
    labels[0] = 1
    silo = replace(silo, rows=replace(silo.rows, labels=labels))
    shared = sure_head(federation) if sure else silo.start()
    own = silo.gradients(shared, [0])[0]
    scores = [
        [_told(silo, shared, own, f"{there} {game}", there, twice) for game in range(GAMES)] for there in (True, False)
    ]
    inside, outside = map(torch.tensor, scores)
    hits = int((inside > torch.quantile(outside, 1 - ALARMS)).sum())
    return {"found": hits / GAMES, "at least": exact_interval(hits, GAMES)[0]}


def _told(silo: OneSilo, shared: State, own: torch.Tensor, key: str, there: bool, twice: bool) -> float:
    """Return the statistic of one game: of an update, or of two for broadcasts that hardly differ."""
    context = silo.federation.context
    if context.row_privacy is not None:
        context.row_privacy = replace(context.row_privacy, secret=key.encode())
    context.draw_seed = hash_of(key)  # the order of rows without noise
    rows, empty = (range(ROWS), 0) if there else (range(1, ROWS), 1)
    nearly = {part: {name: tensor + 1e-6 for name, tensor in own_part.items()} for part, own_part in shared.items()}
    changes = [silo.change(each, rows=rows, empty=empty) for each in ([shared, nearly] if twice else [shared])]
    return float(sum(change @ own for change in changes))


def hash_of(key: str) -> int:
    """Return a seed that follows from a text."""
    return int.from_bytes(key.encode(), "big") % 2**31
