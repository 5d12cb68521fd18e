"""Randomness derived from what it is for, never from the order of calls.

Every draw names its purpose: `generator(seed, "batches", silo, round)`. So the same seed gives the same bits for any
order of silos, any engine and after any interruption.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """PyTorch's own generators for one purpose, put back afterwards: dropout takes no generator as an argument."""
    number = derive(seed, *purpose)
    cuda = torch.cuda.is_available()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
        torch.default_generator.manual_seed(number)  # torch.manual_seed asks every kind of device, each time
        if cuda:
            torch.cuda.manual_seed(number)
        yield
