"""Tables, figures and pages about finished runs; the lowest package of `experiments`.

From low to high, each may import those before it:

- `stylesheet`: CSS of the page.
- `ranking`: best and second-best scores.
- `entries`: finished run folders, grouped into the entries (rows of the tables) of a report.
- `scores`: test scores, means and standard deviations over seeds.
- `cost_shares`: what a run trained and sent, in percent of full fine-tuning.
- `significance`: paired tests between rows.
- `series`: series over rounds from the event logs.
- `svg`: drawing of small diagrams.
- `figures`: the report's figures.
- `tables_by_method`: tables with one row per method, as terminal output, Markdown, LaTeX and HTML.
- `caveats`: warnings about the numbers, and which parts left the silos.
- `html_page`: the report; `table_files`: the table as CSV, Markdown and LaTeX files.
- `personalization`, `transfer_matrices`, `partition_heatmap`: tables and figures of special evaluations.
- `result_table`, `live_view`: a run's result table and live progress in the terminal; `tensorboard`: its event files.
"""

from __future__ import annotations
