"""The number of threads: a share of the cores where silos are processes, and on resume that of the run."""

from __future__ import annotations

import pytest
import torch

from silotune.runs.build.resolve import read_config, with_threads_for
from silotune.runs.storage.run_folder import continued


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 6, 1), (8, 3, 2), (8, 8, 1), (4, 1, 4)])
def test_processes_share_the_cores(cores, processes, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert with_threads_for(read_config("demo"), processes).threads == threads
    assert with_threads_for(read_config("demo", ["threads=3"]), processes).threads == 3


def test_a_run_goes_on_with_its_threads(tmp_path):
    (tmp_path / "config.yaml").write_text("threads: 5\nevaluation: {validation: loss}\n", encoding="utf-8")
    assert continued(read_config("demo"), tmp_path).threads == 5
    assert continued(read_config("demo", ["threads=3"]), tmp_path).threads == 3, "what is given is compared"
