"""`may_differ`: whether a run that goes on may have other `rounds` than it began with."""

from __future__ import annotations

from pathlib import Path

from silotune.config import load_resolved
from silotune.errors import InputError
from silotune.runs.storage.checkpoints import Checkpoints
from silotune.runs.storage.run_folder import MAY_DIFFER
from silotune.training.federation import Federation


def may_differ(path: Path, federation: Federation) -> tuple[str, ...]:
    """Return the beginnings of the names of keys in which the configuration may differ from the run's.

    With other `rounds`, the rounds that are done must be as they would have been, bit by bit.

    Args:
        path: the run folder; it may hold no run.
        federation: with the new configuration.
    """
    file, rounds = path / "config.yaml", federation.config.rounds
    if not file.exists() or (before := load_resolved(file).rounds) == rounds:
        return MAY_DIFFER
    done = Checkpoints(path / "checkpoints").latest()
    if done is not None and done.round > rounds:
        raise InputError(f"--resume: {path} has done {done.round} rounds; allowed: rounds={done.round} or more")
    reason = _counts_rounds(federation)
    if reason:
        raise InputError(f"--resume: {path} was begun with rounds={before}, and {reason}; allowed: rounds={before}")
    return (*MAY_DIFFER, "rounds:")


def _counts_rounds(federation: Federation) -> str:
    """Say what in a run depends on the number of its rounds; nothing: ""."""
    train = federation.config.train
    if any(phase.when == "end" for phase in federation.context.phases):
        return f"method={federation.config.method.name} trains its final phases in the last one"
    if train.schedule_over == "run":
        return "train.schedule_over=run fits the learning rate to them"
    if federation.privacy is not None:
        return "its noise is chosen for them"
    return ""
