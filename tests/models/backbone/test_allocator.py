"""A training step reuses the memory of the one before, and asks the system for none."""

import platform
import subprocess
import sys

import pytest

from silotune.models.backbone.allocator import keep_freed_memory

STEPS, MIB, BLOCKS, PAGE = 5, 12, 10, 4096
PROGRAM = f"""
import resource, sys, torch
from silotune.models.backbone.allocator import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
def step():
    return [torch.ones({MIB} * 2**18) for _ in range({BLOCKS})]
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*words: str) -> int:
    process = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return int(process.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_the_pages_of_one_step_serve_the_next() -> None:
    assert keep_freed_memory()
    kept, given_back = _faults("keep"), _faults()
    assert kept < STEPS * BLOCKS * MIB * 2**20 // PAGE / 20
    assert given_back > 4 * kept, (
        "the system's own allocator does as well: silotune/models/backbone/allocator.py can go"
    )
