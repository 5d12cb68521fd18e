"""Random numbers that depend on a seed and a purpose alone, not on the order of calls.

Every draw names its purpose: `generator(seed, "batches", silo, round)`. The same seed then gives the same bits for any
order of silos, in any engine and after any interruption.
"""

from __future__ import annotations

import hashlib
import random

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit seed from `seed` and every word of `purpose` (SHA-256)."""
    text = "\x1f".join(str(word) for word in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Make PyTorch's CPU generator for one purpose. Draw on the CPU and move the result: devices have other streams."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def sampler(seed: int, *purpose: str | int) -> random.Random:
    """Make Python's random generator for one purpose, e.g. choosing rows or silos."""
    return random.Random(derive(seed, *purpose))


States = list[torch.Tensor]
"""States of PyTorch's global generators, in the order of `_generators`."""


class Stream:
    """Context that seeds PyTorch's global generators for one purpose and restores them at exit.

    It serves operations that take no generator argument, such as dropout. A stream entered again continues where it
    stopped; its position is `state` (None before the first time).
    """

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._seed = derive(seed, *purpose)
        self._outside: States | None = None
        self.state: States | None = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self.state is None:
            for each in _generators():  # faster than torch.manual_seed, which asks every kind of device
                each.manual_seed(self._seed)
        else:
            _set(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = _states()
        assert self._outside is not None, "entered before"
        _set(self._outside)


def _generators() -> list[torch.Generator]:
    """Return PyTorch's global generators: the CPU's, and all GPUs', as any of them may hold the backbone."""
    generators: list[torch.Generator] = [torch.default_generator]
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators += torch.cuda.default_generators
    elif torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    return generators


def _states() -> States:
    return [each.get_state() for each in _generators()]


def _set(states: States) -> None:
    for each, state in zip(_generators(), states, strict=True):
        each.set_state(state)
