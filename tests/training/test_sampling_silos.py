"""Sampling: how many silos take part, which, and that the others' state stays as it is, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silotune.config import dump
from silotune.core.tensors import digest
from silotune.runs.build.builder import build
from silotune.runs.engines.in_process import InProcessEngine
from silotune.runs.storage.run_folder import RunFolder
from silotune.training.silo_sampling import SiloSampling
from tests.support.method_cases import every_case, logged, tapped


def choosing(seed: int = 1, **how: object) -> SiloSampling:
    return SiloSampling(seed, **how)


NAMES = [f"silo{number:02d}" for number in range(40)]


def test_a_fraction_is_the_exact_share_where_it_is_a_whole_number():
    for silos in range(1, 41):
        for wanted in range(1, silos + 1):
            assert len(choosing(fraction=wanted / silos).choose(1, NAMES[:silos])) == wanted
            assert len(choosing(count=wanted).choose(1, NAMES[:silos])) == wanted


@given(
    st.floats(1e-9, 1),
    st.integers(1, 40),
    st.integers(0, 2**31 - 1),
    st.integers(1, 1000),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_choice_is_a_subset_of_the_right_size_that_only_seed_and_round_decide(fraction, silos, seed, number, order):
    names = NAMES[:silos]
    chosen = choosing(seed, fraction=fraction).choose(number, names)
    assert 1 <= len(chosen) <= silos
    assert abs(len(chosen) - fraction * silos) < 1
    assert chosen == sorted(set(chosen) & set(names))
    shuffled = list(names)
    order.shuffle(shuffled)
    assert choosing(seed, fraction=fraction).choose(number, shuffled) == chosen
    coordinator = choosing(seed, fraction=fraction)
    coordinator.choose(number + 1, names)  # what was asked before does not matter
    assert coordinator.choose(number, names) == chosen


def test_without_sampling_all_silos_take_part():
    assert choosing().choose(3, NAMES[::-1]) == NAMES


@pytest.mark.parametrize("how", [{"count": 3}, {"fraction": 0.3}])
def test_rounds_and_seeds_choose_differently_and_every_silo_equally_often(how):
    rounds = 3000
    coordinator = choosing(7, **how)
    choices = [tuple(coordinator.choose(number, NAMES[:10])) for number in range(1, rounds + 1)]
    assert choices != [tuple(choosing(8, **how).choose(number, NAMES[:10])) for number in range(1, rounds + 1)]
    assert len(set(choices)) == 120  # all subsets of 3 out of 10 occur
    counts = Counter(name for chosen in choices for name in chosen)
    expected, deviation = rounds * 0.3, (rounds * 0.3 * 0.7) ** 0.5
    assert all(abs(counts[name] - expected) < 4.5 * deviation for name in NAMES[:10])


@every_case
def test_silos_not_sampled_keep_their_state_bit_for_bit(federate, case, tmp_path):
    federation = build(federate.config(case, "sampling.count=1", "rounds=3"), federate.backbone)
    folder = RunFolder.create(tmp_path / "run", dump(federation.config), federation.backbone.fingerprint)
    states = []

    def look(number: int, what: str, done: int, total: int) -> None:
        if what == "validation" or not states:
            states.append(
                {name: digest(silo.state.flat()) if silo.state else None for name, silo in federation.silos.items()}
            )

    with tapped() as wire:
        InProcessEngine(federation, folder, look).run()
    assert len(states) == 4
    assert set(states[0].values()) == {None}
    sampled = [event["silos"] for event in logged(folder.path, "round")]
    assert [len(silos) for silos in sampled] == [1, 1, 1]
    keeps = bool(federation.context.state_of(next(iter(federation.silos.values()))).flat())
    for number, silos in enumerate(sampled, start=1):
        if number == 3 and any(phase.when == "end" for phase in federation.context.phases):
            break  # phases at the end concern other silos too
        for name in federation.silos:
            if name not in silos:
                assert states[number][name] == states[number - 1][name]
            elif keeps:
                assert states[number][name] != states[number - 1][name]
        assert {silo for when, silo in wire.results if when == number} == set(silos)
    if federation.coordinator.communicates:
        assert [(number, [silo]) for number, silo, _ in wire.up] == list(enumerate(sampled, start=1))
    again = choosing(federation.config.seed, count=1)
    assert sampled == [again.choose(number, list(federation.silos)) for number in (1, 2, 3)]
