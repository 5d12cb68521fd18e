"""Shorter waits of Flower's processes, and what that changes in Flower."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import threading
import time

import pytest

from silotune.distributed.flower import quick
from silotune.distributed.flower.quick import BACKOFF, COMMANDS, Bell, Pauses

PUSH = {"state", "object_store", "send", "push_object"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


@pytest.mark.parametrize("target", COMMANDS.values())
def test_flowers_commands_are_the_functions_that_are_called(target):
    name, _, function = target.partition(":")
    inspect.signature(getattr(importlib.import_module(name), function)).bind()


@pytest.mark.parametrize(
    ("module", "uses"),
    [
        (
            "flwr.supernode.start_client_internal",
            {"time.sleep(3)", "time.sleep(0.5)", "subprocess.Popen(command)"},
        ),
        ("flwr.supercore.superexec.run_superexec", {"time.sleep(task_poll_interval)"}),
        (
            "flwr.supercore.superexec.executor.subprocess_executor",
            {
                "subprocess.Popen(args)",
                "subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
            },
        ),
    ],
)
def test_flower_uses_what_is_changed_for_nothing_else(module, uses):
    """A new call would get what is meant for another."""
    nodes = [*ast.walk(ast.parse(inspect.getsource(importlib.import_module(module))))]
    calls = {ast.unparse(node) for node in nodes if isinstance(node, ast.Call) and _is_of(node.func)}
    assert calls == uses
    pushes = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "_push_messages"]
    assert all(not call.args and {each.arg for each in call.keywords} == PUSH for call in pushes)
    assert len(pushes) == (module == "flwr.supernode.start_client_internal")
    named = {ast.unparse(node) for node in nodes if _is_of(node)}
    assert named <= {"time.sleep", "subprocess.Popen", "subprocess.DEVNULL"}


def _is_of(node):
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("time", "subprocess")
    )


@pytest.mark.long
@linux
def test_the_changes_are_made_where_they_are_wanted(tmp_path):
    script = """
import inspect, time
from silotune.distributed.flower import quick
import flwr.supercore.inflatable.inflatable_utils as pulls
import flwr.supercore.superexec.executor.subprocess_executor as executor
import flwr.supercore.superexec.run_superexec as asks
import flwr.supernode.start_client_internal as loop
for change in quick._CHANGES.values():
    change()
began = time.monotonic()
loop.time.sleep(3)
print(inspect.signature(pulls.pull_objects).parameters["initial_backoff"].default, time.monotonic() - began < 1)
class State:
    get_messages_legacy = lambda self, is_reply: [""] and 1 / 0
try:
    loop._push_messages(state=State(), object_store=None, send=None, push_object=None)
except ZeroDivisionError:  # it was rung by then
    asks.time.sleep(60)
print(time.monotonic() - began < 30)
print(executor.subprocess.Popen(["flwr-clientapp", "--help"], stdout=1) > 0)
"""
    environment = {"FLWR_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.split()[:4] == [str(BACKOFF), "True", "True", "True"]


@pytest.mark.long
@linux
def test_why_a_forked_command_ended_is_in_its_log():
    script = """
import os, sys
from silotune.distributed.flower.quick import fork
print(os.waitstatus_to_exitcode(os.waitpid(fork(["worker"], lambda: sys.exit("the reason")), 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "the reason\n")


def test_pauses_grow_with_what_is_waited_for(monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(quick, "time", type("clock", (), {"monotonic": lambda: now[0], "sleep": sleep}))
    pauses = Pauses()
    for _ in range(40):
        pauses.sleep(3)
    assert slept[:6] == [0.1] * 6, "at first"
    assert all(later <= 0.2 * sum(slept[:place]) + 1e-9 for place, later in enumerate(slept) if later > 0.1)
    assert slept[-1] == 3, "as Flower's own"
    for _ in range(200):
        pauses.sleep(3)
    assert all(later <= max(3, sum(slept[:place]) / 30 + 1e-9) for place, later in enumerate(slept))
    assert slept[-1] == 10, "while nothing runs"
    pauses.sleep(0.5)
    pauses.sleep(3)
    assert slept[-2:] == [0.5 / 30, 0.1], "anew where it waits for something else"
    for _ in range(4000):
        pauses.sleep(0.5)
    pauses.begin()
    pauses.sleep(0.5)
    assert slept[-2:] == [0.5, 0.5 / 30]


def test_a_bell_ends_a_pause_also_if_it_was_rung_before(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    Bell.ring()  # nobody is there yet
    bell, began = Bell(), time.monotonic()
    bell.sleep(0.01)
    bell.ring()
    bell.sleep(60)
    threading.Timer(0.05, Bell.ring).start()
    bell.sleep(60)
    assert time.monotonic() - began < 30
    again = Bell()  # as after a kill
    Bell.ring()
    again.sleep(60)
    assert time.monotonic() - began < 30


def test_a_bell_that_cannot_be_rung_ends_a_pause_after_a_second(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / ("long" * 50)))
    slept = []
    monkeypatch.setattr(quick.time, "sleep", slept.append)
    Bell().sleep(10)
    Bell.ring()
    assert slept == [1.0]
