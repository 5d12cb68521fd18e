"""The numbers of finished runs as tidy frames of pandas: every table and figure of a report is made from these."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from silotune.data.tasks import lower_is_better, metric_range
from silotune.lab.report.entries import FinishedRun, ReportEntry, silo_names
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.runs.callbacks.base import logged_values
from silotune.runs.scores import (
    AVERAGE,
    BESIDE,
    baseline_of,
    baseline_titles,
    metric_of_column,
    metrics_of,
    ranks,
    score_of,
)

if TYPE_CHECKING:
    import pandas

MIB = 2**20

Interval = tuple[float, float]


@dataclass(frozen=True)
class MeanScore:
    """A score (percent, or a loss) over n seeds; `std` is None with too few of them."""

    mean: float
    std: float | None
    n: int

    @property
    def text(self) -> str:
        """The score for display."""
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def over_seeds(values: Sequence[float], ddof: int) -> MeanScore | None:
    """Return mean and standard deviation (divisor n − ddof) of values, one per seed; None without values."""
    if not values:
        return None
    deviation = statistics.stdev if ddof else statistics.pstdev
    return MeanScore(statistics.fmean(values), deviation(values) if len(values) > ddof else None, len(values))


class Results:
    """The results of a report's entries."""

    def __init__(self, entries: Sequence[ReportEntry], ddof: int = 1, plan: JudgingPlan | None = None) -> None:
        self.entries = tuple(entries)
        self.ddof = ddof
        self.plan = plan or JudgingPlan()
        self.runs = [run for entry in entries for run in entry.runs]
        self.silos = silo_names(entries)
        self.central = all(run.shares_test_rows for run in self.runs)
        """Whether every run tests all silos on the same rows."""
        metrics = [metrics_of(run.summary) for run in self.runs]
        unlike = dict.fromkeys(f"{AVERAGE} {name}" for names in metrics for name in names)
        self.averages = [AVERAGE] if all(len(names) <= 1 for names in metrics) else list(unlike)
        """The columns of averages: one, or one per metric if the silos of a run have unlike metrics."""
        judged = {str((run.config.get("partition") or {}).get("evaluation")) for run in self.runs}
        columns = [column for column, key in BESIDE.items() if any(key in run.summary for run in self.runs)]
        self.beside = [column for column in columns if {column} != {f"{kind} rows" for kind in judged}]
        """The columns of averages over the held-out rows that do not judge: silos' own, or those that all share."""

    @cached_property
    def parts(self) -> list[Results]:
        """The results of every data set; scores on different data cannot be compared."""
        groups: dict[str, list[ReportEntry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.first.evaluated_on, []).append(entry)
        return [Results(group, self.ddof, self.plan) for group in groups.values()] if len(groups) > 1 else [self]

    @property
    def distinct_silos(self) -> list[str]:
        """The silos that need a column each: none if every run has one model, tested on the same rows."""
        uniform = (len({silo.get("test") for silo in run.summary["silos"].values()}) <= 1 for run in self.runs)
        return [] if self.central and all(uniform) else self.silos

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """A row for every run and silo, and for every run and average; the rows of the baselines follow.

        Its columns are label, seed, column (a silo or an average), score, low and high (the 95 % interval over test
        rows) and asr (the success rate of a backdoor attack, in percent).
        """
        import pandas

        names = ["label", "seed", "column", "score", "low", "high", "asr"]
        frame = pandas.DataFrame([*self._scores(), *self._baselines()], columns=names)
        return frame.astype(dict.fromkeys(["score", "low", "high", "asr"], float))

    def _scores(self) -> Iterator[tuple[Any, ...]]:
        columns = dict.fromkeys([AVERAGE, *self.averages, *self.beside])
        for entry in self.entries:
            for run in entry.runs:
                summary = run.summary
                for column in [*summary["silos"], *columns]:
                    result = summary.get("attack") if column == AVERAGE else summary["silos"].get(column)
                    bounds = _interval_over_rows(summary, column) or (None, None)
                    rate = (result or {}).get("asr")
                    yield (entry.label, run.seed, column, score_of(summary, column), *bounds, rate)

    def _baselines(self) -> Iterator[tuple[Any, ...]]:
        """Yield the scores of baselines for every data set, over the seeds of the entry with most runs."""
        for number, part in enumerate(self.parts, 1):
            runs = max(part.entries, key=lambda entry: len(entry.runs)).runs
            for key, title in baseline_titles().items():
                label = title if len(self.parts) == 1 else f"{title}, data {number}"
                for run in runs:
                    for column in [*self.silos, *self.averages]:
                        yield (label, run.seed, column, baseline_of(run.summary, column, key), None, None, None)

    @cached_property
    def _cells(self) -> dict[tuple[str, str], dict[str, list[float]]]:
        """(label, column) → the values of its runs, by name."""
        grouped = self.frame.groupby(["label", "column"], sort=False)
        return dict(grouped[["score", "low", "high", "asr"]].agg(list).to_dict("index"))

    def values(self, label: str, column: str, name: str = "score") -> list[float]:
        """Return the known values of a label in a column, one per run."""
        return [value for value in self._cells.get((label, column), {}).get(name, []) if not math.isnan(value)]

    def score(self, label: str, column: str) -> MeanScore | None:
        """Return a label's score in a column over its seeds; None without any."""
        return over_seeds(self.values(label, column), self.ddof)

    def success_rate(self, label: str, column: str = AVERAGE) -> MeanScore | None:
        """Return the success rate of an attack (percent) over seeds; None if it was not measured."""
        return over_seeds(self.values(label, column, "asr"), self.ddof)

    def baselines(self, columns: Sequence[str]) -> list[str]:
        """Return the labels of the baselines that have a score in one of the columns."""
        labels = dict.fromkeys(label for label, _ in self._cells)
        others = [label for label in labels if all(label != entry.label for entry in self.entries)]
        return [label for label in others if any(self.values(label, column) for column in columns)]

    def metric(self, column: str, entry: ReportEntry | None = None) -> str:
        """Return the metric of a column as an entry's first run has it; `mixed` where silos have unlike ones."""
        summary = (entry or self.entries[0]).first.summary
        if metric := metric_of_column(column):
            return metric
        if column != AVERAGE and column not in BESIDE:
            return str(summary["silos"].get(column, {}).get("metric", ""))
        names = metrics_of(summary) or [str((summary.get("global") or {}).get("metric", ""))]
        return names[0] if len(names) == 1 else "mixed"

    def lower(self, column: str) -> bool:
        """Whether a lower score is better in a column."""
        return lower_is_better(self.metric(column))

    def rank(self, scores: Sequence[MeanScore | None], lower: bool) -> list[int]:
        """Rank the entries' scores, each among those on the same data: 1 for the best, 2 for the second, else 0."""
        means = [score.mean if score else None for score in scores]
        return ranks(means, [entry.first.evaluated_on for entry in self.entries], lower)

    def interval(self, entry: ReportEntry, column: str) -> Interval | None:
        """Return the 95 % interval of a score: over test rows, or over several seeds if that is wider.

        It lies within the bounds of the metric; None if the score or its interval is unknown.
        """
        scores, low, high = (self.values(entry.label, column, name) for name in ("score", "low", "high"))
        candidates = [_interval_over_seeds(scores)] if len(scores) > 1 else []
        if scores and len(low) >= len(scores):
            candidates.append((statistics.fmean(low), statistics.fmean(high)))
        if not candidates:
            return None
        widest = max(candidates, key=lambda bounds: bounds[1] - bounds[0])
        lowest, highest = metric_range(self.metric(column, entry))
        return max(lowest, widest[0]), min(highest, widest[1])

    def clear_winners(self, column: str) -> list[bool]:
        """Return for each entry whether its interval is better than, and disjoint from, all others on its data."""
        intervals = [self.interval(entry, column) for entry in self.entries]
        lower, winners = self.lower(column), []
        for entry, interval in zip(self.entries, intervals, strict=True):
            others = [
                rival
                for other, rival in zip(self.entries, intervals, strict=True)
                if other is not entry
                and other.first.evaluated_on == entry.first.evaluated_on
                and (rival is not None or self.values(other.label, column))
            ]
            winners.append(bool(others) and all(_apart(interval, other, lower) for other in others))
        return winners

    @cached_property
    def series(self) -> pandas.DataFrame:
        """A row for every number that a run logged: label, run, silo, round, name and value."""
        import pandas

        rows = (
            (entry.label, number, *row)
            for entry in self.entries
            for number, run in enumerate(entry.runs)
            for row in _logged(run)
        )
        return pandas.DataFrame(rows, columns=["label", "run", "silo", "round", "name", "value"])

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], pandas.DataFrame]:
        """(label, name) → its rows of `series`."""
        return dict(iter(self.series.groupby(["label", "name"], sort=False)))

    def logged(self, label: str, name: str, silo: str | None = None) -> pandas.DataFrame:
        """Return the rows of `series` of one label and name, of one silo if it is given."""
        rows = self._by_name.get((label, name), self.series.iloc[:0])
        return rows if silo is None else rows[rows["silo"] == silo]

    def curve(self, label: str, name: str, silo: str | None = None) -> pandas.DataFrame:
        """Average a logged number over silos and seeds, at the rounds that all runs have: round → mean and std.

        Traffic (`mib`) is summed over silos instead, and over the rounds so far.
        """
        import pandas

        by_run = self.logged(label, name, silo).groupby(["round", "run"])["value"]
        table = (by_run.sum() if name == "mib" else by_run.mean()).unstack("run").sort_index()
        table = (table.cumsum() if name == "mib" else table).dropna()
        return pandas.DataFrame({"mean": table.mean(axis=1), "std": table.std(axis=1, ddof=self.ddof)})

    def product_error(self, label: str) -> float | None:
        """Return the mean error of averaging LoRA's A and B, over rounds and seeds; None if they were not averaged."""
        values = self.logged(label, "product_error")["value"]
        return statistics.fmean(values) if len(values) else None

    def sent_by_silo(self, label: str) -> dict[str, float]:
        """Return silo → the MiB that it sent in a whole run, mean over seeds; silos that sent nothing are left out."""
        totals = self.logged(label, "up_mib").groupby("silo")["value"].sum()
        runs = next(len(entry.runs) for entry in self.entries if entry.label == label)
        return {str(silo): float(total) / runs for silo, total in totals.items() if total}

    def seconds(self, entry: ReportEntry) -> tuple[float, float]:
        """Return a run's seconds of training (at silos or coordinator) and its other seconds, as means over seeds."""
        total = entry.mean_of("seconds")
        training = float(self.logged(entry.label, "seconds")["value"].sum()) / len(entry.runs)
        return min(training, total), max(total - training, 0.0)


def _logged(run: FinishedRun) -> Iterator[tuple[str, int, str, float]]:
    """Yield (silo, round, name, value) from a run's events."""
    for event in run.events:
        kind, number, silo = event.get("event"), event.get("round", 0), str(event.get("silo", ""))
        if kind == "round":
            scores = (event.get("validation") or {}).items()
            yield from ((name, number, "validation", float(value)) for name, value in scores if value is not None)
        elif "product_error" in event:
            yield silo, number, "product_error", float(event["product_error"])
        elif kind in ("silo", "server", "final"):
            yield silo, number, "seconds", event.get("seconds", 0.0)
            if kind != "server":
                yield silo, number, "mib", (event.get("bytes_up", 0) + event.get("bytes_down", 0)) / MIB
            if kind == "silo":
                yield silo, number, "up_mib", event.get("bytes_up", 0) / MIB
                yield from ((silo, number, f"term {name}", value) for name, value in logged_values(event).items())


def _interval_over_rows(summary: Mapping[str, Any], column: str) -> Interval | None:
    """Return the bootstrap interval that a run has for a silo or for all silos, or make that of an average."""
    intervals: Mapping[str, Any] = summary.get("intervals") or {}
    by_silo: Mapping[str, Any] = intervals.get("silos") or {}
    metric = metric_of_column(column)
    averaged = column == AVERAGE or bool(metric)
    interval = (intervals.get("global") or intervals.get("average")) if averaged else by_silo.get(column)
    if interval is not None or not averaged:
        return None if interval is None else (float(interval[0]), float(interval[1]))
    silos = {
        name: float(silo["test"])
        for name, silo in summary["silos"].items()
        if silo.get("test") is not None and metric in ("", silo.get("metric"))
    }
    if not silos or any(by_silo.get(name) is None for name in silos):
        return None
    halves = [(by_silo[name][1] - by_silo[name][0]) / 2 for name in silos]
    half = math.sqrt(math.fsum(value**2 for value in halves)) / len(halves)
    mean = math.fsum(silos.values()) / len(silos)
    return mean - half, mean + half


def _interval_over_seeds(scores: Sequence[float]) -> Interval:
    from scipy.stats import t

    mean, number = statistics.fmean(scores), len(scores)
    half = float(t.ppf(0.975, number - 1)) * statistics.stdev(scores) / math.sqrt(number)
    return mean - half, mean + half


def _apart(best: Interval | None, other: Interval | None, lower: bool) -> bool:
    if best is None or other is None:
        return False
    return best[1] < other[0] if lower else best[0] > other[1]
