"""The cost of a method from shapes alone: parameters, message sizes, floating-point operations, memory."""

from __future__ import annotations

from silotune.cost.estimate import Cost, estimate

__all__ = ["Cost", "estimate"]
