"""Imported last by a fork server: what was imported before is left out of garbage collections from here on.

A collection writes into the objects that it visits, and a forked process would then copy the memory that they lie in.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
