"""Several methods × several seeds over one setting."""

from silotune.comparison.cells import run_cells
from silotune.comparison.plan import Cell, Comparison, read_comparison

__all__ = ["Cell", "Comparison", "read_comparison", "run_cells"]
