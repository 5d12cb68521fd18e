"""The cost of a method from shapes alone (parameters, messages, FLOPs, memory); its parts on a loaded backbone."""

from __future__ import annotations

from silotune.cost.estimate import Cost, estimate

__all__ = ["Cost", "estimate"]
