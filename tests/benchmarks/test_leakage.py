"""The attacks of `python -m benchmarks leakage` find what they look for where nothing protects a silo's rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.leakage import ATTACKS, equal_messages, last_batch, least_squares, low_bits, measure, two_runs
from benchmarks.leakage.one_silo import SETTING, private
from silotune.communication.privacy import noise
from silotune.communication.uplink import pipeline
from silotune.training import noised_steps
from silotune.training.noised_steps import NoisedSteps

WORDS = [word for word in SETTING if not word.startswith(("method=", "data.tasks"))]

ONE_HEAD = (*WORDS, "data.tasks=[alpha]", "head.scope=shared")


def test_attacks_are_listed():
    assert measure(list=True) == ATTACKS


def test_the_difference_of_two_runs_is_a_batch(tiny_federation):
    found = two_runs.attack(*(tiny_federation("fedavg", *WORDS, f"train.steps={steps}") for steps in (5, 6)), 60)
    assert found["cosine"] > 0.9


def test_a_last_batch_of_one_row_tells_it(tiny_federation):
    found = last_batch.attack(tiny_federation("fedavg", *WORDS, "train.steps="), 57, 6)
    assert found["least cosine"] > 0.9


@pytest.mark.long
def test_known_orders_tell_rows_and_a_secret_one_does_not(tiny_federation):
    known = tiny_federation("fedavg", *WORDS, "train.steps=")
    secret = tiny_federation("fedavg", *WORDS, "train.steps=")
    secret.context.draw_seed = 7
    assert least_squares.attack(known, 60, 120)["median cosine"] > 0.9
    assert least_squares.attack(secret, 60, 120)["median cosine"] < 0.3


def _float_noise(self, number, total, deviation, grid):
    """Noise as it was: added in float32, of which the low bits tell the sum."""
    return {
        name: (tensor * grid).float()
        + (deviation * torch.special.ndtri(self._stream.uniform("old", name, tuple(tensor.shape)))).float()
        for name, tensor in total.items()
    }


@pytest.mark.parametrize("sure", [False, True])
def test_low_bits_tell_a_row_in_floating_point_and_not_in_whole_numbers(tiny_federation, monkeypatch, sure):
    """By ε = 1 a tenth of false alarms finds 0.27 at most; all games are far above it."""
    adapter = "tuner=lora", "tuner.r=32", "tuner.alpha=512"  # of few numbers, or small ones, none may tell
    words = *ONE_HEAD, *adapter, "train.steps=1", "train.batch_size=8", "train.lr=1", *private(1)
    found = low_bits.attack(tiny_federation("fedavg", *words), sure, 8, 6)["found"]
    monkeypatch.setattr(NoisedSteps, "_noised", _float_noise)
    monkeypatch.setattr(noised_steps, "grid_of", lambda bound, _: bound * 2.0**-30)  # finer than float32
    assert found <= 0.5
    assert low_bits.attack(tiny_federation("fedavg", *words), sure, 8, 6)["found"] == 1


def test_equal_changes_have_unequal_messages(tiny_federation, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    noised = "uplink=clip,laplace", "uplink.clip=1", "uplink.epsilon=1", f"privacy.secret={secret}"
    federation = tiny_federation("fedavg", *ONE_HEAD, "rounds=1", "train.steps=2", *noised)
    assert [equal_messages.attack(federation, rare) for rare in (0, 1)] == [0, 0]
    by_change = noise.noise_stream_for
    monkeypatch.setattr(pipeline, "noise_stream_for", lambda *words: by_change(*words[:6]))
    assert [equal_messages.attack(federation, rare) for rare in (0, 1)] == [1, 0]
