"""Freed memory stays with the process for the next batch.

The C library gives large blocks back to the system when they are freed, and the top of its heap with them; the system
hands them out again page by page, zeroed. A training step frees and takes the same hundreds of MiB every time: without
this, a tenth of its seconds went into getting its own memory back.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""

KEPT = 2**30
"""Bytes free at the top of the heap that are kept: more than a step of a small backbone takes."""

_LARGEST = 2**25
"""Bytes from which a block is mapped on its own, 32 MiB: the most that glibc lets one ask for."""


@cache
def keep_freed_memory() -> bool:
    """Ask the allocator for it, once per process; whether it is one that understands (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all([mallopt(_TRIM_THRESHOLD, KEPT), mallopt(_MMAP_THRESHOLD, _LARGEST)])
