"""A silo's store after a kill: an answer, its state, its price and its line in the audit log agree."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from silotune.core.records import check_audit
from silotune.distributed.protocol.frames import Frame
from silotune.distributed.silo.store import Price, SiloAnswer, SiloStore
from silotune.errors import InputError

RUN = "a" * 16
PRICE = Price("laplace", 1.0, 0.0)


def answer(number, value=0.0):
    """An answer of a round, whose state holds a number."""
    state = {"x": torch.full((50_000,), value)}
    name = f"{number:04d}"
    return SiloAnswer(Frame("answer", {"value": value}), {}, name, number, {"round": name}, state, PRICE, keep={name})


def kept(store, number):
    """The value in a kept answer, and the one in its state."""
    found = store.find(RUN, f"{number:04d}", {"round": f"{number:04d}"})
    assert found is not None
    return found.frame.fields["value"], float(store.read_state(RUN, f"{number:04d}")["x"][0])


def endless(folder):
    store = SiloStore(folder)
    for value in range(10**9):
        store.commit(RUN, answer(1, float(value)), {"value": value})


def test_killed_at_any_moment_all_of_an_answer_is_there_or_nothing(tmp_path):
    forked, last = multiprocessing.get_context("fork"), -1.0
    for _ in range(8):
        process = forked.Process(target=endless, args=(tmp_path,))
        process.start()
        process.join(0.25 if last < 0 else 0.1)  # the first has answered by then
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        entries, problems = check_audit(tmp_path)
        store = SiloStore(tmp_path)
        last, in_state = kept(store, 1)
        assert (in_state, entries[-1]["value"], problems) == (last, last, [])
        assert store.spent(RUN, PRICE).uses == len(entries)
        store.records.close()
    assert last > 1


@pytest.mark.parametrize("when", ["before the transaction", "after it"])
def test_a_kill_around_the_transaction(when, tmp_path, monkeypatch):
    """The new state's file is there under another name: it counts if the transaction does."""
    store = SiloStore(tmp_path)
    store.commit(RUN, answer(1, 1.0), {})

    def killed(*_):
        raise KeyboardInterrupt

    before = when.startswith("before")
    owner, name = (store.records, "append") if before else (Path, "replace")
    if not before:
        monkeypatch.setattr("silotune.core.serialization.write_bytes", lambda path, data: path.write_bytes(data))
    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        store.commit(RUN, answer(1, 2.0), {})
    monkeypatch.undo()
    again = SiloStore(tmp_path)
    assert kept(again, 1) == ((1.0, 1.0) if before else (2.0, 2.0))
    assert again.spent(RUN, PRICE).uses == (1 if before else 2)
    again.commit(RUN, answer(1, 3.0), {})
    assert kept(again, 1) == (3.0, 3.0)


def test_states_that_are_needed_stay(tmp_path):
    store = SiloStore(tmp_path)
    for number in (1, 2, 3):
        store.commit(RUN, answer(number, float(number)), {})
    assert kept(store, 3) == (3.0, 3.0)
    with pytest.raises(InputError, match="state '0002' of this silo: missing or damaged"):
        store.read_state(RUN, "0002")
    assert [path.name for path in (tmp_path / RUN).iterdir()] == ["0003.safetensors"]


def test_a_state_whose_file_was_changed_is_damaged(tmp_path):
    store = SiloStore(tmp_path)
    store.commit(RUN, answer(1), {})
    (tmp_path / RUN / "0001.safetensors").write_bytes(b"else")
    assert store.find(RUN, "0001", {"round": "0001"}) is None
    with pytest.raises(InputError, match="missing or damaged"):
        store.read_state(RUN, "0001")


def test_answers_of_runs_whose_folder_an_operator_removed_are_dropped(tmp_path):
    store = SiloStore(tmp_path)
    store.commit("b" * 16, answer(1), {})
    shutil.rmtree(tmp_path / ("b" * 16))
    store.commit(RUN, answer(1), {})
    assert store.records.rows("SELECT run FROM answers") == [(RUN,)]
    assert store.spent("b" * 16, PRICE).uses == 1  # what left is never forgotten
