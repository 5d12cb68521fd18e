"""Units of noise on rows, by a column: rows of one stay together, and none is unknown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from silotune.communication.privacy import accountant
from silotune.data.loading import load_silos
from silotune.data.row_folder import read_rows, write_rows
from silotune.data.rows import UNREAD, SiloData, Splits
from silotune.data.tokenized import RowTokenizer
from silotune.distributed.silo.policy import Policy
from silotune.distributed.silo.silo_config import PolicyConfig
from silotune.errors import InputError
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.training.row_privacy import units_of

NOISE = ("privacy.unit=patient", "privacy.epsilon=4")


@pytest.fixture
def config(tmp_path, backbone_folder):
    """`config(*words, rows=…, **keys)` reads the configuration of a silo with three notes of each of 40 patients."""

    def made(*words, rows=None, **keys):
        file = tmp_path / "notes.jsonl"
        usual = [{"text": f"note {n} of many", "label": ("bad", "good")[n % 2], "patient": n // 3} for n in range(120)]
        file.write_text("".join(json.dumps(row) + "\n" for row in (usual if rows is None else rows(usual))))
        entry = {"name": "north", "path": str(file), "labels": ["bad", "good"]} | keys
        entry = {key: value for key, value in entry.items() if value is not None}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump({"silos": [entry, entry | {"name": "south"}]}))
        backbone = f"backbone={backbone_folder('bert')}"
        return read_config(str(tmp_path / "own.yaml"), ["method=fedavg", backbone, "rounds=1", *NOISE, *words])

    return made


def test_splits_are_drawn_unit_by_unit_and_caps_count_units(config):
    data = load_silos(config("data.train_rows=20"))[0]
    parts = data.splits.train, data.splits.validation, data.splits.test
    units = [{row.unit for row in part} for part in parts]
    assert list(map(len, units)) == [20, 8, 8]
    assert not units[0] & units[1]
    assert not units[0] & units[2]
    assert not units[1] & units[2]
    assert all(len(part) == 3 * len(of_part) for part, of_part in zip(parts, units, strict=True))


def test_a_silo_of_units(config, tmp_path):
    given = config()
    federation = build(given)
    silo = federation.silos["north"]
    assert silo.rows == len(units_of(silo)) == 24
    assert {len(unit) for unit in units_of(silo)} == {3}
    assert federation.context.rate_of_units(silo) == given.train.batch_size / 24
    (data, _) = load_silos(given)
    write_rows(tmp_path / "rows", data)
    assert read_rows(tmp_path / "rows", "north") == data


@pytest.mark.parametrize("declared", [True, False])
def test_names_of_labels_do_not_follow_from_rows(declared, config, monkeypatch):
    """Planted: where names are read from rows, one row's own label leaves with the task."""

    def rare(rows):
        return [row | ({"label": "rare"} if n == 6 else {}) for n, row in enumerate(rows)]

    monkeypatch.setattr("silotune.data.own_silos._declared", lambda *_: True)
    labels = ["bad", "good", "rare"] if declared else None
    tasks = [load_silos(config(labels=labels, rows=rows))[0].task for rows in (None, rare)]
    assert (tasks[0] == tasks[1]) is declared


@pytest.mark.parametrize("unit", ["patient", "row"])
def test_rows_that_a_head_cannot_read_count_as_empty(unit, config, monkeypatch):
    """A refusal would tell whether a silo has such a row: all notes of patient 5, and one of patient 6."""
    tokenized = RowTokenizer.__call__

    def some(self, task, rows):
        if any("unreadable" in row.texts[0] for row in rows):
            raise InputError("cannot be read")
        return tokenized(self, task, rows)

    def spoiled(rows):
        return [row | ({"text": f"unreadable {n}"} if 15 <= n < 19 else {}) for n, row in enumerate(rows)]

    monkeypatch.setattr(RowTokenizer, "__call__", some)
    words = f"privacy.unit={unit}", "data.ratio=[0.9, 0.05, 0.05]"
    silos = [build(config(*words, rows=rows)).silos["north"] for rows in (None, spoiled)]
    assert silos[0].rows == silos[1].rows == len(units_of(silos[1]))
    assert sum(not of_unit for of_unit in units_of(silos[1])) == {"patient": 1, "row": 4}[unit]
    with pytest.raises(InputError, match="rows: cannot be read"):
        build(config("privacy.unit=null", "privacy.epsilon=null", rows=spoiled))


@pytest.mark.parametrize(
    ("unit", "spoiled", "expected"),
    [
        ("patient", {"label": "worse"}, 40),  # all rows of two patients
        ("row", {"label": "worse"}, 120),
        ("row", {"label": None}, 120),
        ("row", {"label": True}, 120),
        ("patient", {"patient": " "}, 38 + 6),  # whose six rows are, nobody knows
    ],
)
def test_rows_without_a_declared_label_or_a_unit_are_empty_units(config, tmp_path, unit, spoiled, expected):
    """A refusal would tell of them; so would names, numbers of units, and a reading of other rows that changed."""
    usual, _ = load_silos(config(f"privacy.unit={unit}"))
    given = config(
        f"privacy.unit={unit}", rows=lambda rows: [row | (spoiled if n < 6 else {}) for n, row in enumerate(rows)]
    )
    data, _ = load_silos(given)
    found, plain = (
        [row for part in ("train", "validation", "test") for row in getattr(each.splits, part)]
        for each in (data, usual)
    )
    unread = [row for row in found if row.label == UNREAD]
    assert len(unread) == 6
    assert len({row.unit or number for number, row in enumerate(found)}) == expected
    assert {row.texts for row in found if row.label != UNREAD} == {
        row.texts for row in plain if int(row.texts[0].split()[1]) > 5
    }
    write_rows(tmp_path / "rows", data)
    assert read_rows(tmp_path / "rows", "north") == SiloData(
        "north",
        data.task,
        Splits(
            *(
                [replace(row, remarks=()) for row in getattr(data.splits, part)]
                for part in ("train", "validation", "test")
            )
        ),
    )
    silo = build(given).silos["north"]
    train = data.splits.train
    assert silo.rows == len(units_of(silo)) == len({row.unit or number for number, row in enumerate(train)})
    assert sum(map(len, silo.train.values())) == sum(row.label != UNREAD for row in train)
    with pytest.raises(InputError, match="all are without a declared label"):
        build(config(f"privacy.unit={unit}", rows=lambda rows: [row | spoiled for row in rows]))


def test_a_prepared_folder_says_that_its_labels_were_declared(config, tmp_path):
    (data, _) = load_silos(config())
    for declared in (False, True):
        write_rows(tmp_path / "rows", data, declared)
        assert read_rows(tmp_path / "rows", "north") == data
    assert read_rows(tmp_path / "rows", "north", noised=True) == data
    write_rows(tmp_path / "rows", data)
    with pytest.raises(InputError, match=r"^rows: .*task\.json does not say that its labels were declared"):
        read_rows(tmp_path / "rows", "north", noised=True)


def test_delta_leaves_no_unit_out(config, monkeypatch):
    """A tenth of 1 / units of the largest silo, if the usual δ is more."""
    assert build(config()).privacy.account.delta == 1e-5
    monkeypatch.setattr(accountant, "DELTA", 0.5)
    assert build(config()).privacy.account.delta == 0.1 / 24
    policy = Policy("north", PolicyConfig(preset="private"))
    policy.check_delta(0.1 / 24, 24, "privacy.delta of the run")
    with pytest.raises(InputError, match=r"its silo config\) protects no 20,000 units; allowed: at most 5e-06"):
        policy.check_delta(1e-5, 20_000, "privacy.delta of its silo config")
    Policy("north", PolicyConfig(preset="trusting")).check_delta(0.4, 24, "privacy.delta of the run")


def test_what_is_not_said_of_units(config):
    with pytest.raises(InputError, match="patients"):
        load_silos(config("privacy.unit=patients"))
    with pytest.raises(InputError, match=r"silo 'north': labels: are to be declared beside privacy\.unit"):
        load_silos(config(labels=None))
    with pytest.raises(InputError, match=r"partition, data\.parts: would divide one unit's rows"):
        config("partition=iid", "partition.silos=2")


def test_a_unit_of_evaluation_stays_in_one_split_and_is_known_of_test_rows(tmp_path, backbone_folder):
    file = tmp_path / "notes.csv"
    rows = [f"note {n} of many,{('bad', 'good')[n % 2]},{n // 3 if n else ''}" for n in range(120)]
    file.write_text("\n".join(["text,label,document", *rows]))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"silos": [{"name": "north", "path": str(file)}]}))
    words = ["method=local", f"backbone={backbone_folder('bert')}", "rounds=1", "evaluation.unit=document"]
    federation = build(read_config(str(tmp_path / "own.yaml"), words))
    (data,) = load_silos(federation.config)
    units = [[row.unit for row in getattr(data.splits, name) if row.unit] for name in ("train", "validation", "test")]
    assert sum(map(len, units)) == 119
    assert sum(len({*of_split}) for of_split in units) == 40
    silo = federation.silos["north"]
    assert silo.train["north"].units is None
    named = silo.evaluations["north"].test.units
    assert named is not None
    assert [unit for unit in named if not unit.startswith(" ")] == units[2]
