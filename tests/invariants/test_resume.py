"""A run interrupted anywhere and resumed ends as one that was never interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from invariants.cases import every_case, logged, same, snapshot
from silotune.experiment import Run


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


def interrupted_at(federate, case, out: Path, at: int, resume: bool = False) -> list[tuple[int, str]]:
    progress = Interruption(at)
    with pytest.raises(KeyboardInterrupt):
        federate.run(case, out, progress=progress, resume=resume)
    assert not (out / "summary.json").exists()
    return progress.calls


def assert_as_if_never_interrupted(resumed: Run, whole: Run) -> None:
    assert same(resumed.summary) == same(whole.summary)
    assert json.loads((resumed.folder / "summary.json").read_text()) == resumed.summary
    for kind in ("round", "silo", "final"):  # each piece of work is logged once, with the same numbers
        timeless = [
            [{key: value for key, value in event.items() if key != "seconds"} for event in logged(run.folder, kind)]
            for run in (resumed, whole)
        ]
        assert timeless[0] == timeless[1]
    files = [
        {name: value[1] for name, value in snapshot(run.folder / "checkpoints").items()} for run in (resumed, whole)
    ]
    assert files[0].keys() == files[1].keys()
    tensors = [{name: value for name, value in found.items() if name.endswith(".safetensors")} for found in files]
    assert tensors[0] == tensors[1]


@every_case
def test_interrupted_in_every_round_again_and_again(federate, reference, case, tmp_path):
    """In the middle of a round, after its training, right after its checkpoint; each time in the same folder."""
    whole, _ = reference(case)
    out = tmp_path / "run"
    progress = Interruption(None)
    last = len(whole.federation.silos)  # the calls of a round: one a silo, then "validation"
    reached = [
        interrupted_at(federate, case, out, last - 1)[-1],
        interrupted_at(federate, case, out, last, resume=True)[-1][0],
        interrupted_at(federate, case, out, last + 1, resume=True)[-1][0],
        interrupted_at(federate, case, out, 0, resume=True)[-1][0],
        interrupted_at(federate, case, out, last, resume=True)[-1][0],
    ]
    assert reached == [(1, max(whole.federation.silos)), 1, 2, 2, 2]
    resumed = federate.run(case, out, resume=True, progress=progress)
    assert {number for number, _ in progress.calls} == {2}
    assert_as_if_never_interrupted(resumed, whole)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("case", ["moon"])
def test_interrupted_at_every_report(federate, reference, case, at, tmp_path):
    whole, _ = reference(case)
    interrupted_at(federate, case, tmp_path / "run", at)
    assert_as_if_never_interrupted(federate.run(case, tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize("case", ["local", "fedmcp"])
def test_interrupted_with_sampling(federate, case, tmp_path):
    """Silos that were not sampled since an earlier round keep an earlier file; the best round is an earlier one."""
    words = ("sampling.count=1", "rounds=4", "train.steps=1")
    whole = federate.run(case, tmp_path / "whole", *words)
    for at in range(1, 8, 2):
        progress, out = Interruption(at), tmp_path / f"run{at}"
        with pytest.raises(KeyboardInterrupt):
            federate.run(case, out, *words, progress=progress)
        assert_as_if_never_interrupted(federate.run(case, out, *words, resume=True), whole)


def test_a_finished_run_is_summarised_again_and_not_trained_again(federate, tmp_path):
    whole = federate.run("fedmcp", tmp_path / "run")
    before = snapshot(tmp_path / "run" / "checkpoints")
    progress = Interruption(None)
    again = federate.run("fedmcp", tmp_path / "run", resume=True, progress=progress)
    assert progress.calls == []
    assert again.summary == whole.summary
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def test_resume_without_a_run_starts_one(federate, reference, tmp_path):
    whole, _ = reference("fedavg")
    assert_as_if_never_interrupted(federate.run("fedavg", tmp_path / "new", resume=True), whole)
    (tmp_path / "empty").mkdir()
    assert_as_if_never_interrupted(federate.run("fedavg", tmp_path / "empty", resume=True), whole)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_last_event_cut_off_by_a_kill(federate, reference, kept, tmp_path):
    whole, _ = reference("fedavg")
    out = tmp_path / "run"
    interrupted_at(federate, "fedavg", out, 6)
    text = (out / "events.jsonl").read_text()
    start = text[:-1].rindex("\n") + 1
    (out / "events.jsonl").write_text(text[: start + int(kept * (len(text) - start))])
    assert_as_if_never_interrupted(federate.run("fedavg", out, resume=True), whole)


class CrashPoints:
    """Stops the process's next step at the n-th change of a file below a folder, before it is made.

    Opening for writing, renaming, removing and making folders are seen through Python's audit events, whatever code
    does them: as a kill would, nothing after the n-th change happens.
    """

    def __init__(self) -> None:
        self.below: str | None = None
        self.at: int | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.below is None or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & 3):  # O_WRONLY, O_RDWR
            return
        paths = [
            str(path)
            for path in args[: 2 if event == "os.rename" else 1]
            if isinstance(path, str) or hasattr(path, "__fspath__")
        ]
        if any(path.startswith(self.below) for path in paths):
            self.seen.append(f"{event} {paths[-1].removeprefix(self.below)}")
            if self.at is not None and len(self.seen) > self.at:
                raise KeyboardInterrupt  # from here on every further change as well


@pytest.fixture(scope="module")
def crash_points() -> CrashPoints:
    return CrashPoints()  # an audit hook stays for the process's life; it is idle while `below` is None


STEPS = ("train.steps=1", "sampling.count=2", "data.validation_rows=2", "data.test_rows=2")


def crash(federate, points: CrashPoints, case: str, out: Path, at: int | None, resume: bool = False) -> Run | None:
    points.below, points.at, points.seen = str(out), at, []
    try:
        return federate.run(case, out, *STEPS, resume=resume)
    except KeyboardInterrupt:
        return None
    finally:
        points.below = None


def crash_everywhere(federate, points: CrashPoints, case: str, folder: Path, share: slice, twice: bool = False) -> None:
    whole = crash(federate, points, case, folder / "whole", None)
    changes = list(points.seen)
    assert len(changes) > 25
    for at in range(len(changes))[share]:
        out = folder / f"run{at}"
        assert crash(federate, points, case, out, at) is None, changes[at]
        if twice:
            crash(federate, points, case, out, at % 7, resume=True)
        resumed = crash(federate, points, case, out, None, resume=True)
        try:
            assert_as_if_never_interrupted(resumed, whole)
        except AssertionError as error:
            raise AssertionError(f"after a crash before {changes[at]!r}") from error


@pytest.mark.parametrize("third", range(3))
def test_a_crash_before_a_change_of_a_file(federate, crash_points, third, tmp_path):
    """Every third change of a run of Local; all changes of more methods in the long test."""
    crash_everywhere(federate, crash_points, "local", tmp_path, slice(third, None, 3))


@pytest.mark.long
@pytest.mark.parametrize("case", ["fedmcp", "moon", "fedavg-full", "centralised"])
def test_a_crash_before_any_change_of_a_file_and_another_while_resuming(federate, crash_points, case, tmp_path):
    crash_everywhere(federate, crash_points, case, tmp_path, slice(None), twice=True)
