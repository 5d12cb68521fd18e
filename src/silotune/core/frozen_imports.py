"""Imported last by the server that `worker_pool` forks from: calls `gc.freeze()`, so that forks share its memory.

A collection writes into the objects that it visits, and a forked process would then copy the memory that they lie in.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
