"""After a crash at any change of a file, a run resumes to the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from silotune.runs.run_result import Run
from tests.support.audit_events import audited
from tests.support.method_cases import assert_as_if_never_interrupted


class CrashPoints:
    """Stops a run at the n-th change of a file below a folder, before it is made.

    Opening for writing, writing into what was emptied, renaming, removing and making folders are seen through Python's
    audit events, whatever code does them: as after a kill, nothing from the n-th change on happens.
    """

    def __init__(self) -> None:
        self.below: str | None = None
        self.at: int | None = None
        self.seen: list[str] = []

    def listen(self, event: str, args: tuple[object, ...]) -> None:
        if self.below is None or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        flags = args[2] if event == "open" and isinstance(args[2], int) else 0
        if event == "open" and not flags & (os.O_WRONLY | os.O_RDWR):
            return
        target = args[1] if event == "os.rename" else args[0]  # the new name
        path = str(target) if isinstance(target, (str, os.PathLike)) else ""
        if path.startswith(self.below):
            self._change(event, path, lambda: None)
            if flags & os.O_TRUNC:
                self._change("write", path, lambda: open(path, "w").close())

    def _change(self, what: str, path: str, half: Callable[[], None]) -> None:
        """Count a change; if it is the one to stop at, leave it half done and stop."""
        self.seen.append(f"{what} {path.removeprefix(str(self.below))}")
        if self.at is not None and len(self.seen) > self.at:
            self.below = None
            half()
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def crash_points() -> Iterator[CrashPoints]:
    points = CrashPoints()
    with audited(points.listen):
        yield points


Words = tuple[str, ...]

STEPS = ("train.steps=1", "sampling.count=2", "data.validation_rows=2", "data.test_rows=2")


def crash(
    federate, points: CrashPoints, case: str, out: Path, at: int | None, resume: bool = False, words: Words = ()
) -> Run | None:
    points.below, points.at, points.seen = str(out), at, []
    try:
        return federate.run(case, out, *STEPS, *words, resume=resume)
    except KeyboardInterrupt:
        return None
    finally:
        points.below = None


def crash_everywhere(
    federate, points: CrashPoints, case: str, folder: Path, share: slice, twice: bool = False, words: Words = ()
) -> None:
    whole = crash(federate, points, case, folder / "whole", None, words=words)
    changes = list(points.seen)
    assert len(changes) > 30
    for at in range(len(changes))[share]:
        out = folder / f"run{at}"
        assert crash(federate, points, case, out, at, words=words) is None, changes[at]
        if twice:
            crash(federate, points, case, out, at % 7, True, words)
        resumed = crash(federate, points, case, out, None, True, words)
        try:
            assert_as_if_never_interrupted(resumed, whole)
        except AssertionError as error:
            raise AssertionError(f"after a crash before {changes[at]!r}") from error


@pytest.mark.parametrize("start", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_crash_before_a_change_of_a_file(federate, crash_points, start, tmp_path):
    """Every fourth change of a run of Local; the long tests take all changes of more methods."""
    crash_everywhere(federate, crash_points, "local", tmp_path, slice(start, None, 4))


def test_killed_while_the_last_round_drops_the_one_before(federate, crash_points, tmp_path):
    whole = crash(federate, crash_points, "fdlora", tmp_path / "whole", None)
    drops = [at for at, change in enumerate(crash_points.seen) if change.startswith("os.remove /checkpoints")]
    assert len(drops) >= 4
    for at in drops:
        out = tmp_path / f"run{at}"
        assert crash(federate, crash_points, "fdlora", out, at) is None
        assert_as_if_never_interrupted(crash(federate, crash_points, "fdlora", out, None, resume=True), whole)


@pytest.mark.long
@pytest.mark.parametrize("case", ["fedmcp", "moon", "fedavg-full", "centralised", "fedalt", "fdlora", "flora, ranks"])
def test_a_crash_before_any_change_of_a_file_and_another_while_resuming(federate, crash_points, case, tmp_path):
    crash_everywhere(federate, crash_points, case, tmp_path, slice(None), twice=True)
