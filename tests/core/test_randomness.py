"""Streams of random numbers on machines with an accelerator; here its generator stands in for it."""

from __future__ import annotations

import pytest
import torch

from silotune.core.randomness import Stream


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_stream_seeds_and_restores_the_accelerators_generator(kind, monkeypatch):
    generator, module = torch.Generator().manual_seed(3), getattr(torch, kind)
    monkeypatch.setattr(torch.cuda if kind == "cuda" else torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(module, "manual_seed", generator.manual_seed)
    monkeypatch.setattr(module, "get_rng_state", generator.get_state)
    monkeypatch.setattr(module, "set_rng_state", generator.set_state)
    outside = generator.get_state()

    def drawn(stream):
        with stream:
            return torch.rand(3, generator=generator).tolist()

    stream = Stream(1, "dropout")
    first, second = drawn(stream), drawn(stream)
    assert torch.equal(generator.get_state(), outside)
    assert first != second
    whole = Stream(1, "dropout")
    with whole:
        assert torch.rand(3, generator=generator).tolist() == first
        assert torch.rand(3, generator=generator).tolist() == second
    assert drawn(Stream(2, "dropout")) != first
