"""A training step reuses the memory of the one before, and asks the system for none."""

import platform
import subprocess
import sys

import pytest

from silotune.models.backbone.device import keep_freed_memory

STEPS, MIB, BLOCKS, PAGE = 5, 12, 10, 4096
PROGRAM = f"""
import resource, torch
from silotune.models.backbone.device import keep_freed_memory
def step():
    return [torch.ones({MIB} * 2**18) for _ in range({BLOCKS})]
def faults():
    step(), step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({STEPS}):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults()
keep_freed_memory()
print(faults(), given_back)
"""


def _faults() -> tuple[int, int]:
    """Page faults of the same steps with freed memory kept, and with the system's own allocator."""
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    kept, given_back = map(int, printed.split())
    return kept, given_back


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_the_pages_of_one_step_serve_the_next() -> None:
    assert keep_freed_memory()
    kept, given_back = _faults()
    assert kept < STEPS * BLOCKS * MIB * 2**20 // PAGE / 20
    assert given_back > 4 * kept, "the system's own allocator does as well: `keep_freed_memory` can go"
