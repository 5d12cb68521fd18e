"""Freeze the garbage collector in the server that workers are forked from, so that forks share its memory.

`worker_pool` has it imported last. A collection writes into the objects that it visits, and a forked process would then
copy the memory that they lie in.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
