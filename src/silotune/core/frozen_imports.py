"""Importing it calls `gc.freeze()`: the last import of the server that `worker_pool` forks processes from.

A collection writes into the objects that it visits, and a forked process would then copy the memory that they lie in.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
