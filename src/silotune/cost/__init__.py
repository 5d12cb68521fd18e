"""What a method costs on a backbone's shape: parameters, messages, floating-point operations, memory. No weights."""

from __future__ import annotations

from silotune.cost.estimate import Cost, estimate
from silotune.cost.paper_tables import papers_table

__all__ = ["Cost", "estimate", "papers_table"]
