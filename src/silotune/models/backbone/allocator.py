"""`keep_freed_memory` lets the C library keep freed memory for the next batch; `release_freed_memory` gives it back.

glibc returns large blocks to the system when they are freed, and the top of its heap with them; the system then hands
the pages out again one by one, zeroed. A training step frees and allocates the same hundreds of MiB every time: without
this setting, a tenth of its seconds is spent on page faults.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

TRIM_BYTES = 2**30
"""Free bytes kept at the top of the heap: more than one step of a small backbone allocates."""

_MMAP_BYTES = 2**25
"""Blocks of at least 32 MiB are mapped on their own: glibc's upper limit of the setting."""


@cache
def keep_freed_memory() -> bool:
    """Ask the allocator to keep freed memory, once per process.

    Returns:
        Whether the allocator accepted both settings (glibc does).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all([mallopt(_TRIM_THRESHOLD, TRIM_BYTES), mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)])


def release_freed_memory() -> None:
    """Return what was freed to the system once, after something large that does not come again (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
