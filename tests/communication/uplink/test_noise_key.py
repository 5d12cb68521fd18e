"""A secret's noise follows from its key alone, and the key is a format: names of classes do not enter it."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch

from silotune.communication.privacy.noise import CentralNoise, noise_stream_for
from silotune.communication.uplink import make_pipeline
from silotune.config.uplink import UplinkConfig

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("steps", "key", "digest"),
    [
        (
            "clip,laplace,int8",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25, bound=1.0)), Integers(most=127, stochastic=False))",
            "0f45f7f6336767b04629400470a875d657a629abf427842305262ca830950dc8",
        ),
        (
            "clip,laplace,int4",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25, bound=1.0)), Integers(most=7, stochastic=False))",
            "628194f4600389f12d089411a92b35bf04e4807fcd25095cafbdc3512a8be3f1",
        ),
        (
            "clip,laplace",
            "((Clip(bound=1.0, norm='l1'), Laplace(scale=0.25, bound=1.0)), None)",
            "a1c21385677b536babd84526ad940d7d083c708397483ed9ce556454e61b40a2",
        ),
        ("fp16", "((), Half(draws=False))", None),
    ],
)
def test_key_and_bits_are_a_format(steps: str, key: str, digest: str | None) -> None:
    pipeline = make_pipeline(UplinkConfig(name=steps), 3, SECRET)
    assert pipeline.noise_key == key
    change = {"a/w": torch.arange(12.0).reshape(3, 4), "a/b": torch.ones(5)}
    written, _ = pipeline.send(change, {}, "north", 2)
    content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(written.items()))
    assert digest in (None, sha256(content).hexdigest())


def test_the_key_covers_the_question_and_the_change() -> None:
    """What was asked (`training.row_privacy.question`) alone, and the change alone, make another noise."""
    change = {"a/w": torch.zeros(200)}
    streams = {
        noise_stream_for(3, SECRET, "north", 2, values, how, asked).word
        for values in (change, {"a/w": torch.ones(200)})
        for how in ("strong", "weak")
        for asked in ("one", "another")
    }
    assert len(streams) == 8
    pipeline = make_pipeline(UplinkConfig(name="clip,gaussian"), 3, SECRET)
    one, other, again = (pipeline.send(change, {}, "north", 2, asked)[0]["a/w"] for asked in ("a", "b", "a"))
    assert torch.equal(one, again)
    assert not torch.isclose(one, other).any()


def test_the_key_of_central_noise_covers_run_and_broadcast() -> None:
    found = []
    for run, start in (("one", 0.0), ("other", 0.0), ("one", 1.0)):
        before = {"a/w": torch.full((200,), start)}
        found.append(CentralNoise(1.0, 1.0, 2, 3, SECRET, run)(before, [], 1)["a/w"] - start)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.isclose(found[one], found[other]).any()
