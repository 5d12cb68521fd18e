"""Many runs over one setting: comparisons of methods over seeds, hyperparameter sweeps, task transfer, reports.

From low to high, each may import those before it:

- `report/`: tables, figures and pages about finished runs (its own order is in its docstring).
- `best_values`: the best values of a sweep, as `key=value` words.
- `search_space`: the keys and values that a sweep searches.
- `transfer`: finished runs opened for a transfer matrix.
- `comparison`: methods and variants × seeds, as cells with one configuration each.
- `runner`: runs the unfinished cells, in one process or several.
- `trial`: the cell of a sweep: a run without test rows.
- `compare`: a whole comparison from Python, with tables and report.
- `sweep`: hyperparameter search by grid or by optuna.
"""

from __future__ import annotations

from silotune.experiments.comparison import Cell, Comparison, read_comparison
from silotune.experiments.runner import run_cells

__all__ = ["Cell", "Comparison", "read_comparison", "run_cells"]
