"""Settings of a process: the calling program's are as before after a run; the number of threads that a run has."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging as transformers_logging

from silotune import run
from silotune.errors import InputError
from silotune.runs.build.resolve import read_config, resolve
from silotune.runs.storage.run_folder import continued
from silotune.training.local_trainer import LocalTrainer


def settings() -> tuple[int, int, bool]:
    return (
        torch.get_num_threads(),
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )


@pytest.fixture
def _a_users_own():
    threads, verbosity, bars = settings()
    torch.set_num_threads(2)
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    yield
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity(verbosity)
    if not bars:
        transformers_logging.disable_progress_bar()


@pytest.mark.usefixtures("_a_users_own")
def test_threads_and_transformers_messages_are_those_of_the_program_again(tiny_config, tmp_path, monkeypatch):
    before, inside = settings(), []
    rounds = LocalTrainer.rounds
    monkeypatch.setattr(LocalTrainer, "rounds", lambda *args: inside.append(settings()) or rounds(*args))
    run(tiny_config("fedavg", "rounds=1", "threads=1"), out=tmp_path / "run")
    assert set(inside) == {(1, transformers_logging.ERROR, False)}
    assert settings() == before
    with pytest.raises(InputError):
        run(tiny_config("fedavg", "rounds=1", "threads=1", "train.tokens_at_once=1"), out=tmp_path / "refused")
    assert settings() == before


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 6, 1), (8, 3, 2), (8, 8, 1), (4, 1, 4)])
def test_processes_share_the_cores(cores, processes, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert resolve(read_config("demo"), processes=processes).config.threads == threads
    assert resolve(read_config("demo", ["threads=3"]), processes=processes).config.threads == 3


def test_a_run_goes_on_with_its_threads(tmp_path):
    (tmp_path / "config.yaml").write_text("threads: 5\nevaluation: {validation: loss}\n", encoding="utf-8")
    assert continued(read_config("demo"), tmp_path).threads == 5
    assert continued(read_config("demo", ["threads=3"]), tmp_path).threads == 3, "what is given is compared"
