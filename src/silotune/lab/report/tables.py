"""The tables of a report: scores, costs, runs; of single silos rows and baselines, metrics, labels, confusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from silotune.core.numeric import score_text
from silotune.data.kinds import KINDS
from silotune.data.tasks import NUMBER_METRICS, lower_is_better, metric_title
from silotune.errors import InputError
from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.frame import MIB, Interval, MeanScore, Results
from silotune.runs.scores import (
    ALWAYS_NAMED,
    UNTOUCHED_TITLE,
    average_text,
    backbones_text,
    baseline_of,
    baseline_titles,
    silo_metric,
)
from silotune.runs.storage.scored_rows import read_test_scores

if TYPE_CHECKING:
    import pandas

MOST_SILOS = 12
"""Number of silos up to which each has a column; beyond it the table has the average only (`table.csv` has all
silos)."""

_MOST_NAMES = 6
"""Silos of a metric that a title names."""

_BYTES_PER_WEIGHT = 4  # float32

_MOST_ROWS = 40
"""Silos up to which a page has tables with a row for each."""

_MOST_CLASSES = 12
"""Labels up to which a page has a confusion matrix, and names them in the table of silos."""

_METRICS = ("accuracy", "micro_f1", "macro_f1", "balanced_accuracy", "mcc", "auroc", "ece", *NUMBER_METRICS[1:])
_WRITTEN = ("rouge1", "rougeL", "exact_match", "loss", "perplexity")

INTERVAL_NOTE = (
    "Small numbers are 95 % intervals: by bootstrap over the test rows (of an average: of rows that its silos share, "
    "else from the silos' half-widths, as if independent), and with several seeds by Student's t over seeds, which is "
    "very wide with two, if that is wider. The best score is bold, the second underlined. A best score is green with a "
    "check mark only if its interval lies apart from those of all others on the same data; where none is, no winner is "
    "shown."
)

BASELINE_NOTE = (
    "Baselines learn from a silo's own training rows (of a partitioned data set, from all of them): the most frequent "
    "label (of numbers, their mean), and logistic (of numbers, ridge) regression over the TF-IDF of words and pairs of "
    "words."
)

_UNTOUCHED_NOTE = " The untouched backbone is the model without any training."

COST_NOTE = (
    "Percentages are of full fine-tuning of the bare model with its head: trained parameters with heads, the adapters "
    "among them alone, sent parameters, and one silo's update as it was really serialized against all weights in "
    "float32. MiB are totals over silos and rounds, sent by silos (up) and to them (down), mean over seeds. Product "
    "error: how far the aggregate's B·A is from the mean of the silos' B·A, in % of that mean, over rounds and seeds; "
    "–: no pair of LoRA's factors was averaged."
)


@dataclass(frozen=True)
class TableCell:
    """A cell of a table; the page adds its note in small letters.

    The rank is 1 for the best of the rows on the same data, 2 for the second, 0 otherwise. A score is clear if its
    interval overlaps none of the other rows.
    """

    text: str
    rank: int = 0
    clear: bool = False
    note: str = ""


@dataclass(frozen=True)
class ResultTable:
    """A titled table: `first` and `header` name its columns, to which the page adds `notes` in small letters.

    Where rows are silos, of which the page's reader can choose, `silos` names that of every row.
    """

    title: str
    header: list[str]
    rows: list[tuple[str, list[TableCell]]]
    first: str = "method"
    notes: Mapping[str, str] = field(default_factory=dict)
    silos: Sequence[str] = ()

    def frame(self) -> pandas.DataFrame:
        """Return the texts of all cells under the names of all columns."""
        import pandas

        rows = [[label, *(cell.text for cell in cells)] for label, cells in self.rows]
        return pandas.DataFrame(rows, columns=[self.first, *self.header])


def plain_table(
    title: str, rows: Iterable[tuple[str, Mapping[str, str]]], first: str = "method", silos: Sequence[str] = ()
) -> ResultTable:
    """Make a table without ranks from a label and the texts of all columns for each row."""
    rows = list(rows)
    cells = [(label, [TableCell(text) for text in texts.values()]) for label, texts in rows]
    return ResultTable(title, list(rows[0][1]) if rows else [], cells, first, {}, silos)


def score_table(results: Results) -> ResultTable:
    """Make the table of test scores, mean ± std over seeds; after an attack also its success rate (ASR)."""
    entries, silos = results.entries, results.distinct_silos
    columns = [*(silos if len(silos) <= MOST_SILOS else []), *results.averages, *results.beside]
    table = [_score_column(results, column) for column in columns]
    notes = {column: _column_note(results, column) for column in columns}
    header = [*columns]
    if any_attacked(results):
        header.append("ASR")
        rates = [results.success_rate(entry.label) for entry in entries]
        table.append([TableCell(score.text if score else "–") for score in rates])
    rows = [(entry.label, [column[number] for column in table]) for number, entry in enumerate(entries)]
    for label in results.baselines(columns):
        scores = [results.score(label, column) if column in columns else None for column in header]
        rows.append((label, [TableCell(score.text if score else "–") for score in scores]))
    seeds = sorted({len(entry.runs) for entry in entries})
    repeats = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    deviation = f"standard deviation ({'n − 1' if results.ddof else 'n'})"
    description = f"mean ± {deviation} over {repeats} seeds of {_drawn_by_seeds(results)}"
    repetitions = description if seeds[-1] > 1 else "one seed"
    ranking = "; best and second of each data set" if len(results.parts) > 1 else ""
    backbones = backbones_text(run.summary for run in results.runs)
    return ResultTable(f"{_what(entries)}, {repetitions}; {backbones}{ranking}", header, rows, notes=notes)


def baseline_notes(results: Results, scores: ResultTable) -> list[str]:
    """Return the note about the baselines in a table of scores, if it has some."""
    labels = [label for label, _ in scores.rows[len(results.entries) :]]
    untouched = any(label.startswith(UNTOUCHED_TITLE) for label in labels)
    return [BASELINE_NOTE + _UNTOUCHED_NOTE * untouched] if labels else []


def any_attacked(results: Results) -> bool:
    """Whether any run measured a backdoor attack."""
    return any(run.summary.get("attack") for run in results.runs)


def _score_column(results: Results, column: str) -> list[TableCell]:
    """Make a column of scores with ranks, intervals, and which of them is clearly the best."""
    scores = [results.score(entry.label, column) for entry in results.entries]
    cells = ranked_cells(results, scores, results.lower(column))
    notes = [interval_text(results.interval(entry, column)) for entry in results.entries]
    winners = results.clear_winners(column)
    return [replace(cell, clear=clear, note=note) for cell, clear, note in zip(cells, winners, notes, strict=True)]


def ranked_cells(results: Results, scores: Sequence[MeanScore | None], lower: bool) -> list[TableCell]:
    """Return a column's cells: each entry's score, with its rank among entries on the same data."""
    ranked = zip(scores, results.rank(scores, lower), strict=True)
    return [TableCell(score.text, rank) if score else TableCell("–") for score, rank in ranked]


def interval_text(interval: Interval | None) -> str:
    """Return the bounds for display; empty without an interval."""
    return "" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"


def _column_note(results: Results, column: str) -> str:
    """Return a silo's metric and number of test rows, as the first run that has the silo says; empty for averages."""
    for run in results.runs:
        if silo := run.summary["silos"].get(column):
            rows = (silo.get("rows") or {}).get("test")
            return silo_metric(run.summary, column) + ("" if rows is None else f", {rows:,} rows")
    return ""


def _what(entries: Sequence[ReportEntry]) -> str:
    """Describe the scores of a table: the metric of all silos, or those of each."""
    metrics: dict[str, dict[str, None]] = {}
    for entry in entries:
        for name in entry.first.summary["silos"]:
            metrics.setdefault(silo_metric(entry.first.summary, name), {})[name] = None
    unit = "" if all(map(lower_is_better, metrics)) else " (%)"
    if len(metrics) == 1:
        return f"test {next(iter(metrics))}{unit}"
    named = "; ".join(
        f"{metric}: {', '.join(names) if len(names) <= _MOST_NAMES else f'{len(names)} silos'}"
        for metric, names in metrics.items()
    )
    return f"test score{unit} by unlike metrics ({named})"


def _drawn_by_seeds(results: Results) -> str:
    """Say whether seeds differ in training only (`data.seed` is set) or also in the rows of the splits."""
    fixed = {run.rows_are_fixed for run in results.runs}
    return "training on the same rows" if fixed == {True} else "rows and training" if fixed == {False} else "runs"


def cost_shares(entry: ReportEntry) -> dict[str, float | None]:
    """Return what a method trains (with heads, and adapters alone) and sends, in percent of full fine-tuning.

    The message is one silo's update as measured, relative to all weights in float32. All runs of an entry have the
    shares of the first; they are None if the backbone's size is unknown. Full fine-tuning trains the bare model with a
    head for the task with most labels.
    """
    summary, head = entry.first.summary, entry.first.config.get("head") or {}
    tasks: dict[str, Any] = summary.get("tasks") or {}
    labels = max((len(task.get("labels") or ()) for task in tasks.values()), default=2)
    full = _full_parameters(str(summary["backbone"]), str(head.get("name", "mlp")), max(labels, 2))
    numbers = {
        "trained": summary["trainable_parameters"],
        "adapters": summary["adapter_parameters"],
        "sent": summary["sent_parameters"],
        "message": entry.first.message_bytes / _BYTES_PER_WEIGHT,
    }
    return {name: 100 * number / full if full else None for name, number in numbers.items()}


@cache
def _full_parameters(backbone: str, head: str, labels: int) -> int | None:
    from silotune.cost.estimate import estimate

    try:
        words = [f"backbone={backbone}", f"head={head}", "tuner=lora", f"labels={labels}"]
        return estimate("local", words, count_flops=False).bare_parameters
    except InputError:  # the backbone is not on this machine
        return None


def cost_table(results: Results) -> ResultTable:
    """Make the table of trained and sent parameters, messages and seconds; of LoRAs also of the error of averaging."""
    errors = {entry.label: results.product_error(entry.label) for entry in results.entries}
    averaged = any(error is not None for error in errors.values())
    rows = []
    for entry in results.entries:
        texts = {f"{name} %": _percent(value) for name, value in cost_shares(entry).items()}
        texts |= {f"{way} MiB": f"{entry.mean_of(f'bytes_{way}') / MIB:.2f}" for way in ("up", "down")}
        texts["seconds"] = f"{entry.mean_of('seconds'):.0f}"
        if averaged:
            error = errors[entry.label]
            texts["product error %"] = "–" if error is None else f"{100 * error:.2f}"
        rows.append((entry.label, texts))
    return plain_table("trained and sent, in % of full fine-tuning; measured messages", rows)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value else "0"


def runs_table(results: Results) -> ResultTable:
    """Make the table of all runs."""
    rows = []
    for entry, run in _labeled_runs(results):
        summary = run.summary
        speed = summary.get("samples_per_second")  # None: silos on machines of their own did not share their rows
        texts = {
            "folder": run.folder.name,
            "seed": str(run.seed),
            "average": average_text(summary),
            "best round": str(summary["best_round"]),
            "rounds": str(summary.get("rounds", "–")),
            "seconds": f"{summary['seconds']:.0f}",
            "rows/s": "–" if speed is None else f"{speed:.1f}",
            "state sha256": str(summary.get("state_sha256", "–"))[:12],
        }
        rows.append((entry.label, texts))
    return plain_table("every run; rows/s are those of local training", rows)


def _labeled_runs(results: Results) -> list[tuple[ReportEntry, FinishedRun]]:
    return [(entry, run) for entry in results.entries for run in entry.runs]


def privacy_table(results: Results) -> ResultTable | None:
    """Make the table of the guarantee of every run with noise; None without any."""
    rows = []
    for entry, run in _labeled_runs(results):
        if guarantee := run.summary.get("privacy"):
            texts = {"folder": run.folder.name, "mechanism": str(guarantee["mechanism"])}
            for title, key in (("ε a round", "epsilon_round"), ("ε in total", "epsilon_total")):
                texts[title] = "–" if guarantee[key] is None else f"{guarantee[key]:.4g}"
            texts |= {"δ": f"{guarantee['delta']:g}", "participations": str(guarantee["participations"])}
            rows.append((entry.label, texts))
    return plain_table("differential privacy of every noised run", rows) if rows else None


def rows_table(results: Results) -> ResultTable | None:
    """Make the table of the silos: metric, rows of the splits, labels, baselines. Numbers are of the first run."""
    if len(results.silos) > _MOST_ROWS:
        return None
    runs = {name: run for run in reversed(results.runs) for name in run.summary["silos"]}
    titles = baseline_titles()
    scores = {(name, key): baseline_of(runs[name].summary, name, key) for name in results.silos for key in titles}
    scored = {key for (_, key), score in scores.items() if score is not None}
    rows = []
    for name in results.silos:
        run = runs[name]
        task = (run.summary.get("tasks") or {}).get(name, {})
        counts = run.summary["silos"][name].get("rows") or {}
        texts = {"task": str(task.get("name", "–")), "metric": silo_metric(run.summary, name)}
        for split in ("train", "validation", "test"):
            texts[split] = f"{counts[split]:,}" if split in counts else "–"
        numbers = not task.get("labels") and KINDS[task.get("kind", "classification")].labeled
        classes = "numbers" if numbers else _classes(task.get("labels") or [], _details(run).get(name, {}))
        texts["classes (test rows)"] = classes
        for key, title in titles.items():
            if key in ALWAYS_NAMED or key in scored:
                texts[title] = score_text(scores[name, key])
        rows.append((name, texts))
    title = "rows of every silo, and its baselines (%), with the first seed"
    return plain_table(title, rows, "silo", results.silos)


def _classes(labels: Sequence[str], details: Mapping[str, Any]) -> str:
    """Name a task's labels with their test rows, if these are known; only their number if there are many."""
    if not labels or len(labels) > _MOST_CLASSES:
        return str(len(labels)) if labels else "–"
    counts = details.get("per_class") or {}
    return ", ".join(f"{label} ({counts[label]['rows']:,})" if label in counts else str(label) for label in labels)


def metrics_table(run: FinishedRun) -> ResultTable | None:
    """Make the table of all metrics per silo with the interval of its score; None without `scores.json`."""
    by_silo = _details(run)
    if not by_silo:
        return None
    names = [name for name in (*_METRICS, *_WRITTEN) if any(name in details["metrics"] for details in by_silo.values())]
    rows = []
    for silo, details in by_silo.items():
        texts = {
            "metric": metric_title(details["metric"], details.get("positive", "")),
            "score": score_text(details["score"]),
            "95 % interval": interval_text(details["intervals"].get(details["metric"])) or "–",
        }
        answer, percent = details.get("commonest") or ("–", None)
        texts["commonest answer"] = answer if percent is None else f"{answer} ({percent:.0f} %)"
        rows.append((silo, texts | {metric_title(name): score_text(details["metrics"].get(name)) for name in names}))
    return plain_table(f"test rows in all metrics, seed {run.seed}", rows, "silo", list(by_silo))


def classes_table(results: Results) -> ResultTable | None:
    """Make the table of F1 per silo, label and method, mean over seeds; None without labels."""
    import pandas

    scores = [
        (silo, label, entry.label, counts["rows"], counts["f1"])
        for entry, run in _labeled_runs(results)
        for silo, details in _details(run).items()
        for label, counts in (details.get("per_class") or {}).items()
    ]
    frame = pandas.DataFrame(scores, columns=["silo", "label", "method", "rows", "f1"])
    rows, silos = [], []
    for (silo, label), of_label in frame.groupby(["silo", "label"], sort=False):
        least, most = of_label["rows"].min(), of_label["rows"].max()
        means = of_label.groupby("method")["f1"].agg(statistics.fmean)
        texts = {"test rows": f"{least:,}" if least == most else f"{least:,} to {most:,}"}
        texts |= {entry.label: score_text(means.get(entry.label)) for entry in results.entries}
        rows.append((f"{silo}: {label}", texts))
        silos.append(str(silo))
    return plain_table("F1 per label (%), mean over seeds", rows, "silo and label", silos) if rows else None


def confusions(results: Results) -> list[tuple[str, str, list[str], Sequence[Sequence[int]]]]:
    """Return silo, entry, labels and confusion matrix of every entry's first run; none of tasks with many labels.

    A matrix has a row for each true label: its test rows by predicted label.
    """
    details = [(entry.label, _details(entry.first)) for entry in results.entries]
    return [
        (silo, label, list(by_silo[silo]["per_class"]), matrix)
        for silo in dict.fromkeys(name for _, by_silo in details for name in by_silo)
        for label, by_silo in details
        if (matrix := by_silo.get(silo, {}).get("confusion")) and len(matrix) <= _MOST_CLASSES
    ]


def _details(run: FinishedRun) -> dict[str, Mapping[str, Any]]:
    """Return silo → details of `scores.json`, or those of all silos together; empty if there are none or too many."""
    content = read_test_scores(run.folder) or {}
    if content.get("global"):
        return {"all silos": content["global"]}
    silos: dict[str, Mapping[str, Any]] = content.get("silos") or {}
    return silos if len(silos) <= _MOST_ROWS else {}
