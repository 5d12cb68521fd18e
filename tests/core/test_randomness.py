"""Streams of random numbers, also on machines with an accelerator: here another generator stands in for its own."""

from __future__ import annotations

import pytest
import torch

from silotune.core.randomness import Stream


@pytest.mark.parametrize("kind", ["cpu", "cuda", "second cuda", "mps"])
def test_a_stream_seeds_and_restores_every_generator(kind, monkeypatch):
    generator, other = torch.Generator().manual_seed(3), torch.Generator()
    if kind == "cpu":
        generator = torch.default_generator
    elif kind == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generator)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        found = (generator, other) if kind == "cuda" else (other, generator)
        monkeypatch.setattr(torch.cuda, "default_generators", found)
    outside = generator.get_state()

    def drawn(stream):
        with stream:
            return torch.rand(3, generator=generator).tolist()

    stream = Stream(1, "dropout")
    first, another, second = drawn(stream), drawn(Stream(2, "dropout")), drawn(stream)
    assert torch.equal(generator.get_state(), outside)
    assert len({*map(tuple, (first, another, second))}) == 3
    whole = Stream(1, "dropout")
    with whole:
        assert torch.rand(3, generator=generator).tolist() == first
        assert torch.rand(3, generator=generator).tolist() == second
