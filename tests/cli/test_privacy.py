"""`silotune privacy`: plans as a table and as JSON, and what it needs."""

from __future__ import annotations

import json

import pytest

from silotune.communication.privacy import plan
from tests.support.command_line import Silotune


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise by a formula in the place of privacy losses."""
    monkeypatch.setattr(plan, "noise_multiplier", lambda e, d, q, steps: (4 if q > 0.1 else 6) / e * q * steps**0.5)


def test_plans_at_one_epsilon(silotune: Silotune, tmp_path) -> None:
    shown = json.loads(silotune("privacy", "--units", 1000, "--epsilon", 1, "--json").out)
    assert [(one["rate"], one["steps"]) for one in shown["plans"] if one["proposed"]] == [(0.25, 20)]
    (of_head,) = [one for one in shown["plans"] if one["proposed_for_head"]]
    assert (of_head["rate"], of_head["steps"]) == (0.25, 120)
    assert of_head["head_lr"] == pytest.approx(0.055 * 1000 / (120 * of_head["noise"]))
    config = tmp_path / "run.yaml"
    config.write_text("preset: demo\nmethod: fedavg\nprivacy: {unit: row, epsilon: 1, units: 900}\n")
    said = silotune("privacy", config).out
    assert "proposed: privacy.rate=0.25, 20 noised steps" in said
    assert "privacy.rate=0.25, 120 steps, method.head_lr=" in said
    assert "1,000 units a silo, ε = 1" in said


@pytest.mark.parametrize("words", [("--units", 1000), ("--epsilon", 1), ("--units", 1000, "--epsilon", 0)])
def test_what_it_needs(silotune: Silotune, words) -> None:
    silotune("privacy", *words).refusal("--units 1000 --epsilon 8")
