"""Randomness derived from what it is for, never from the order of calls.

Every draw names its purpose: `generator(seed, "batches", silo, round)`. So the same seed gives the same bits for any
order of silos, any engine and after any interruption.
"""

from __future__ import annotations

import hashlib
import random

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on `seed` and on every word of `purpose`."""
    text = "\x1f".join(str(word) for word in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose. Draw on the CPU and move: devices have different streams."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def sampler(seed: int, *purpose: str | int) -> random.Random:
    """Python's generator for one purpose (choosing rows and silos)."""
    return random.Random(derive(seed, *purpose))


States = tuple[torch.Tensor, torch.Tensor | None]
"""Where PyTorch's own generators stand: the CPU's, and the current GPU's where there is one."""


class Stream:
    """PyTorch's own generators for one purpose, put back afterwards: dropout takes no generator as an argument.

    Entered again, a stream goes on where it stopped: `state`, None before the first time.
    """

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._number = derive(seed, *purpose)
        self._outside: States | None = None
        self.state: States | None = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self.state is None:
            torch.default_generator.manual_seed(self._number)  # torch.manual_seed asks every kind of device, each time
            if torch.cuda.is_available():
                torch.cuda.manual_seed(self._number)
        else:
            _set(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = _states()
        assert self._outside is not None, "entered before"
        _set(self._outside)


def _states() -> States:
    return torch.default_generator.get_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _set(states: States) -> None:
    torch.default_generator.set_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
