"""The process that forks the others of a run on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from silotune.distributed.flower.commands import flower_environment
from silotune.distributed.local.fork_server import ProcessGroup
from silotune.errors import SilotuneError
from tests.support.processes import processes

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
WORKER = [sys.executable, "-m", "silotune.distributed.silo.worker"]
LOST = ["flower-superexec", "--insecure", "--runtime-api-address", "127.0.0.1:9"]
"""It looks for a SuperNode where none is, as long as it lives."""


@pytest.fixture
def environment(tmp_path):
    return flower_environment(tmp_path / "flwr") | {"TEST_RUN": str(tmp_path)}


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@linux
def test_a_forked_command_has_its_own_log_and_exit_code_and_an_unknown_one_is_named(tmp_path, environment):
    with ProcessGroup(tmp_path / "logs", environment) as group:
        group.start("worker-x", [*WORKER, str(tmp_path / "missing.yaml")], {"SOME": "thing"})
        until(group.ended)
        assert group.ended() == {"worker-x": 1}
        group.check(but="worker-x")
        with pytest.raises(SilotuneError, match=r"worker-x ended with code 1: .*missing\.yaml: no such file"):
            group.check()
        group.start("ls", ["ls"])
        until(lambda: "fork-server" in group.ended())
        with pytest.raises(SilotuneError, match=r"fork-server ended with code 1: .*KeyError: 'ls'"):
            group.check(but="worker-x")
    assert processes(tmp_path) == []


@linux
def test_all_processes_end_with_the_one_that_started_them(tmp_path, environment):
    script = f"""
import os, sys, time
from pathlib import Path
from silotune.distributed.local.fork_server import ProcessGroup
with ProcessGroup(Path({str(tmp_path / "logs")!r}), os.environ) as group:
    group.start("lost", {LOST!r})
    print("begun", flush=True)
    time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    try:
        assert starter.stdout.readline() == b"begun\n"
        until(lambda: processes(tmp_path, "lost"))
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait(timeout=30)
        until(lambda: processes(tmp_path) == [], 30)
    finally:
        starter.kill()
        starter.stdout.close()


@linux
def test_a_fork_server_that_is_killed_ends_with_its_processes(tmp_path, environment):
    with ProcessGroup(tmp_path / "logs", environment) as group:
        group.start("lost", LOST)
        until(lambda: processes(tmp_path, "lost"))
        os.kill(group._server.pid, signal.SIGKILL)
        until(lambda: "fork-server" in group.ended())
        with pytest.raises(SilotuneError, match="fork-server ended with code -9"):
            group.check()
    until(lambda: processes(tmp_path) == [], 30)
