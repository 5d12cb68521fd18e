"""What is nobody's bad input, and no bug either: one line and exit code 1."""

from __future__ import annotations

import pytest

from tests.support.command_line import Silotune


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "train.batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), "train.batch_size"),
    ],
)
def test_the_machine_has_no_more(silotune: Silotune, monkeypatch, error: Exception, said: str) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("silotune.experiments.report.live_view.watch_run", failing)
    outcome = silotune("watch", ".")
    assert outcome.code == 1
    assert said in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
