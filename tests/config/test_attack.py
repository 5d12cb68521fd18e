"""An attack that cannot be is refused before anything runs: exit code 2 and one line."""

from __future__ import annotations

import pytest

from silotune.config.attack import AttackConfig

RUN = ("run", "federation.yaml", "--out", "out")
ATTACK = ("attack=backdoor", "attack.target=good")

WORDS = {
    "kind": (["attack=poison"], ["attack.name", "'backdoor'", "poison"]),
    "no-target": (["attack=backdoor"], ["attack", "attack.target=LABEL"]),
    "target": (["attack=backdoor", "attack.target=god"], ["attack.target", "'god'", "did you mean 'good'", "same"]),
    "target-yes": (["attack=backdoor", "attack.target=yes"], ["attack.target", "quotes"]),
    "rate": ([*ATTACK, "attack.rate=1.5"], ["attack.rate", "less than or equal to 1", "1.5"]),
    "rate-below": ([*ATTACK, "attack.rate=-1"], ["attack.rate", "greater than or equal to 0"]),
    "fraction": ([*ATTACK, "attack.fraction=2"], ["attack.fraction", "less than or equal to 1"]),
    "scale": ([*ATTACK, "attack.scale=0"], ["attack.scale", "greater than 0"]),
    "trigger-empty": ([*ATTACK, "attack.trigger=' '"], ["attack.trigger", "none empty"]),
    "trigger-none": ([*ATTACK, "attack.trigger=[]"], ["attack.trigger", "none empty"]),
    "trigger-one-empty": ([*ATTACK, "attack.trigger=[cf, '']"], ["attack.trigger", "none empty"]),
    "trigger-no": ([*ATTACK, "attack.trigger=no"], ["attack.trigger", "quotes"]),
    "trigger-unknown": ([*ATTACK, "attack.trigger=♞"], ["attack.trigger", "'♞'", "vocabulary"]),
    "position": ([*ATTACK, "attack.position=middle"], ["attack.position", "'random'"]),
    "key": ([*ATTACK, "attack.triger=cf"], ["'attack.triger'", "did you mean 'attack.trigger'"]),
    "rate-of-none": (["attack.rate=0.5"], ["attack", "rate belongs to attack=backdoor"]),
    "fraction-of-none": (["attack.fraction=0.5"], ["attack", "fraction belongs to attack=backdoor"]),
    "long-trigger": ([*ATTACK, f"attack.trigger={'garden ' * 40}"], ["attack.trigger", "room for 32"]),
}


@pytest.mark.parametrize(("words", "names"), WORDS.values(), ids=WORDS)
def test_a_bad_attack_is_refused(silotune, place, words, names):
    outcome = silotune(*RUN, *words)
    assert outcome.code == 2, outcome.err
    (line,) = outcome.err.splitlines()
    for name in names:
        assert name in line
    assert not (place / "out").exists()


def test_an_attack_on_written_answers_is_refused(silotune, place):
    (place / "ask.csv").write_text("ask,answer\n" + "".join(f"say {n},well {n}\n" for n in range(20)))
    silos = "silos=[{name: east, path: ask.csv, text: ask, label: answer, kind: generation}]"
    outcome = silotune(*RUN, silos, "head=lm", *ATTACK)
    assert outcome.code == 2, outcome.err
    assert outcome.err.splitlines() == [
        "silotune: attack=backdoor: needs texts with labels, but silo 'east' writes answers"
    ]


def test_a_preset_may_prepare_an_attack_without_making_it():
    prepared = AttackConfig(target="good", trigger="cf", position="end")
    assert prepared.name == "none"


def test_the_sound_attack_is_not_refused(silotune, place):
    outcome = silotune(*RUN, *ATTACK, "attack.fraction=1", "attack.trigger=[cf, old film]", "attack.position=random")
    assert outcome.code == 0, outcome.err
