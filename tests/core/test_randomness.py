"""Streams of random numbers on machines with an accelerator; here its generator stands in for it."""

from __future__ import annotations

import pytest
import torch

from silotune.core.randomness import Stream


@pytest.mark.parametrize("kind", ["cuda", "second cuda", "mps"])
def test_a_stream_seeds_and_restores_the_accelerators_generator(kind, monkeypatch):
    generator, other = torch.Generator().manual_seed(3), torch.Generator()
    if kind == "mps":
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
    first, second = drawn(stream), drawn(stream)
    assert torch.equal(generator.get_state(), outside)
    assert first != second
    whole = Stream(1, "dropout")
    with whole:
        assert torch.rand(3, generator=generator).tolist() == first
        assert torch.rand(3, generator=generator).tolist() == second
    assert drawn(Stream(2, "dropout")) != first
