"""Which label F1 is about: the one that is named, label 1 of a numbered data set, else all (macro F1)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from silotune.data.loading import load_silos
from silotune.data.tasks import Task, read_task
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config
from tests.support.command_line import change_silo


def tasks(place: Path, **changes: object) -> dict[str, Task]:
    """The tasks of `federation.yaml`, with changes to its first silo."""
    return {silo.name: silo.task for silo in load_silos(read_config(str(change_silo(place, **changes))))}


def test_the_alphabet_decides_nothing(place: Path) -> None:
    assert tasks(place, metric="f1")["north"].metric == "macro_f1"
    assert tasks(place, metric="f1", labels=["good", "bad"])["north"].metric == "macro_f1"
    named = tasks(place, metric="f1", labels=None, positive="bad")["north"]
    assert (named.metric, named.positive, named.positive_index) == ("f1", "bad", 0)
    assert read_task(json.loads(json.dumps(named.fields()))) == named


def test_a_positive_label_that_is_none_is_refused(place: Path) -> None:
    with pytest.raises(InputError, match=r"positive label of silo 'north'.*'baad'.*did you mean 'bad'"):
        tasks(place, metric="f1", positive="baad")
    with pytest.raises(InputError, match="put the label in quotes"):
        tasks(place, positive=True)
    with pytest.raises(InputError, match="positive is a label"):
        tasks(place, positive="bad", kind="generation")


def test_numbered_labels_say_it_themselves(tiny_config, data_folder: Path, tmp_path: Path) -> None:
    (first, *_) = load_silos(tiny_config("fedavg", "data.metric=f1", "data.tasks=[alpha]"))
    assert (first.task.metric, first.task.positive) == ("f1", first.task.labels[1])
    (other, *_) = load_silos(tiny_config("fedavg", "data.metric=f1", "data.tasks=[alpha]", "data.positive=bad"))
    assert other.task.positive == "bad"
    with pytest.raises(InputError, match="positive label"):
        load_silos(tiny_config("fedavg", "data.metric=f1", "data.tasks=[alpha]", "data.positive=grim"))
    shutil.copytree(data_folder, tmp_path / "data")
    meta = tmp_path / "data" / "alpha" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"metric": "f1", "positive": "bad"}))
    (said, *_) = load_silos(tiny_config("fedavg", "data.tasks=[alpha]", f"data.path={tmp_path / 'data'}"))
    assert (said.task.metric, said.task.positive) == ("f1", "bad")
    words = ("data.task=mood", "data.labels=[cold, hot]")
    (renamed, *_) = load_silos(tiny_config("fedavg", "data.tasks=[alpha]", f"data.path={tmp_path / 'data'}", *words))
    assert renamed.task == Task("mood", ("cold", "hot"), "f1", positive="cold")
    three = load_silos(tiny_config("fedavg", "data.metric=f1", "data.tasks=[gamma]"))[0].task
    assert (len(three.labels), three.metric) == (3, "macro_f1")
