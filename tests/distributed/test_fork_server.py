"""The process that forks others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from silotune.distributed.processes.fork_client import is_alive
from silotune.distributed.processes.supervisor import Supervisor, _end_process_groups
from silotune.distributed.processes.watchdog import process_group
from silotune.errors import SilotuneError
from tests.support.processes import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
WORKER = [sys.executable, "-m", "silotune.distributed.silo.worker"]
LOST = ["flower-superexec", "--insecure", "--runtime-api-address", "127.0.0.1:9"]
"""It looks for a SuperNode where none is, as long as it lives."""


def test_a_forked_command_has_its_own_log_name_and_exit_code(tmp_path):
    with Supervisor(tmp_path / "logs", {}, fork_server=True) as supervisor:
        child = supervisor.start("worker-x", [*WORKER, str(tmp_path / "missing.yaml")], {"SOME": "thing"})
        assert child.process.wait(timeout=60) == 1
        assert not child.alive
        assert "missing.yaml: cannot be read" in child.tail()
        assert supervisor.restart("worker-x").starts == 2
    assert process_group(supervisor.token) == []


def test_a_command_that_it_does_not_know_is_named(tmp_path):
    with (
        Supervisor(tmp_path / "logs", {}, fork_server=True) as supervisor,
        pytest.raises(SilotuneError, match=r"ls: cannot be started .*fork-server\.log"),
    ):
        supervisor.start("ls", ["ls"])


def test_why_a_forked_command_ended_is_in_its_log():
    script = """
import os, sys
from silotune.distributed.processes.fork_server import fork
print(os.waitstatus_to_exitcode(os.waitpid(fork(["worker"], lambda: sys.exit("the reason")), 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "the reason\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_that_has_no_group_of_its_own_yet_is_ended_too(deaf):
    """As one that was forked a moment ago; here it never makes one, and may not listen either."""
    trap = "trap '' TERM; " if deaf else ""
    process = subprocess.Popen(["sh", "-c", f"{trap}echo ready; exec sleep 60"], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        _end_process_groups([process], grace=0.3)
        assert process.poll() == -(signal.SIGKILL if deaf else signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
def test_a_fork_server_that_is_killed_is_replaced_and_its_children_stay(tmp_path):
    with Supervisor(tmp_path / "logs", {"TEST_RUN": str(tmp_path)}, fork_server=True) as supervisor:
        first = supervisor.start("first", LOST)
        until = time.monotonic() + 30
        while processes(tmp_path, "first") != [first.process.pid] and time.monotonic() < until:
            time.sleep(0.05)
        pid = first.process.pid
        assert processes(tmp_path, "first") == [pid]
        parent = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        while is_alive(parent) and time.monotonic() < until:
            time.sleep(0.05)
        second = supervisor.start("second", LOST)
        assert first.alive
        assert second.alive
        supervisor.end("first")
        assert not is_alive(first.process.pid)
        assert second.alive
    assert process_group(supervisor.token) == []
