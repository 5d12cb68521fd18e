"""What is said about a silo's rows: duplicates, leaks, labels that look alike, contradictions."""

from __future__ import annotations

from silotune.data.row_checks import (
    MOST_WARNINGS,
    alike_labels,
    describe_rows,
    row_warnings,
    silos_warnings,
    spread,
    warnings_of,
)
from silotune.data.rows import Row, SiloData, Splits
from silotune.data.tasks import Task
from silotune.distributed.silo.survey import _bins

MOOD = Task("mood", ("bad", "good"))


def rows(*texts: str, label: int = 0) -> list[Row]:
    return [Row((text,), label) for text in texts]


def silo(train: list[Row], test: list[Row], task: Task = MOOD, name: str = "a") -> SiloData:
    return SiloData(name, task, Splits(train, [], test))


def many(number: int, start: int = 0) -> list[Row]:
    return [Row((f"text {start + n}",), n % 2) for n in range(number)]


def test_rows_by_hand() -> None:
    train = [*rows("One  day", "one day", "two"), *rows("ONE day", label=1)]
    data = silo(train, rows("two", "three", "Two "))
    found = describe_rows(data)
    assert found["label_rows"] == {
        "train": {"bad": 3, "good": 1},
        "validation": {"bad": 0, "good": 0},
        "test": {"bad": 3, "good": 0},
    }
    assert found["duplicates"] == {"train": 2, "validation": 0, "test": 1}
    assert found["shared"] == {"validation": 0, "test": 2}
    assert found["contradictions"] == 3
    assert found["characters"]["train"] == {"median": 7, "p95": 8, "maximum": 8}
    assert found["characters"]["validation"] is None


def test_a_query_with_two_passages_is_no_duplicate() -> None:
    task = Task("t", (), "ndcg10", "retrieval")
    asked = [Row(("who",), 0, target=(passage, (), ())) for passage in ("north", "south", "North ")]
    assert describe_rows(silo(asked, [], task))["duplicates"]["train"] == 0
    assert _bins("duplicates", None, None, task, [*asked, asked[0]])[1] == [[], [], [], ["in all"]]


def test_labels_that_look_alike() -> None:
    assert alike_labels(["Pos", "pos", "neg", " POS!", "1", "01", "-", "--"]) == [["Pos", "pos", " POS!"], ["1", "01"]]
    assert alike_labels(["not_ok", "not ok", "notok"]) == [["not_ok", "not ok", "notok"]]
    for apart in (["-1", "1"], ["A", "A+", "A-"], ["C", "C#", "C++"], ["AB+", "AB-"], ["1.5", "15"], ["1-2", "12"]):
        assert alike_labels(apart) == [], apart


def test_spread_of_few_numbers() -> None:
    assert spread([]) is None
    assert spread([3]) == {"median": 3, "p95": 3, "maximum": 3}
    assert spread(range(1, 101)) == {"median": 50, "p95": 96, "maximum": 100}


def test_rows_in_order_have_no_warning() -> None:
    data = silo(many(60), many(40, 100))
    assert row_warnings(data, describe_rows(data)) == []
    assert warnings_of([data], central=False) == []


def warned(data: SiloData) -> str:
    return "\n".join(row_warnings(data, describe_rows(data)))


def test_each_fault_is_named() -> None:
    assert "40 of 40 test rows (100 %) are also training rows" in warned(silo(many(60), many(40)))
    assert "4 test rows; one of them is 25.0 points" in warned(silo(many(60), many(4, 100)))
    alike = Task("t", ("Pos", "pos"))
    assert "labels that look like one: 'Pos', 'pos'" in warned(silo(many(60), many(40, 100), alike))
    numbers = Task("t", tuple(f"{n}.5" for n in range(30)))
    floats = [Row((f"text {n}",), n % 30) for n in range(60)]
    assert "30 labels for 60 training rows; are they numbers" in warned(silo(floats, floats[:40], numbers))
    five_each = [*floats, *floats, *floats[:30]]
    assert "are they numbers" not in warned(silo(five_each, floats[:40], numbers))
    three = Task("t", ("a", "b", "c"))
    assert "no training row of 'c', which test rows have" in warned(silo(many(60), rows("x", label=2), three))
    assert "training rows have the texts of a row with another label" in warned(
        silo([*many(60), *rows("text 0", label=1)], many(40, 100))
    )


def test_silos_of_one_set_are_looked_at_together_and_metrics_that_differ_are_named() -> None:
    one, two = silo(many(30), many(40, 100), name="one"), silo(many(30, 30), many(40), name="two")
    assert warnings_of([one, two], central=True) == []  # `one` has the test rows
    assert len(warnings_of([one, two], central=False)) == 1
    other = silo(many(60), many(40, 100), Task("u", ("bad", "good"), "macro_f1"))
    (text,) = warnings_of([silo(many(60), many(40, 100)), other], central=False)
    assert "accuracy, macro F1" in text
    crowd = [silo(many(60), many(40), name=f"s{n}") for n in range(MOST_WARNINGS + 3)]
    lines = warnings_of(crowd, central=False)
    assert len(lines) == MOST_WARNINGS + 1
    assert lines[-1].startswith("3 more")


def test_silos_of_a_task_without_a_common_label_are_named() -> None:
    urgent, west = (
        Task("triage", ("green", "red", "routine", "urgent")),
        [Row((f"text {n}",), n % 2) for n in range(60)],
    )
    others = [Row(row.texts, row.label + 2) for row in west]
    test = many(40, 100)
    data = [
        silo(rows_of, test, urgent, name) for name, rows_of in (("west", west), ("north", others), ("south", others))
    ]
    (text,) = silos_warnings(data)
    assert text == "silo 'west': shares no label with 'north', 'south', though all are of task 'triage'"
    assert text in warnings_of(data, central=False)
    assert not any("shares no label" in line for line in warnings_of(data, central=True))
    assert len(silos_warnings(data[:2])) == 1, "of two, it is said once"
    assert silos_warnings(data[1:]) == []
    apart = Task("colors", ("green", "red"))
    assert silos_warnings([silo(west, test, apart, "west"), *data[1:]]) == []
