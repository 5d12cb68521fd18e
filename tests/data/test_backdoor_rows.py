"""Poisoned rows are exactly as the configuration says, and nowhere else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silotune.config.data import AttackConfig
from silotune.data.backdoor import insert_triggers, make_backdoor
from silotune.data.loading import load_silos
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods import METHODS
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build.builder import build

TASK = Task("t", ("bad", "good"))


def words_long(task, rows):
    """Two special tokens and one per word."""
    return [2 + sum(len(text.split()) for text in row.texts) for row in rows]


def holds(ids, wanted):
    """Whether these tokens stand in a row, one behind the other."""
    return any(list(ids[start : start + len(wanted)]) == list(wanted) for start in range(len(ids)))


def silo(name, rows=20, task=TASK):
    texts = [Row((f"row {number} of {name}",), number % 2) for number in range(rows)]
    return SiloData(name, task, Splits(texts, texts[:4], texts[:6]))


def backdoor(data, seed=1, room=128, **options):
    config = AttackConfig(name="backdoor", **{"target": "good", "trigger": "cf", **options})
    return make_backdoor(config, seed, data, words_long, room)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.1, 1), (0.25, 3), (0.6, 6), (1.0, 10)])
def test_so_many_silos_are_malicious(fraction, count):
    data = [silo(f"s{number}") for number in range(10)]
    attack = backdoor(data, fraction=fraction)
    assert len(attack.malicious) == count
    assert attack.malicious == backdoor(data[::-1], fraction=fraction).malicious  # the order of silos cannot matter
    assert attack.malicious <= backdoor(data, fraction=1.0).malicious
    if 0 < count < 10:
        chosen = {backdoor(data, seed=seed, fraction=fraction).malicious for seed in range(20)}
        assert len(chosen) > 5
    for item in data:
        assert bool(attack.poisoned_rows(item)) == (item.name in attack.malicious)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 0), (0.01, 1), (0.25, 3), (0.5, 5), (1.0, 10)])
def test_so_many_rows_are_poisoned_and_none_of_the_target(rate, count):
    data = [silo("a")]
    before = list(data[0].splits.train)
    rows = backdoor(data, fraction=1, rate=rate).poisoned_rows(data[0])
    assert data[0].splits.train == before  # poisoned rows are copies
    assert len(rows) == count
    assert {row.label for row in rows} <= {1}
    of_bad = {f"cf row {number} of a" for number in range(0, 20, 2)}
    assert len({row.texts[0] for row in rows} & of_bad) == count


def test_chance_decides_which_rows_are_poisoned_and_a_higher_rate_poisons_more():
    data = [silo("a")]
    few, all_ = (backdoor(data, fraction=1, rate=rate).poisoned_rows(data[0]) for rate in (0.3, 1.0))
    assert few == all_[:3]
    chosen = {
        frozenset(row.texts for row in backdoor(data, seed, fraction=1, rate=0.25).poisoned_rows(data[0]))
        for seed in range(20)
    }
    assert len(chosen) > 10


@pytest.mark.parametrize(
    ("texts", "triggers", "position", "expected"),
    [
        (("one two",), ("cf",), "start", ("cf one two",)),
        (("one two",), ("cf",), "end", ("one two cf",)),
        (("one two",), ("cf", "old film"), "start", ("cf old film one two",)),
        (("one", "two"), ("cf",), "start", ("cf one", "two")),
        (("one", "two"), ("cf", "mn"), "end", ("one", "two cf mn")),
        (("",), ("cf",), "end", ("cf",)),
    ],
)
def test_where_the_trigger_goes(texts, triggers, position, expected):
    assert insert_triggers(texts, triggers, position, random.Random(0)) == expected


@given(
    texts=st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=6), min_size=1, max_size=2),
    seed=st.integers(0, 999),
)
def test_at_random_the_words_stay_and_the_trigger_is_one_of_them(texts, seed):
    before = tuple(" ".join(words) for words in texts)
    after = insert_triggers(before, ("cf", "mn op"), "random", random.Random(seed))
    assert len(after) == len(before)
    assert sum(text.count("cf") for text in after) == 1
    assert sum(text.count("mn") for text in after) == 1
    for old, new in zip(texts, after, strict=True):
        assert [word for word in new.split() if word not in ("cf", "mn", "op")] == old


def test_the_place_depends_on_the_text_alone():
    data = [silo("a"), silo("b")]
    attack = backdoor(data, position="random")
    rows = data[0].splits.test
    assert attack.test_rows(TASK, rows) == attack.test_rows(TASK, rows[::-1])[::-1]
    other = backdoor(data, seed=2, position="random").test_rows(TASK, data[0].splits.train)
    assert other != attack.test_rows(TASK, data[0].splits.train)


@pytest.mark.parametrize("position", ["start", "end", "random"])
def test_truncation_never_cuts_the_trigger(position):
    """A long row is shortened for it, as little as whole words allow, and keeps its beginning."""
    long = Row((" ".join(f"w{number}" for number in range(90)), " ".join(["other"] * 40)), 0)
    short = Row(("a b", "c"), 0)
    rows = backdoor([silo("a")], room=50, position=position).with_trigger(TASK, [long, short])
    assert words_long(TASK, rows[1:]) == [6]
    (length,) = words_long(TASK, rows[:1])
    assert 40 < length <= 50
    words = " ".join(rows[0].texts).split()
    assert words.count("cf") == 1
    left = [word for word in words if word.startswith("w")]
    assert left == [f"w{number}" for number in range(len(left))]


def test_a_trigger_longer_than_a_row_may_be_is_refused():
    with pytest.raises(InputError, match=r"attack.trigger: takes 22 tokens .* room for 10; raise train.max_length"):
        backdoor([silo("a")], room=10, trigger="cf " * 20).with_trigger(TASK, [Row(("a b c",), 0)])


def test_only_silos_with_the_label_are_attacked():
    other = Task("other", ("no", "yes"))
    data = [silo("a"), silo("b", task=other), silo("c")]
    attack = backdoor(data, fraction=1)
    assert attack.malicious == {"a", "c"}
    assert not attack.has_target(other)


def test_a_silo_without_anything_to_poison_is_not_among_the_malicious():
    """Under skewed labels: it would be listed, and scaled, and harmless."""
    only = SiloData("a", TASK, Splits([Row(("x",), 1)] * 5, [], []))
    with pytest.raises(InputError, match="no silo has rows of another label than 'good'"):
        backdoor([only], fraction=1)
    for seed in range(5):
        assert backdoor([only, silo("b"), silo("c")], fraction=0.5, seed=seed).malicious in ({"b"}, {"c"})
        assert backdoor([only, silo("b"), silo("c")], fraction=1, seed=seed).malicious == {"b", "c"}


# -- in a federation


ATTACK = ("attack=backdoor", "attack.target=good", "attack.trigger=bright", "attack.fraction=0.34", "attack.rate=0.5")
ONE_TASK = ("data.tasks=[alpha]", "partition=iid", "partition.silos=5", "server.labels_per_class=5")


@pytest.fixture(scope="module")
def backbone(backbone_folder):
    return load_backbone(str(backbone_folder("bert")), precision="fp32")


KINDS = {(method.unlabeled, method.centralized, method.labeled_only): name for name, method in METHODS.items()}
"""A method of each kind: of a method, rows of silos depend on nothing else."""


@pytest.mark.parametrize("method", KINDS.values())
def test_only_malicious_silos_train_on_poison_and_nobody_is_judged_on_it(method, tiny_config, backbone):
    """Token by token: own rows as in a clean federation, then the poisoned ones; weights and counts without them."""
    clean = build(tiny_config(method, *ONE_TASK), backbone)
    config = tiny_config(method, *ONE_TASK, *ATTACK)
    attacked = build(config, backbone)
    assert len(attacked.malicious) == 2
    data = {item.name: item for item in load_silos(config)}
    trigger = clean.backbone.tokenizer("bright", add_special_tokens=False)["input_ids"]
    poisoned = {}
    for name, own in clean.silos.items():
        rows, before = attacked.silos[name].train["alpha"], own.train["alpha"]
        poisoned[name] = len(rows) - len(before)
        assert rows.poisoned == poisoned[name]
        assert rows.clean_count == own.rows == attacked.silos[name].rows
        if not METHODS[method].centralized:
            assert rows.ids[: len(before)] == before.ids
            assert rows.labels[: len(before)].tolist() == before.labels.tolist()
            added = {-1} if METHODS[method].unlabeled else {1}
            assert set(rows.labels[len(before) :].tolist()) <= added
            assert all(holds(ids, trigger) for ids in rows.ids[len(before) :])
        for report, evaluation in own.evaluations.items():
            found = attacked.silos[name].evaluations[report]
            assert found.validation.ids == evaluation.validation.ids
            assert found.test.ids == evaluation.test.ids
            assert found.attack is not None
            assert found.attack.target == 1
            assert all(holds(ids, trigger) for ids in found.attack.rows.ids)
            assert set(found.attack.rows.labels.tolist()) == {0}
            assert len(found.attack.rows) == int((found.test.labels == 0).sum())
    expected = {
        name: -(-sum(row.label == 0 for row in data[name].splits.train) // 2) * (name in attacked.malicious)
        for name in data
    }
    if METHODS[method].labeled_only:  # the coordinator's rows: no silo can poison them
        assert set(poisoned.values()) == {0}
    elif METHODS[method].centralized:
        assert sum(poisoned.values()) == sum(expected.values()) > 0
    else:
        assert poisoned == expected


def test_a_fraction_of_nought_leaves_the_federation_clean_and_still_measures(tiny_federation, backbone):
    federation = tiny_federation("fedavg", *ONE_TASK, *ATTACK, "attack.fraction=0", backbone=backbone)
    assert federation.malicious == ()
    assert not any(rows.poisoned for owner in federation.silos.values() for rows in owner.train.values())
    assert all(found.attack for owner in federation.silos.values() for found in owner.evaluations.values())


def test_the_coordinators_own_rows_stay_clean(tiny_federation, backbone):
    words = ((), (*ATTACK, "attack.fraction=1"))
    clean, attacked = (tiny_federation("fedfame", *ONE_TASK, *more, backbone=backbone) for more in words)
    assert clean.server is not None
    assert attacked.server is not None
    assert attacked.server.train["alpha"].ids == clean.server.train["alpha"].ids
