"""Steps that float16's loss scale skipped change nothing, and do not count behind an update."""

from __future__ import annotations

import pytest

from silotune.distributed.silo.request_work import RequestWork
from silotune.training.phase_optimizer import PhaseOptimizer
from tests.support.malicious import ALLOWED


@pytest.mark.parametrize("left", [None, 1])
def test_an_update_of_which_one_step_is_left_stays(attack, monkeypatch, left):
    coordinator = attack(ALLOWED, policy={"skipped_steps": None})
    assert coordinator.ask("hello").kind == "hello"
    federation = coordinator.session._setup.federation
    phases = [phase for phase in federation.context.phases if phase.when == "round"]
    planned = RequestWork.of(federation.context, next(iter(federation.silos.values())), phases).shared_steps
    assert planned > 1
    skipped = 0 if left is None else planned - left
    monkeypatch.setattr(PhaseOptimizer, "skipped", lambda optimizer: [skipped if optimizer is first else 0])
    first = None
    begin = PhaseOptimizer.__init__

    def noted(optimizer, *args, **options):
        nonlocal first
        begin(optimizer, *args, **options)
        first = first or optimizer

    monkeypatch.setattr(PhaseOptimizer, "__init__", noted)
    reply = coordinator.ask("round")
    assert (reply.kind == "refused") is (left is not None)
    assert ("policy.row_steps" in str(reply.fields.get("reason"))) is (left is not None)
    folder = coordinator.session._setup.limits.ledger.folder
    assert bool(list(folder.glob("*/0001*"))) is (left is None)
