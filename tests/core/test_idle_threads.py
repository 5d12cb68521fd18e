"""OpenMP's threads spin briefly and then sleep while they wait, unless the user's environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PRINT = """import os, sys, silotune
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)"""


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, ["passive", "5000"]), ({"GOMP_SPINCOUNT": "1"}, ["None", "1"]), ({"KMP_BLOCKTIME": "1"}, ["None", "None"])],
)
def test_importing_silotune_sets_it_before_torch_is_loaded(given, found):
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    ended = subprocess.run(
        [sys.executable, "-c", _PRINT], env=others | given, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [*found, "False"]
