"""Numbers that are 0 or infinite in tensors are refused by their key, before anything is trained."""

from __future__ import annotations

import pytest

from silotune.errors import InputError
from silotune.runs.build.resolve import make_method, read_config


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("server.tau", ["server.optimizer=adam", "server.tau=1e-46"]),
        ("server.lr", ["server.optimizer=avgm", "server.lr=1e39"]),
        ("train.lr", ["train.lr=1e-60"]),
        ("method.mu", ["method=fedprox", "method.mu=1e-50"]),
        ("tuner.alpha", ["tuner=lora", "tuner.alpha=1e39"]),
        ("uplink.clip", ["uplink=clip", "uplink.clip=1e-300"]),
    ],
)
def test_a_number_that_float32_cannot_hold_is_refused_by_its_key(key, words):
    with pytest.raises(InputError, match=f"{key}: float32 cannot hold it"):
        make_method(read_config("demo", words))


@pytest.mark.parametrize("words", [["server.optimizer=adam", "server.tau=1e-30"], ["method=fedprox", "method.mu=0"]])
def test_small_numbers_and_zeros_that_mean_something_are_taken(words):
    assert make_method(read_config("demo", words))
