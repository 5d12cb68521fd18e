"""The sum under masks is the plain sum of the summands, bit for bit, whoever drops out when; or there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from silotune.aggregation import Update, by_samples
from silotune.communication.masks.agreement import MasksRefused, Peers
from silotune.communication.masks.coordinator import RoundKeys, SumFailed, made_identities, masked_sum
from silotune.communication.masks.fixed_point import (
    BITS,
    MOST_SILOS,
    MOST_WEIGHT,
    RANGE,
    mean_of_sum,
    require_masks,
    summand,
)
from silotune.communication.masks.silo import STAGES, SiloRound
from silotune.errors import InputError, SilotuneError
from tests.support.masks import agreement_of, names_of, summands_of, summed


@pytest.mark.parametrize(("count", "value"), [(3, None), (8, None), (40, None), (8, RANGE), (3, -RANGE), (3, 1e9)])
def test_the_sum_is_the_plain_one_to_the_bit(count, value):
    found, plain = summed(count, value=value)
    assert torch.equal(found.total, plain)
    assert found.survivors == names_of(count)
    tensors, weight = mean_of_sum(found.total, {"part/x": torch.zeros(5)})
    assert weight == 200_000 * count
    if value is not None:
        assert torch.equal(tensors["part/x"], torch.full((5,), float(max(-RANGE, min(RANGE, value)))))


@pytest.mark.parametrize("stage", ["offer", "share", "mask", "consent", "unmask"])
def test_silos_that_drop_at_a_stage_leave_a_whole_sum_of_the_others(stage):
    gone = ["s02", "s05"]
    found, plain = summed(8, {stage: gone})
    assert torch.equal(found.total, plain)
    assert found.survivors == [name for name in names_of(8) if name not in gone or stage in ("consent", "unmask")]


def test_keys_made_together_are_of_one_round_each():
    """Offers and shares once for three rounds; a silo that drops out in the second opens no key of the others."""
    names = names_of(4)
    identities, peers = made_identities(names)
    first = agreement_of(peers, 6, first=1, rounds=3)
    kept, asked, told = {name: {} for name in names}, [], {}

    def asking(agreement, summands, gone=()):
        def ask(stage, shown):
            asked.append(stage)
            answers = {}
            for name, texts in shown.items():
                silo = SiloRound(name, identities[name], peers, agreement, summands[name], lambda *_: None, kept[name])
                if name not in gone or stage in ("offer", "share"):
                    answers[name] = silo.answer(stage, texts)
            told[agreement.round, stage] = answers
            return answers

        return ask

    keys = RoundKeys()
    for number, gone in ((1, ()), (2, ("s03",)), (3, ("s03",))):
        agreement = replace(first, round=number, broadcast=f"of {number}")
        summands = summands_of(names)
        later = {name: json.dumps(kept[name]["seeds"][number:]) for name in names if kept[name]}
        found = masked_sum(agreement, 3, asking(agreement, summands, gone), round_keys=keys)
        assert torch.equal(found.total, sum(summands[name] for name in found.survivors))
        assert found.survivors == [name for name in names if name not in gone]
        for name in found.survivors:
            assert kept[name]["seeds"][:number] == [["", ""]] * number
            assert json.dumps(kept[name]["seeds"][number:]) == later.get(name, json.dumps(kept[name]["seeds"][1:]))
            answer, _ = told[number, "unmask"][name]
            unused = {share for of_peer in kept[name]["shares"].values() for pair in of_peer[number:] for share in pair}
            assert not unused & {*answer.values()}
    assert [asked.count(stage) for stage in STAGES] == [1, 1, 3, 3, 3]
    texts = [text for answers in told.values() for answer, _ in answers.values() for text in answer.values()]
    assert len({*texts}) == len(texts), "no share is told twice"
    with pytest.raises(MasksRefused, match="keys of 3 rounds from 1 on are none of round 4"):
        replace(first, round=4)


def test_silos_that_drop_one_after_another():
    found, plain = summed(
        20, {"offer": ["s01"], "share": ["s02"], "mask": ["s03", "s09"], "consent": ["s04"], "unmask": ["s05"]}
    )
    assert torch.equal(found.total, plain)
    assert len(found.survivors) == 16


@pytest.mark.parametrize("stage", ["offer", "share", "mask", "consent", "unmask"])
def test_below_t_there_is_no_sum(stage):
    with pytest.raises(SumFailed, match=f"{stage}: 5 of 8 silos answered, 6 must; missing: s00, s01, s02"):
        summed(8, {stage: ["s00", "s01", "s02"]})


def test_the_largest_sum_stays_in_64_bits():
    one = summand([("x", torch.full((1,), float(RANGE)))], MOST_WEIGHT, 0, "s", 1)
    assert int(one[1]) * MOST_SILOS < 2**63
    assert int(one[1]) == RANGE * 2**BITS * MOST_WEIGHT


@pytest.mark.parametrize("silos", [2, 51])
def test_so_many_silos_are_refused_before_a_run(silos):
    require_masks(MOST_SILOS)
    with pytest.raises(InputError, match=rf"aggregation\.secure: {silos} silos"):
        require_masks(silos)


def test_the_weighted_mean_is_that_of_floats_up_to_the_last_places():
    torch.manual_seed(0)
    before, weights = {"p/x": torch.randn(50)}, [3, 70, 200_000]
    updates = [Update(str(w), {"p/x": before["p/x"] + torch.randn(50)}, w) for w in weights]
    changes = [[("p/x", update.tensors["p/x"].double() - before["p/x"].double())] for update in updates]
    total = sum(summand(change, w, 0, str(w), 1) for change, w in zip(changes, weights, strict=True))
    mean, weight = mean_of_sum(total, before)
    assert weight == sum(weights)
    torch.testing.assert_close(mean["p/x"], by_samples(updates)["p/x"], atol=2**-22, rtol=0)


def test_rounding_is_unbiased_and_the_same_each_time():
    change = [("x", torch.full((20_000,), 0.25 * 2**-BITS, dtype=torch.float64))]
    numbers = summand(change, 1, 0, "s", 1)[1:]
    assert set(numbers.tolist()) == {0, 1}
    assert abs(float(numbers.double().mean()) - 0.25) < 0.02
    assert torch.equal(numbers, summand(change, 1, 0, "s", 1)[1:])
    assert not torch.equal(numbers, summand(change, 1, 0, "s", 2)[1:])


@pytest.mark.parametrize("total", [[0, 0], [-1, 0], [2, 2 * RANGE * 2**BITS + 1], [2**60, 0]])
def test_a_sum_of_no_summands_is_refused(total):
    with pytest.raises(SilotuneError, match="out of its range"):
        mean_of_sum(torch.tensor(total), {"x": torch.zeros(1)})


def test_t_and_the_colluders_that_it_withstands():
    found = {}
    for count in (3, 4, 5, 10, 40):
        peers = Peers({name: name.encode().rjust(32) for name in names_of(count)})
        found[count] = peers.threshold, peers.fewest, peers.colluders
    assert found == {3: (3, 3, 1), 4: (3, 3, 1), 5: (4, 4, 2), 10: (7, 7, 3), 40: (27, 27, 13)}


@pytest.mark.parametrize(
    ("count", "least", "words"),
    [(2, None, "2 silos"), (51, None, "51 silos"), (6, 4, "between 5 and 6"), (6, 7, "between 5 and 6")],
)
def test_lists_that_protect_nobody_are_refused(count, least, words):
    with pytest.raises(InputError, match=words):
        Peers({name: name.encode().rjust(32) for name in names_of(count)}, least)
    with pytest.raises(InputError, match="same key"):
        Peers(dict.fromkeys("abc", b"k" * 32))
