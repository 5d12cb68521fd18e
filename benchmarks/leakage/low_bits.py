"""Read the low bits of noise on rows: whether one row is there, from a single answer at ε = 1.

Where a number of the sum and its noise nearly cancel, noise in floating point leaves fewer bits than noise alone would
(Mironov 2012), and so says which sums are possible. The attacker computes the clipped sums of both cases and counts the
numbers that no noise in float32 leads from them to the answer. Under an honest broadcast it knows all rows; under one
that is sure of the label of all others, which leaves them no gradient at all, the row alone. The silo's noise is drawn
anew in every game; `found`, `at least` and what ε allows are those of `membership-game`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.leakage.one_silo import OneSilo, demo, private, vector
from silotune.core.tensors import State
from silotune.runs.release import exact_interval
from silotune.training.federation import Federation

ROWS, GAMES, ALARMS = 32, 20, 0.1


def measure(seed: int) -> dict[str, float]:
    """Return what the attacker finds for each kind of broadcast."""
    words = "head.scope=shared", "tuner=lora", "tuner.r=8", "train.steps=1", f"train.batch_size={ROWS}", "train.lr=1"
    results: dict[str, float] = {}
    for name in ("honest", "sure"):
        played = attack(demo(seed, *words, *private(1)), name == "sure")
        results |= {f"{name}, {key}": value for key, value in played.items()}
    return results


def attack(federation: Federation, sure: bool, rows: int = ROWS, games: int = GAMES) -> dict[str, float]:
    """Play games with the first row there and games without it; one step draws all rows."""
    silo = OneSilo.of(federation, rows)
    labels = torch.zeros_like(silo.rows.labels)
    labels[0] = 1
    silo = replace(silo, rows=replace(silo.rows, labels=labels))
    shared = certain(silo.start()) if sure else silo.start()
    zero = vector(shared) == 0  # there the change is the whole answer, without another rounding
    sums = {there: _sum(silo, shared, there, None)[zero] for there in (True, False)}
    inside, outside = (
        torch.tensor([_score(_sum(silo, shared, there, f"{there} {game}")[zero], sums) for game in range(games)])
        for there in (True, False)
    )
    hits = int((inside > torch.quantile(outside, 1 - ALARMS)).sum())
    return {"found": hits / games, "at least": exact_interval(hits, games)[0]}


def certain(shared: State) -> State:
    """Return parts whose head gives the first label a probability that rounds to 1, whatever the text."""
    return {
        part: {
            name: torch.tensor([300.0, -300.0]) if name.endswith("out.bias") else tensor
            for name, tensor in tensors.items()
        }
        for part, tensors in shared.items()
    }


def _sum(silo: OneSilo, shared: State, there: bool, key: str | None) -> Tensor:
    """Return the sum of clipped gradients that an answer shows, noised under a key; None: without noise."""
    context, rows = silo.federation.context, silo.rows.examples
    assert context.row_privacy is not None, "the setting has noise"
    context.row_privacy = replace(context.row_privacy, secret=(key or "").encode())
    without = patch("torch.special.ndtri", torch.zeros_like) if key is None else nullcontext()
    with without:  # the noise is a function of this one; the rest is computed as the silo computes it
        change = silo.change(shared, rows=range(0 if there else 1, rows), empty=0 if there else 1)
    return -change * rows / context.train.lr


def _score(answer: Tensor, sums: dict[bool, Tensor]) -> float:
    return float(_misfits(answer, sums[False]) - _misfits(answer, sums[True]))


def _misfits(answer: Tensor, total: Tensor) -> int:
    """Count the numbers of an answer that no float32 added to those of `total` gives."""
    noise = answer - total.float().double()
    step, coarse = _last_place(noise), _last_place(answer)
    off = (noise / step - torch.round(noise / step)).abs() * step
    return int(((answer != 0) & (step > coarse) & (off > coarse / 2 * 1.0001)).sum())


def _last_place(numbers: Tensor) -> Tensor:
    """Return the distance of neighboring float32 numbers at these."""
    return 2.0 ** (torch.floor(torch.log2(numbers.abs().clamp(min=1e-38))) - 23)
