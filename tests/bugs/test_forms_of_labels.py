"""Labels that differ in form are one class and a warning; those that differ in spelling are refused across silos."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from silotune.config import SiloConfig
from silotune.config.tables import keep
from silotune.data.own_silos import own_sets
from silotune.data.row_checks import describe_rows, row_warnings
from silotune.data.rows import SiloData
from silotune.errors import InputError

COMPOSED, APART = "tốt", unicodedata.normalize("NFD", "tốt")


def read(*silos: list[Any], **keys: Any) -> tuple[tuple[str, ...], str]:
    """Return the labels of silos of one task, and the warnings about their rows."""
    entries = [
        SiloConfig(
            name=f"s{place}",
            path=keep([{"text": f"text {place} {n}", "label": label} for n, label in enumerate(labels)], "rows"),
            task="t",
            **keys,
        )
        for place, labels in enumerate(silos)
    ]
    sets = own_sets(entries, None)
    data = [SiloData(name, found.task, found.splits) for name, found in sets.items()]
    return data[0].task.labels, "\n".join(line for silo in data for line in row_warnings(silo, describe_rows(silo)))


@pytest.mark.parametrize(
    ("first", "second", "labels", "remark"),
    [
        (["0", "1"], ["0.0", "1.0"], ("0", "1"), "the label '1.0' is read as '1'"),
        ([0, 1], ["0", "1.00"], ("0", "1"), "the label '1.00' is read as '1'"),
        ([True, False], ["True", "False"], ("false", "true"), "the label 'True' is read as 'true'"),
        ([COMPOSED, "no"], [APART, "no"], ("no", COMPOSED), f"the label {APART!a} is read as {COMPOSED!a}"),
    ],
)
def test_forms_of_a_label_are_one_class(
    first: list[Any], second: list[Any], labels: tuple[str, ...], remark: str
) -> None:
    for silos in ([first, second], [second, first], [first * 2, second, first]):
        found, warnings = read(*silos)
        assert found == labels
        assert f"1 rows: {remark}" in warnings
    if type(first[0]) is not bool:  # truth values of JSON and texts in one column are refused
        found, warnings = read([*first, *second])
        assert found == labels
        assert remark in warnings


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["Pos", "neg"], ["pos", "neg"]),
        (["01", "2"], ["1", "2"]),
        (["not ok", "ok"], ["not_ok", "ok"]),
        (["true", "maybe"], ["True", "maybe"]),
    ],
)
def test_spellings_are_refused_until_the_labels_are_named(first: list[str], second: list[str]) -> None:
    for silos in ([first, second], [second, first]):
        with pytest.raises(InputError) as refusal:
            read(*silos)
        assert all(repr(label) in str(refusal.value) for label in (first[0], second[0]))
        found, warnings = read(*silos, labels=first)
        assert found == tuple(first)
        assert f"1 rows: the label {second[0]!r} is read as {first[0]!r}" in warnings


@pytest.mark.parametrize("labels", [["-1", "1"], ["A+", "A-", "A"], ["C++", "C#", "C"], ["0.5", "5"], ["1.0", "2.0"]])
def test_labels_that_mean_different_things_stay(labels: list[str]) -> None:
    found, warnings = read(labels, labels[::-1])
    assert {*found} == {*labels}
    assert "read as" not in warnings
    assert "look like one" not in warnings
