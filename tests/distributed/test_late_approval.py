"""Runs that wait for an operator hold nobody up."""

from __future__ import annotations

from silotune.deploy import queue as runs
from silotune.deploy.printing import print_status
from silotune.deploy.queue import QueuedRun
from silotune.deploy.status import federation_status
from silotune.runs.run import run
from silotune.runs.storage.readers import read_summary


def test_an_approval_after_an_hour_comes_after_two_runs_behind_it(federation, tmp_path, capsys):
    outs = [tmp_path / name for name in ("first", "second", "third")]
    for out in outs:
        runs.start(federation.settings, federation.config, out)

    def others_are_approved(listed: list[QueuedRun]) -> bool:
        federation.decide("approved", outs[0], "beta", "gamma")
        for out in outs[1:]:
            federation.decide("approved", out)
        return [each.state for each in listed[1:]] == ["finished", "finished"]

    federation.until(others_are_approved)
    assert not federation.queue.run(1).is_over
    federation.now += 3600
    federation.until(lambda listed: listed[0].waits_for().keys() == {"alpha"})
    runs.start(federation.settings, federation.config, tmp_path / "rejected")

    def is_rejected(listed: list[QueuedRun]) -> bool:
        federation.decide("rejected", tmp_path / "rejected", "beta")
        return listed[3].state == "failed"

    federation.until(is_rejected)
    print_status(federation_status(federation.settings, lambda _: {}))
    said = capsys.readouterr().out
    assert "run 1 waits for approval: alpha since " in said
    assert "silo 'beta': its operator rejected the run" in said.split("run 4 failed ")[1]
    federation.decide("approved", outs[0])
    federation.until(lambda listed: listed[0].state == "finished")
    whole = run(federation.config, out=tmp_path / "whole").summary["shared_sha256"]
    assert [read_summary(out)["shared_sha256"] for out in outs] == [whole] * 3
    assert federation.said.count("run 1: waiting") < 6  # it is asked about ever less often
