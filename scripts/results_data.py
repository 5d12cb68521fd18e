"""The numbers behind docs/results: what `docs/results/data` keeps of runs, and the tables that pages make of it.

`python -m scripts.results_data keep NAME FOLDER` takes the finished runs of a comparison's folder into
`docs/results/data/NAME`: `runs.json` has the environments of all runs, the first one's configuration, of each other one
what differs from it, and scores by silo, `rows.parquet` the label, the prediction, the weight and the unit of every
test row, but no texts. `python -m scripts.results_data pages` writes every table between a page's markers anew, which
tests/docs/test_results_data.py compares:

    <!-- data: NAME scores -->      or verdicts
    <!-- end of data -->
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas

from silotune.lab.report.entries import FinishedRun, ReportEntry, read_entries
from silotune.lab.report.frame import Results
from silotune.lab.report.judging import NOTE, verdict_table
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.lab.report.table_files import as_markdown
from silotune.lab.report.tables import ResultTable, score_table
from silotune.runs.storage.scored_rows import PREDICTIONS_FILE

PAGES = Path(__file__).parents[1] / "docs" / "results"

DATA = PAGES / "data"

MOST_BYTES = 3 * 10**6
"""Size of all data together."""

_KEPT = ("method", "seed", "rounds", "backbone", "silos", "tasks", "global", "average", "averages", "average_own")
_KEPT += ("average_shared", "best_round", "bytes_up", "bytes_down", "seconds", "intervals", "baselines", "state_sha256")
_COLUMNS = ("silo", "row", "label", "predicted", "weight", "unit")

_MOST_OPTIONS = 50
"""Different answers of a task up to which they are options, not texts."""

_BLOCK = re.compile(r"(<!-- data: (\S+) (scores|verdicts) -->\n).*?(<!-- end of data -->)", re.DOTALL)


def keep(name: str, comparison: Path, data: Path = DATA) -> Path:
    """Write what is kept of a comparison's finished runs into `data/NAME`; return that folder."""
    entries, folder = read_entries([comparison]), data / name
    folder.mkdir(parents=True, exist_ok=True)
    runs, rows, environments = [], [], []
    for entry in entries:
        for run in entry.runs:
            summary = {key: run.summary[key] for key in _KEPT if key in run.summary}
            versions = json.loads((run.folder / "versions.json").read_text(encoding="utf-8"))
            fingerprints = versions.pop("rows", None)
            if versions not in environments:
                environments.append(versions)
            about = {"entry": entry.label, "summary": summary, "config": run.config, "rows": fingerprints}
            about["environment"] = environments.index(versions)
            runs.append(_without_folders(about))
            if (run.folder / PREDICTIONS_FILE).is_file():
                rows.append(_rows_kept(run).assign(run=len(runs) - 1))
    plan = JudgingPlan.read(comparison) or JudgingPlan()
    first = runs[0]["config"]
    for run in runs[1:]:
        run["config"] = {key: value for key, value in run["config"].items() if value != first[key]}
    content = {"judging": plan.fields(), "environments": environments, "runs": runs}
    (folder / "runs.json").write_text(json.dumps(content, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    if rows:
        together = pandas.concat(rows).astype(dict.fromkeys(("silo", "label", "predicted", "unit"), "category"))
        together.to_parquet(folder / "rows.parquet", index=False, compression="zstd")
    return folder


def _rows_kept(run: FinishedRun) -> pandas.DataFrame:
    """Return the test rows of silos whose answers are labels, numbers or options: others may be anybody's texts."""
    rows = pandas.read_parquet(run.folder / PREDICTIONS_FILE).reindex(columns=list(_COLUMNS))
    texts = {name for name, task in run.summary["tasks"].items() if task.get("kind") == "generation"}
    of_silo = rows["silo"].fillna(next(iter(run.summary["tasks"])))
    many = of_silo.map(rows["label"].groupby(of_silo).nunique()) > _MOST_OPTIONS
    return rows[~(of_silo.isin(texts) & many)]


def _without_folders(value: Any) -> Any:
    """Return JSON values in which absolute paths are their last names."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def results_of(name: str, data: Path = DATA) -> Results:
    """Read what was kept of a comparison, as its report reads its folders."""
    content = json.loads((data / name / "runs.json").read_text(encoding="utf-8"))
    file = data / name / "rows.parquet"
    rows = pandas.read_parquet(file) if file.is_file() else pandas.DataFrame({"run": []})
    entries: dict[str, list[FinishedRun]] = {}
    for number, fields in enumerate(content["runs"]):
        run = FinishedRun(data / name, fields["summary"], content["runs"][0]["config"] | fields["config"])
        run.__dict__["predictions"] = _predictions(rows[rows["run"] == number])
        entries.setdefault(fields["entry"], []).append(run)
    plan = content["judging"]
    plan |= {key: tuple(plan[key]) for key in ("looks", "seen", "remarks")}
    return Results([ReportEntry(label, tuple(runs)) for label, runs in entries.items()], plan=JudgingPlan(**plan))


def _predictions(rows: pandas.DataFrame) -> dict[str, dict[str, list[Any]]]:
    """Return silo → columns, as `FinishedRun.predictions` does; columns without any value are left out."""
    table = rows.astype({name: object for name in rows if rows[name].dtype == "category"}).dropna(axis=1, how="all")
    silos = table["silo"].fillna("") if "silo" in table else pandas.Series("", index=table.index)
    columns = [name for name in table if name not in ("run", "silo")]
    return {
        str(silo): {name: list(of_silo[name]) for name in columns} | {"prompt": [None] * len(of_silo)}
        for silo, of_silo in table.groupby(silos, sort=True)
    }


def _verdicts(results: Results) -> ResultTable:
    table = verdict_table(results)
    assert table is not None, "a comparison has two entries"
    return table


MADE: dict[str, Callable[[Results], str]] = {
    "scores": lambda results: as_markdown(score_table(results)),
    "verdicts": lambda results: f"{as_markdown(_verdicts(results))}\n{NOTE}\n",
}
"""Word in a marker → the Markdown that stands there."""


def with_tables(page: str, data: Path = DATA) -> str:
    """Return a page with all tables between markers made anew."""
    of = cache(partial(results_of, data=data))  # scores and verdicts are of the same runs
    return _BLOCK.sub(lambda match: f"{match[1]}{MADE[match[3]](of(match[2]))}{match[4]}", page)


def main(words: list[str]) -> None:
    if words[:1] == ["keep"] and len(words) == 3:
        print(keep(words[1], Path(words[2])))
    elif words == ["pages"]:
        for page in sorted(PAGES.glob("*.md")):
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.exit(f"{__doc__}\ngot {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
