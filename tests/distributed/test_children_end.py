"""The processes of a deployed test end with the test's own process, also when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import subprocess
from tests.support.processes import dies_with_parent
child = subprocess.Popen(["sleep", "60"], start_new_session=True, preexec_fn=dies_with_parent)
print(child.pid, flush=True)
child.wait()
"""


def runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the end of a parent")
def test_children_end_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    left = runs(child)
    if left:
        os.kill(child, signal.SIGKILL)
    assert not left
