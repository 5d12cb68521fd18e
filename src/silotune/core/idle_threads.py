"""`let_idle_threads_sleep`: OpenMP's threads spin briefly and then sleep, in this process and those that it starts."""

from __future__ import annotations

import os

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait."""
_SPIN = "5000"
"""Turns that a waiting thread spins, a sixtieth of GNU's default: enough for the gap between two operations of a step.
With 0 a step with two threads takes a fifth longer (docs/performance.md)."""


def let_idle_threads_sleep() -> None:
    """Have PyTorch's threads sleep while they wait for one another, unless the environment says how they wait.

    By default they spin for milliseconds. As soon as other processes want the cores (silos of `--engine flower-local`,
    `--workers`, other users), a thread that spins takes the time that the awaited thread needs. Results do not depend
    on it. OpenMP reads the variables when it is loaded: call this before torch is imported. Where torch is imported
    already, the processes that this one starts still follow.
    """
    if not any(name in os.environ for name in _CHOICES):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = _SPIN
