"""Many runs over one setting: comparisons of methods over seeds, sweeps, task transfer, reports."""

from __future__ import annotations

from silotune.experiments.comparison import Cell, Comparison, read_comparison
from silotune.experiments.runner import run_cells

__all__ = ["Cell", "Comparison", "read_comparison", "run_cells"]
