"""A secret's noise follows from its key alone, and the key is a format: names of classes do not enter it."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from silotune.communication.privacy.noise import Gaussian
from silotune.communication.uplink import make_pipeline
from silotune.config.uplink import UplinkConfig

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("steps", "key", "digest"),
    [
        (
            "clip,laplace,int8",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25)), Integers(most=127, stochastic=False))",
            "2e12ea52d3d86319f875ed47238fa4e6c23d6ad651fbefc1952072f596912409",
        ),
        (
            "clip,laplace,int4",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25)), Integers(most=7, stochastic=False))",
            "040bcc5d70f9f4afebd1dcf39a29ec1ad3615d9fa45cb4d4bac9118223c611ea",
        ),
        (
            "clip,laplace",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25)), None)",
            "478ff6f8a5bb9de8ef9b5b23b1f48dee1b8fcd471d599d92f79aa4c1a7e17947",
        ),
        ("fp16", "((), Half(draws=False))", None),
    ],
)
def test_key_and_bits_are_those_of_0_1_0(steps: str, key: str, digest: str | None) -> None:
    pipeline = make_pipeline(UplinkConfig(name=steps), 3, SECRET)
    assert pipeline.noise_key == key
    change = {"a/w": torch.arange(12.0).reshape(3, 4), "a/b": torch.ones(5)}
    written, _ = pipeline.send(change, {}, "north", 2)
    content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(written.items()))
    assert digest in (None, sha256(content).hexdigest())


def test_the_key_of_central_noise() -> None:
    assert repr(Gaussian(0.5)) == "Gaussian(deviation=0.5)"
