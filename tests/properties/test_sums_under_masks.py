"""A round under masks is the round without them up to the last places, for every method that averages; or refused."""

from __future__ import annotations

import pytest
import torch

from silotune.config.coordinator import SUMS
from silotune.errors import Diverged, InputError
from silotune.methods import METHODS, Setting
from silotune.models.heads import HEADS
from silotune.models.tuners import TUNERS
from silotune.runs.build import coordinator
from silotune.runs.storage.readers import events
from tests.support.method_cases import CASES, every_case, read_message, same, tapped

SECURE = "aggregation.secure=true"


def averages(case: str) -> bool:
    """Whether the coordinator of a case needs no more than the weighted sum of the updates."""
    chosen = CASES[case]
    method = METHODS[chosen.method](Setting(TUNERS["lora"](), HEADS["mlp"]()))
    words = (f"aggregation={method.defaults.get('aggregation', 'uniform')}", *chosen.overrides)
    name = next(word.partition("=")[2] for word in reversed(words) if word.startswith("aggregation="))
    ranks = any(word.startswith("tuner.ranks") for word in words)
    return name in SUMS and not method.aggregations_of_parts and not ranks and not method.centralized


def test_at_least_twenty_ordinary_configurations_are_sums():
    assert sum(map(averages, CASES)) >= 20


@every_case
def test_a_round_under_masks_is_the_plain_one_or_refused(federate, reference, case, tmp_path):
    if not averages(case):
        with pytest.raises(InputError, match="secure"):
            federate.run(case, tmp_path / "run", SECURE)
        return
    plain, before = reference(case)
    with tapped() as wire:
        masked = federate.run(case, tmp_path / "run", SECURE)
    silos = len(plain.federation.silos)
    (tensors, _), (expected, _) = (read_message(each.down[silos]) for each in (wire, before))
    torch.testing.assert_close(tensors, expected, atol=1e-5, rtol=1e-5)  # the second round's broadcast
    assert not wire.up, "the coordinator reads no single update"
    assert masked.summary["best_round"] == plain.federation.config.rounds


def test_under_masks_a_run_resumes_to_the_same_bits(federate, tmp_path):
    """Though masks are drawn anew; and events say which silos took part, and what it weighed."""
    whole = federate.run("fedit", tmp_path / "whole", SECURE, "aggregation=samples")

    def stop(number, *_):
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federate.run("fedit", tmp_path / "run", SECURE, "aggregation=samples", progress=stop)
    resumed = federate.run("fedit", tmp_path / "run", SECURE, "aggregation=samples", resume=True)
    tensors = ("state_sha256", "shared_sha256", "silos", "best_round")
    assert [same(resumed.summary)[key] for key in tensors] == [same(whole.summary)[key] for key in tensors]
    sizes = [event for event in events(tmp_path / "whole") if event["event"] == "silo"]
    numbers = whole.federation.coordinator.summand_length(1)
    assert all(8 * numbers < event["bytes_up"] < 8 * numbers + 5000 for event in sizes)
    first, second = ([event["bytes_up"] for event in sizes if event["round"] == number] for number in (1, 2))
    assert max(second) < min(first), "keys of all rounds are made together"


def test_a_weight_that_a_sum_has_no_room_for_is_refused_before_a_run(federate, tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "MOST_WEIGHT", 3)
    with pytest.raises(InputError, match=r"aggregation\.secure: a silo's weight is \d+, and sums hold at most 3"):
        federate.run("fedit", tmp_path / "run", SECURE, "aggregation=samples")


def test_with_noise_on_rows_masks_compose(federate, tmp_path):
    noise = ("privacy.unit=row", "privacy.epsilon=8", "uplink=none", "rounds=1")
    masked = federate.run("fedit", tmp_path / "masked", SECURE, *noise)
    plain = federate.run("fedit", tmp_path / "plain", *noise)
    assert masked.summary["privacy"] == plain.summary["privacy"]


def test_a_silo_that_diverged_ends_the_run_where_too_few_are_left(federate, tmp_path):
    with tapped(spoil=_diverge), pytest.raises(Diverged, match="training diverged, and a sum under masks is of 3"):
        federate.run("fedit", tmp_path / "run", SECURE)


def _diverge(result, context):
    if not hasattr(context, "spoiled"):
        context.spoiled = True
        next(iter(result.state["global"].values())).fill_(torch.nan)
