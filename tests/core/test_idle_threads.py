"""OpenMP's threads spin briefly and then sleep while they wait, unless the user's environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from silotune.core.idle_threads import let_idle_threads_sleep

_PRINT = """import os, sys, silotune
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)"""


def test_importing_silotune_sets_it_before_torch_is_loaded():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    ended = subprocess.run([sys.executable, "-c", _PRINT], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["passive", "5000", "False"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_set_stays(name, monkeypatch):
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "1")
    let_idle_threads_sleep()
    assert os.environ[name] == "1"
    assert sum(variable in os.environ for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")) == 1
