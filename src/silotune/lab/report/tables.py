"""The tables of a report: scores, costs, runs; of single silos rows and baselines, metrics, labels, confusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from silotune.core.numeric import score_text
from silotune.data.tasks import NUMBER_METRICS, lower_is_better, metric_title
from silotune.errors import InputError
from silotune.evaluation.untouched import UNTOUCHED
from silotune.lab.report.entries import FinishedRun, ReportEntry
from silotune.lab.report.frame import MIB, Interval, Results, Score
from silotune.runs.scores import TITLES, WHERE_FOUND, average_text, backbones_text, baseline_of, silo_metric
from silotune.runs.storage.scored_rows import read_test_scores

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
    "Small numbers are 95 % intervals: by bootstrap over the test rows (of an average: from its silos' half-widths, as "
    "if independent), and with several seeds by Student's t over seeds, which is very wide with two, if that is wider. "
    "The best score is bold, the second underlined. A best score is green with a check mark only if its interval lies "
    "apart from those of all others on the same data; where none is, no winner is shown."
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

    def texts(self) -> tuple[str, list[str], list[list[str]]]:
        """Return title, names of all columns and rows as texts."""
        rows = [[label, *(cell.text for cell in cells)] for label, cells in self.rows]
        return self.title, [self.first, *self.header], rows


def plain_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[tuple[str, Sequence[str]]],
    first: str = "method",
    silos: Sequence[str] = (),
) -> ResultTable:
    """Make a table of texts without ranks."""
    cells = [(label, [TableCell(text) for text in texts]) for label, texts in rows]
    return ResultTable(title, [*header], cells, first, {}, silos)


def score_table(results: Results) -> ResultTable:
    """Make the table of test scores, mean ± std over seeds; after an attack also its success rate (ASR)."""
    entries, silos = results.entries, results.distinct_silos
    columns = [*(silos if len(silos) <= MOST_SILOS else []), *results.averages]
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
    drawn = f"mean ± {deviation} over {repeats} seeds of {_drawn_by_seeds(results)}"
    repetitions = drawn if seeds[-1] > 1 else "one seed"
    ranking = "; best and second of each data set" if len(results.parts) > 1 else ""
    backbones = backbones_text(run.summary for run in results.runs)
    return ResultTable(f"{_what(entries)}, {repetitions}; {backbones}{ranking}", header, rows, notes=notes)


def baseline_notes(results: Results, scores: ResultTable) -> list[str]:
    """Return the note about the baselines in a table of scores, if it has some."""
    labels = [label for label, _ in scores.rows[len(results.entries) :]]
    untouched = any(label.startswith(TITLES[UNTOUCHED]) for label in labels)
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


def ranked_cells(results: Results, scores: Sequence[Score | None], lower: bool) -> list[TableCell]:
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


@dataclass(frozen=True)
class CostShares:
    """Numbers that a method trains (with heads, and adapters alone) and sends, in percent of full fine-tuning.

    The message is one silo's update as measured, relative to all weights in float32. None if the size is unknown.
    """

    trained: float | None
    adapters: float | None
    sent: float | None
    message: float | None


def cost_shares(entry: ReportEntry) -> CostShares:
    """Return the shares of an entry; all its runs have those of the first.

    Full fine-tuning trains the bare model with a head for the task with most labels.
    """
    summary, head = entry.first.summary, entry.first.config.get("head") or {}
    tasks: dict[str, Any] = summary.get("tasks") or {}
    labels = max((len(task.get("labels") or ()) for task in tasks.values()), default=2)
    full = _full_parameters(str(summary["backbone"]), str(head.get("name", "mlp")), max(labels, 2))
    trained, adapters, sent = (summary[f"{kind}_parameters"] for kind in ("trainable", "adapter", "sent"))
    numbers = (trained, adapters, sent, entry.first.message_bytes / _BYTES_PER_WEIGHT)
    return CostShares(*(100 * number / full if full else None for number in numbers))


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
    errors = [results.product_error(entry.label) for entry in results.entries]
    averaged = any(error is not None for error in errors)
    header = ["trained %", "adapters %", "sent %", "message %", "up MiB", "down MiB", "seconds"]
    rows = []
    for entry, error in zip(results.entries, errors, strict=True):
        shares = cost_shares(entry)
        texts = [_percent(value) for value in (shares.trained, shares.adapters, shares.sent, shares.message)]
        texts += [f"{entry.mean_of(key) / MIB:.2f}" for key in ("bytes_up", "bytes_down")]
        texts += [f"{entry.mean_of('seconds'):.0f}"]
        texts += ["–" if error is None else f"{100 * error:.2f}"] if averaged else []
        rows.append((entry.label, texts))
    header += ["product error %"] if averaged else []
    return plain_table("trained and sent, in % of full fine-tuning; measured messages", header, rows)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value else "0"


def runs_table(results: Results) -> ResultTable:
    """Make the table of all runs."""
    rows = []
    for entry in results.entries:
        for run in entry.runs:
            summary = run.summary
            texts = [run.folder.name, str(run.seed), average_text(summary), str(summary["best_round"])]
            texts += [str(summary.get("rounds", "–")), f"{summary['seconds']:.0f}"]
            speed = summary.get("samples_per_second")  # None: silos on machines of their own did not share their rows
            texts += ["–" if speed is None else f"{speed:.1f}", str(summary.get("state_sha256", "–"))[:12]]
            rows.append((entry.label, texts))
    header = ["folder", "seed", "average", "best round", "rounds", "seconds", "rows/s", "state sha256"]
    return plain_table("every run; rows/s are those of local training", header, rows)


def privacy_table(results: Results) -> ResultTable | None:
    """Make the table of the guarantee of every run with noise; None without any."""
    rows = []
    for entry in results.entries:
        for run in entry.runs:
            if found := run.summary.get("privacy"):
                spent = [found[key] for key in ("epsilon_round", "epsilon_total")]
                epsilons = ["–" if epsilon is None else f"{epsilon:.4g}" for epsilon in spent]
                texts = [run.folder.name, str(found["mechanism"]), *epsilons]
                rows.append((entry.label, [*texts, f"{found['delta']:g}", str(found["participations"])]))
    header = ["folder", "mechanism", "ε a round", "ε in total", "δ", "participations"]
    return plain_table("differential privacy of every noised run", header, rows) if rows else None


def rows_table(results: Results) -> ResultTable | None:
    """Make the table of the silos: metric, rows of the splits, labels, baselines. Numbers are of the first run."""
    if len(results.silos) > _MOST_ROWS:
        return None
    known = {name: run for run in reversed(results.runs) for name in run.summary["silos"]}
    found = {(name, key): baseline_of(known[name].summary, name, key) for name in results.silos for key in TITLES}
    scored = {key for (_, key), score in found.items() if score is not None}
    baselines = [key for key in TITLES if key not in WHERE_FOUND or key in scored]
    rows = []
    for name in results.silos:
        run = known[name]
        task = (run.summary.get("tasks") or {}).get(name, {})
        counts = run.summary["silos"][name].get("rows") or {}
        texts = [str(task.get("name", "–")), silo_metric(run.summary, name)]
        texts += [f"{counts[split]:,}" if split in counts else "–" for split in ("train", "validation", "test")]
        numbers = task.get("kind") == "regression"
        texts.append("numbers" if numbers else _classes(task.get("labels") or [], _details(run).get(name, {})))
        rows.append((name, [*texts, *(score_text(found[name, key]) for key in baselines)]))
    header = ["task", "metric", "train", "validation", "test", "classes (test rows)", *(TITLES[b] for b in baselines)]
    title = "rows of every silo, and its baselines (%), with the first seed"
    return plain_table(title, header, rows, "silo", results.silos)


def _classes(labels: Sequence[str], details: Mapping[str, Any]) -> str:
    """Name a task's labels with their test rows, if these are known; only their number if there are many."""
    if not labels or len(labels) > _MOST_CLASSES:
        return str(len(labels)) if labels else "–"
    counts = details.get("per_class") or {}
    return ", ".join(f"{label} ({counts[label]['rows']:,})" if label in counts else str(label) for label in labels)


def metrics_table(run: FinishedRun) -> ResultTable | None:
    """Make the table of all metrics per silo with the interval of its score; None without `scores.json`."""
    found = _details(run)
    if not found:
        return None
    names = [name for name in (*_METRICS, *_WRITTEN) if any(name in details["metrics"] for details in found.values())]
    rows = []
    for label, details in found.items():
        texts = [metric_title(details["metric"], details.get("positive", "")), score_text(details["score"])]
        texts.append(interval_text(details["intervals"].get(details["metric"])) or "–")
        rows.append((label, [*texts, *(score_text(details["metrics"].get(name)) for name in names)]))
    header = ["metric", "score", "95 % interval", *map(metric_title, names)]
    return plain_table(f"test rows in all metrics, seed {run.seed}", header, rows, "silo", list(found))


def classes_table(results: Results) -> ResultTable | None:
    """Make the table of F1 per silo, label and method, mean over seeds; None without labels."""
    import pandas

    found = [
        (f"{silo}: {label}", silo, entry.label, counts["rows"], counts["f1"])
        for entry in results.entries
        for run in entry.runs
        for silo, details in _details(run).items()
        for label, counts in (details.get("per_class") or {}).items()
    ]
    frame = pandas.DataFrame(found, columns=["row", "silo", "method", "rows", "f1"])
    rows = []
    for label, of_label in frame.groupby("row", sort=False):
        least, most = of_label["rows"].min(), of_label["rows"].max()
        by_method = of_label.groupby("method")["f1"].agg(statistics.fmean)
        scores = [score_text(by_method.get(entry.label)) for entry in results.entries]
        rows.append((str(label), [f"{least:,}" if least == most else f"{least:,} to {most:,}", *scores]))
    header = ["test rows", *(entry.label for entry in results.entries)]
    silos = list(frame.drop_duplicates("row")["silo"])
    return plain_table("F1 per label (%), mean over seeds", header, rows, "silo and label", silos) if rows else None


@dataclass(frozen=True)
class Confusion:
    """How one entry's first run answers a silo's test rows.

    Each true label has a row: per predicted label the number of test rows, and their share of that row.
    """

    silo: str
    entry: str
    labels: Sequence[str]
    rows: Sequence[Sequence[tuple[int, float]]]


def confusions(results: Results) -> list[Confusion]:
    """Return the confusion matrices of every entry's first run, silo by silo; none of tasks with many labels."""
    found = []
    details = [(entry.label, _details(entry.first)) for entry in results.entries]
    for silo in dict.fromkeys(name for _, of_entry in details for name in of_entry):
        for label, of_entry in details:
            matrix = of_entry.get(silo, {}).get("confusion")
            if matrix and len(matrix) <= _MOST_CLASSES:
                shares = [[(number, number / max(1, sum(row))) for number in row] for row in matrix]
                found.append(Confusion(silo, label, list(of_entry[silo]["per_class"]), shares))
    return found


def _details(run: FinishedRun) -> dict[str, Mapping[str, Any]]:
    """Return silo → details of `scores.json`, or those of all silos together; empty if there are none or too many."""
    content = read_test_scores(run.folder) or {}
    if content.get("global"):
        return {"all silos": content["global"]}
    silos: dict[str, Mapping[str, Any]] = content.get("silos") or {}
    return silos if len(silos) <= _MOST_ROWS else {}
