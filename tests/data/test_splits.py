"""From published rows to a silo's splits: nothing is lost, nothing is in two places, everything follows the seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silotune import InputError
from silotune.data.loading import SplitRule, split
from silotune.data.rows import Row, SiloData, Splits, check_silo
from silotune.data.tasks import Task

MERGE = SplitRule(merge=True)


def rows(prefix: str, count: int) -> list[Row]:
    return [Row((f"{prefix} {i}",), i % 2) for i in range(count)]


def published(train: int, validation: int = 0, test: int = 0) -> Splits:
    return Splits(rows("train", train), rows("validation", validation), rows("test", test))


def texts(found: list[Row]) -> list[str]:
    return [row.texts[0] for row in found]


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.validation), len(splits.test)


class TestMerged:
    """6:2:2 of train and validation together (FedMCP)."""

    @pytest.mark.parametrize(
        ("there", "expected"),
        {
            667: (400, 133, 134),  # contract
            4076: (2446, 815, 815),  # MRPC: 2445.6, 815.2, and the rest
            5: (3, 1, 1),
        }.items(),
    )
    def test_sizes(self, there: int, expected: tuple[int, int, int]) -> None:
        assert sizes(split(published(there), MERGE, 1, "a")) == expected

    def test_the_cap_comes_before_the_split(self) -> None:
        rule = SplitRule(merge=True, rows_per_silo=667)
        assert sizes(split(published(3000, 1000), rule, 1, "a")) == (400, 133, 134)

    def test_a_published_test_split_is_not_thrown_away_in_silence(self) -> None:
        with pytest.raises(InputError, match=r"'a': data.merge=true would throw its test split away.*data.merge=false"):
            split(published(50, 50, 50), MERGE, 1, "a")

    def test_rows_of_both_splits_are_mixed(self) -> None:
        """Each part has about as many of train as all of it together: 1:1, within four standard deviations."""
        splits = split(published(500, 500), MERGE, 1, "a")
        for part in (splits.train, splits.validation, splits.test):
            from_train = sum(text.startswith("train") for text in texts(part))
            assert abs(from_train - len(part) / 2) < 4 * (len(part) / 4) ** 0.5

    @given(
        train=st.integers(0, 120),
        validation=st.integers(0, 60),
        cap=st.none() | st.integers(10, 150),
        seed=st.integers(0, 9),
    )
    def test_rows_are_conserved(self, train: int, validation: int, cap: int | None, seed: int) -> None:
        there = published(train, validation)
        total = min(train + validation, cap or train + validation)
        try:
            splits = split(there, SplitRule(merge=True, rows_per_silo=cap), seed, "a")
        except InputError:
            assert total < 4
            return
        assert sum(sizes(splits)) == total
        given_rows = Counter(texts(there.train + there.validation))
        assert Counter(texts(splits.train + splits.validation + splits.test)) <= given_rows
        assert max(given_rows.values()) == 1

    @pytest.mark.parametrize("count", range(4))
    def test_too_few_rows(self, count: int) -> None:
        with pytest.raises(InputError, match=f"silo 'a': {count} rows are too few to split 0.6:0.2:0.2"):
            split(published(count), MERGE, 1, "a")

    def test_each_part_can_be_capped_behind_the_split(self) -> None:
        rule = SplitRule(merge=True, train_rows=7, validation_rows=5, test_rows=3)
        whole, capped = split(published(100), MERGE, 1, "a"), split(published(100), rule, 1, "a")
        assert sizes(capped) == (7, 5, 3)
        for name in ("train", "validation", "test"):
            assert set(texts(getattr(capped, name))) <= set(texts(getattr(whole, name)))


class TestReady:
    """Splits as published."""

    def test_they_stay_what_they_are(self) -> None:
        splits = split(published(30, 20, 10), SplitRule(), 1, "a")
        assert sorted(texts(splits.train)) == sorted(texts(rows("train", 30)))
        assert sorted(texts(splits.validation)) == sorted(texts(rows("validation", 20)))
        assert sorted(texts(splits.test)) == sorted(texts(rows("test", 10)))

    def test_each_is_capped_and_a_cap_of_the_silo_caps_its_training_rows(self) -> None:
        rule = SplitRule(train_rows=15, validation_rows=8, test_rows=4)
        splits = split(published(30, 20, 10), rule, 1, "a")
        assert sizes(splits) == (15, 8, 4)
        for name in ("train", "validation", "test"):
            assert all(text.startswith(name) for text in texts(getattr(splits, name)))
        assert sizes(split(published(30, 20, 10), SplitRule(rows_per_silo=12), 1, "a")) == (12, 20, 10)

    def test_a_cap_takes_a_random_choice(self) -> None:
        """Not the head of the file, which may be sorted by label."""
        splits = split(published(1000, 10, 10), SplitRule(train_rows=100), 1, "a")
        numbers = [int(text.split()[1]) for text in texts(splits.train)]
        assert 400 < sum(numbers) / 100 < 600

    def test_a_missing_validation_split_is_cut_from_the_rest_of_train(self) -> None:
        rule = SplitRule(train_rows=200, validation_rows=200, test_rows=500)
        splits = split(published(4500, 0, 1500), rule, 1, "hate")
        assert sizes(splits) == (200, 200, 500)
        assert not set(texts(splits.train)) & set(texts(splits.validation))
        assert all(text.startswith("train") for text in texts(splits.validation))
        assert all(text.startswith("test") for text in texts(splits.test))

    def test_the_validation_cut_does_not_change_the_training_rows(self) -> None:
        small = split(published(4500, 0, 10), SplitRule(train_rows=200, validation_rows=50), 1, "a")
        large = split(published(4500, 0, 10), SplitRule(train_rows=200, validation_rows=500), 1, "a")
        assert small.train == large.train
        assert small.validation == large.validation[:50]

    @pytest.mark.parametrize("cap", [None, 95, 100, 1000])
    def test_where_nothing_is_left_a_tenth_is_cut(self, cap: int | None) -> None:
        splits = split(published(100, 0, 10), SplitRule(train_rows=cap), 1, "a")
        assert sizes(splits) == (90, 10, 10)
        assert len(set(texts(splits.train + splits.validation))) == 100

    def test_without_test_the_validation_split_serves_as_test(self) -> None:
        splits = split(published(100, 40), SplitRule(), 1, "a")
        assert sizes(splits) == (90, 10, 40)
        assert sorted(texts(splits.test)) == sorted(texts(rows("validation", 40)))
        assert all(text.startswith("train") for text in texts(splits.validation))

    def test_with_neither_it_is_refused(self) -> None:
        with pytest.raises(InputError, match="silo 'a': the data set has neither a test nor a validation split"):
            split(published(100), SplitRule(), 1, "a")

    @given(
        train=st.integers(2, 80),
        validation=st.integers(0, 40),
        test=st.integers(0, 40),
        caps=st.tuples(*[st.none() | st.integers(1, 60)] * 4),
    )
    def test_no_row_is_in_two_places(
        self, train: int, validation: int, test: int, caps: tuple[int | None, ...]
    ) -> None:
        if not validation and not test:
            return
        rule = SplitRule(rows_per_silo=caps[0], train_rows=caps[1], validation_rows=caps[2], test_rows=caps[3])
        splits = split(published(train, validation, test), rule, 3, "a")
        everything = texts(splits.train + splits.validation + splits.test)
        assert len(everything) == len(set(everything))
        for size, cap in zip(sizes(splits), caps[1:], strict=True):
            assert size >= 1
            assert cap is None or size <= cap


class TestSeed:
    def test_another_seed_or_silo_gives_others(self) -> None:
        base = split(published(100), MERGE, 5, "a")
        assert set(texts(split(published(100), MERGE, 6, "a").train)) != set(texts(base.train))
        assert set(texts(split(published(100), MERGE, 5, "b").train)) != set(texts(base.train))

    def test_what_was_given_is_not_shuffled_in_place(self) -> None:
        there = published(20, 20, 20)
        split(there, SplitRule(), 1, "a")
        assert there == published(20, 20, 20)


class TestCheck:
    def silo(self, **splits: list[Row]) -> SiloData:
        return SiloData("a", Task("t", ("bad", "good")), Splits(**splits))

    def test_no_rows(self) -> None:
        with pytest.raises(InputError, match="silo 'a': no training rows"):
            check_silo(self.silo(test=rows("t", 2)))
        with pytest.raises(InputError, match="silo 'a': no test rows"):
            check_silo(self.silo(train=rows("t", 2)))
