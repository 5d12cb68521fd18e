"""A run that is interrupted anywhere and resumed ends like an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from silotune.errors import InputError
from tests.support.method_cases import CASES, assert_as_if_never_interrupted, every_case, logged, snapshot


class Interruption:
    """A progress report that interrupts at its n-th call (n from 0), or never."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.calls: list[tuple[int, str]] = []

    def __call__(self, number: int, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.calls.append((number, what))
        if len(self.calls) - 1 == self.at:
            raise KeyboardInterrupt


def interrupted_at(federate, case, out: Path, at: int, *words: str, resume: bool = False) -> list[tuple[int, str]]:
    progress = Interruption(at)
    with pytest.raises(KeyboardInterrupt):
        federate.run(case, out, *words, progress=progress, resume=resume)
    assert not (out / "summary.json").exists()
    return progress.calls


@every_case
def test_interrupted_in_every_round_again_and_again(federate, reference, case, tmp_path):
    """In the middle of a round, right after its checkpoint, after a round's training; each time in the same folder."""
    whole, _ = reference(case)
    out = tmp_path / "run"
    progress = Interruption(None)
    last = len(whole.federation.silos)  # the calls of a round: one a silo, then "validation"
    reached = [
        interrupted_at(federate, case, out, last - 1)[-1],
        interrupted_at(federate, case, out, last + 1, resume=True)[-1][0],
        interrupted_at(federate, case, out, last, resume=True)[-1][0],
    ]
    assert reached == [(1, max(whole.federation.silos)), 2, 2]
    resumed = federate.run(case, out, resume=True, progress=progress)
    assert {number for number, _ in progress.calls} == {2}
    assert_as_if_never_interrupted(resumed, whole)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in ("fedmcp", "moon") else pytest.mark.long) for c in CASES]
)
def test_a_finished_run_goes_on_to_more_rounds(federate, reference, case, tmp_path):
    """As if it had been begun with them; refused with the folder unchanged where the rounds count on their number."""
    whole, _ = reference(case)
    out = tmp_path / "run"
    federate.run(case, out, "rounds=1")
    before = snapshot(out)
    federation = whole.federation
    ends = any(phase.when == "end" for phase in federation.context.phases)
    if ends or federation.privacy is not None or federation.config.train.schedule_over == "run":
        with pytest.raises(InputError, match=r"was begun with rounds=1, and .*; allowed: rounds=1"):
            federate.run(case, out, resume=True)
        assert snapshot(out) == before
        return
    assert_as_if_never_interrupted(federate.run(case, out, resume=True), whole)
    assert logged(out, "changed")[0]["changed"] == ["rounds: 1 → 2"]
    before = snapshot(out)
    with pytest.raises(InputError, match="has done 2 rounds; allowed: rounds=2 or more"):
        federate.run(case, out, "rounds=1", resume=True)
    assert snapshot(out) == before


def test_interrupted_with_sampling(federate, tmp_path):
    """Silos that were not sampled since an earlier round keep an earlier file; the best round is an earlier one."""
    words = ("sampling.count=1", "rounds=4", "train.steps=1")
    whole = federate.run("fedmcp", tmp_path / "whole", *words)
    for at in range(1, 8, 2):
        out = tmp_path / f"run{at}"
        interrupted_at(federate, "fedmcp", out, at, *words)
        assert_as_if_never_interrupted(federate.run("fedmcp", out, *words, resume=True), whole)


def test_a_finished_run_is_summarized_again_and_not_trained_again(federate, tmp_path):
    whole = federate.run("fedmcp", tmp_path / "run")
    before = snapshot(tmp_path / "run" / "checkpoints")
    progress = Interruption(None)
    again = federate.run("fedmcp", tmp_path / "run", resume=True, progress=progress)
    assert progress.calls == []
    assert again.summary == whole.summary
    assert snapshot(tmp_path / "run" / "checkpoints") == before
    (tmp_path / "run" / "summary.json").write_text("{", encoding="utf-8")  # damaged: it is written anew
    anew = federate.run("fedmcp", tmp_path / "run", resume=True).summary
    assert anew == whole.summary


def test_resume_without_a_run_starts_one(federate, reference, tmp_path):
    whole, _ = reference("fedavg")
    assert_as_if_never_interrupted(federate.run("fedavg", tmp_path / "new", resume=True), whole)
    (tmp_path / "empty").mkdir()
    assert_as_if_never_interrupted(federate.run("fedavg", tmp_path / "empty", resume=True), whole)


@pytest.mark.parametrize("kept", [0.0, 0.9])
def test_a_last_event_cut_off_by_a_kill(federate, reference, kept, tmp_path):
    whole, _ = reference("fedavg")
    out = tmp_path / "run"
    interrupted_at(federate, "fedavg", out, 6)
    text = (out / "events.jsonl").read_text()
    start = text[:-1].rindex("\n") + 1
    (out / "events.jsonl").write_text(text[: start + int(kept * (len(text) - start))])
    assert_as_if_never_interrupted(federate.run("fedavg", out, resume=True), whole)


def test_other_versions_are_logged_behind_an_event_that_was_cut_off(federate, tmp_path):
    """The event about versions must not be appended to the line that a kill left."""
    out = tmp_path / "run"
    interrupted_at(federate, "fedavg", out, 6)
    made = json.loads((out / "versions.json").read_text())
    (out / "versions.json").write_text(json.dumps(made | {"torch": "1.0"}))
    (out / "events.jsonl").write_bytes((out / "events.jsonl").read_bytes()[:-9])
    federate.run("fedavg", out, resume=True)
    assert [event["changed"] for event in logged(out, "versions")] == [[f"torch 1.0 → {made['torch']}"]]
    assert [event["round"] for event in logged(out, "round")] == [1, 2]
