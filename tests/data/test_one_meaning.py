"""A task's name means one thing in all silos and at the coordinator: to a model labels are numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from silotune.data.loading import draw_labeled_rows, load_silos
from silotune.errors import InputError
from silotune.runs.build.builder import build

ONE_TASK = ("data.tasks=[alpha]", "partition=iid", "partition.silos=3", "server.labels_per_class=5")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": ("good", "bad")}, "'silo-3'.*'alpha'.*into good, bad.*'silo-1'.*into bad, good"),
        ({"metric": "f1"}, "'silo-3'.*by f1.*'silo-1'.*by accuracy"),
    ],
)
def test_two_silos_that_mean_different_things_are_refused(change, said, tiny_config):
    config = tiny_config("fedavg", *ONE_TASK)
    data = load_silos(config)
    data[2] = replace(data[2], task=replace(data[2].task, **change))
    with pytest.raises(InputError, match=said):
        build(config, data=data)


@pytest.mark.parametrize("change", [{"labels": ("good", "bad")}, {"name": "Alpha"}])
def test_labeled_rows_of_another_task_are_refused(change, tiny_config):
    config = tiny_config("fedfame", *ONE_TASK)
    data = load_silos(config)
    own = draw_labeled_rows(data, config.server, 1)
    with pytest.raises(InputError, match=r"federation\.labelled: the task of its rows is"):
        build(config, data=data, labeled=replace(own, task=replace(own.task, **change)))
    assert build(config, data=data, labeled=own).server is not None
