"""Real processes: a queue of runs, a SuperLink that is killed, silos that announce replies and never upload them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from silotune.config import dump
from silotune.runs.run import run
from silotune.runs.storage.readers import events, read_summary
from tests.support.deployed import Deployed, plain

WAIT = 900
"""Seconds: the machine may be busy."""


def listed(deployed: Deployed) -> list[dict]:
    return json.loads(deployed.command("federation", "runs", deployed.link, "--json").stdout)


def until(condition, deployed: Deployed) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, (listed(deployed), deployed.said("up"))
        time.sleep(0.3)


@pytest.mark.long
def test_three_runs_a_killed_superlink_and_a_stop(deployed, tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=3", "train.steps=2", "federation.silos=[alpha,beta,gamma]")
    expected = run(config, out=tmp_path / "whole").summary["shared_sha256"]
    files = plain(deployed, config)
    for name, file in files.items():
        deployed.begin(name, "federation", "join", file)
    settings = deployed.folder / "run.yaml"
    settings.write_text(dump(config), encoding="utf-8")
    outs = [deployed.folder / name for name in ("first", "second", "third")]
    for out in outs:
        begun = deployed.command("federation", "start", deployed.link, settings, "--out", out, "--no-wait")
        assert begun.returncode == 0, begun.stderr
    assert [entry["state"] for entry in listed(deployed)][1:] == ["queued", "queued"]

    # the SuperLink is killed in the first run, which goes on by itself to the same bits
    until(lambda: any(event["event"] == "silo" for event in events(outs[0])), deployed)
    up = deployed.begun["up"]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"flower-superlink") for word in words) and str(deployed.port).encode() in words:
            os.kill(int(entry.name), signal.SIGKILL)
    assert up.wait(timeout=WAIT) == 1
    assert "superlink: ended with code -9" in deployed.said("up")
    deployed.begin("up", "federation", "up", deployed.link)  # as systemd does
    until(lambda: listed(deployed)[0]["state"] == "finished", deployed)
    assert read_summary(outs[0])["shared_sha256"] == expected
    assert "run 1: goes on" in deployed.said("up")

    # the second is stopped; the third takes its turn
    until(lambda: listed(deployed)[1]["state"] == "running", deployed)
    until(lambda: (outs[1] / "config.yaml").exists(), deployed)
    assert deployed.command("federation", "stop", deployed.link, 2).stdout.strip() == "run 2: is being stopped"
    until(lambda: listed(deployed)[2]["state"] == "finished", deployed)
    assert [entry["state"] for entry in listed(deployed)] == ["finished", "stopped", "finished"]
    assert read_summary(outs[2])["shared_sha256"] == expected
    assert not (outs[1] / "summary.json").exists()
    resumed = deployed.command("federation", "resume", deployed.link, 2, "federation.quorum=0.9")
    assert resumed.returncode == 0, resumed.stderr
    assert read_summary(outs[1])["shared_sha256"] == expected
    table = deployed.command("federation", "runs", deployed.link).stdout
    assert table.count("finished") == 3
