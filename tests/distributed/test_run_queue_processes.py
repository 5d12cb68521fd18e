"""Real processes: a queue of runs, a SuperLink that is killed, silos that announce replies and never upload them."""

from __future__ import annotations

import json
import os
import signal
import sys
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


@pytest.mark.long
def test_a_run_waits_for_an_operator_while_others_pass_and_a_comparison_is_approved(deployed, tiny_config, tmp_path):
    config = tiny_config("fedmcp", "rounds=1", "train.steps=2", "federation.silos=[alpha,beta,gamma]", "data.seed=1")
    files = plain(deployed, config)
    files["alpha"].write_text(files["alpha"].read_text().replace("approval: policy", "approval: ask"))
    for name, file in files.items():
        deployed.begin(name, "federation", "join", file)
    settings = deployed.folder / "run.yaml"
    settings.write_text(dump(config), encoding="utf-8")
    for name in ("late", "early"):
        out = deployed.folder / name
        begun = deployed.command("federation", "start", deployed.link, settings, "--out", out, "--no-wait")
        assert begun.returncode == 0, begun.stderr

    def operator(out: Path, decision: str = "approve") -> bool:
        run = out / "federation" / "run.json"
        name = json.loads(run.read_text())["run"] if run.exists() else "none"
        return deployed.command("silo", decision, name, "--config", files["alpha"]).returncode == 0

    until(lambda: operator(deployed.folder / "early"), deployed)
    until(lambda: listed(deployed)[1]["state"] == "finished", deployed)
    state = json.loads(deployed.command("federation", "status", deployed.link, "--json").stdout)["coordinator"]
    assert [(run["run"], [*run["silos"]]) for run in state["waiting"]] == [(1, ["alpha"])]

    out = deployed.folder / "compared"
    words = ("federation.silos=[alpha,beta,gamma]", "--out", out, "--federation", deployed.link)
    command = [sys.executable, "-m", "silotune", "compare", settings, "methods=fedmcp,fedavg", *words]
    compare = deployed.begin("compare", *map(str, command))
    until(lambda: operator(out), deployed)
    assert compare.wait(timeout=WAIT) == 0, deployed.said("compare")
    table = (out / "table.csv").read_text()
    assert (table.count("fedavg,"), table.count("fedmcp,")) == (4, 4)
    assert operator(deployed.folder / "late")
    until(lambda: listed(deployed)[0]["state"] == "finished", deployed)
    expected = run(config, out=tmp_path / "whole").summary["shared_sha256"]
    for folder in (deployed.folder / "late", deployed.folder / "early", out / "fedmcp-1"):
        assert read_summary(folder)["shared_sha256"] == expected
