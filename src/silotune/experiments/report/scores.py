"""Numbers of the table: test scores over seeds, and shares of full fine-tuning."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from silotune.experiments.report.entries import FinishedRun, ReportEntry, silo_names

COLUMNS = ("method", "silo", "metric", "mean", "std", "n", "trainable_percent", "sent_percent", "bytes_up")

ATTACK_COLUMNS = ("asr_mean", "asr_std")

AVERAGE = "average"

_BYTES = 4  # of a parameter in float32


@dataclass(frozen=True)
class Score:
    """A test score (percent) over seeds; `std` is None where there are too few."""

    mean: float
    std: float | None
    n: int

    @property
    def text(self) -> str:
        """For reading."""
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def standard_deviation(values: Sequence[float], ddof: int) -> float | None:
    """The standard deviation with divisor n − ddof; None if that is not above 0."""
    if len(values) <= ddof:
        return None
    return statistics.pstdev(values) if ddof == 0 else statistics.stdev(values)


def scores_over_seeds(entry: ReportEntry, silo: str) -> list[float]:
    """The test score of every run that has one, for a silo or the average."""
    if silo == AVERAGE:
        found = [run.summary["average"] for run in entry.runs]
    else:
        found = [run.summary["silos"].get(silo, {}).get("test") for run in entry.runs]
    return [float(value) for value in found if value is not None]


def mean_score(entry: ReportEntry, silo: str, ddof: int = 1) -> Score | None:
    """Mean and standard deviation over seeds."""
    values = scores_over_seeds(entry, silo)
    return Score(statistics.fmean(values), standard_deviation(values, ddof), len(values)) if values else None


def any_attacked(entries: Sequence[ReportEntry]) -> bool:
    """Whether a backdoor was looked for in any run."""
    return any(run.summary.get("attack") for entry in entries for run in entry.runs)


def success_rate(entry: ReportEntry, silo: str = AVERAGE, ddof: int = 1) -> Score | None:
    """The attack's success rate (percent) over seeds, for a silo or the average; None where it was not measured."""
    owners = [(run.summary.get("attack") if silo == AVERAGE else run.summary["silos"].get(silo)) for run in entry.runs]
    values = [float(owner["asr"]) for owner in owners if owner and owner.get("asr") is not None]
    return Score(statistics.fmean(values), standard_deviation(values, ddof), len(values)) if values else None


def metric_name(entry: ReportEntry, silo: str) -> str:
    """The silo's metric; for the average the one that all share, else `mixed`."""
    silos = entry.first.summary["silos"]
    if silo != AVERAGE:
        return str(silos.get(silo, {}).get("metric", ""))
    shared = entry.first.summary.get("global") or {}
    names = {str(found["metric"]) for found in silos.values()} or {str(shared.get("metric", ""))}
    return names.pop() if len(names) == 1 else "mixed"


@dataclass(frozen=True)
class CostShares:
    """What a method trains and sends, in percent of full fine-tuning of the bare model with its head.

    `trained`, `adapters` (the trained parameters without heads) and `sent` are counts of parameters; `message` is the
    measured size of one silo's update, of that of all weights in float32. None where the backbone's size is unknown.
    """

    trained: float | None
    adapters: float | None
    sent: float | None
    message: float | None


def cost_shares(entry: ReportEntry) -> CostShares:
    """The shares of a row, from its first run."""
    run = entry.first
    full = full_parameters(run)

    def percent(number: float) -> float | None:
        return None if not full else 100 * number / full

    summary = run.summary
    return CostShares(
        percent(summary["trainable_parameters"]),
        percent(summary["adapter_parameters"]),
        percent(summary["sent_parameters"]),
        percent(message_bytes(run) / _BYTES),
    )


def message_bytes(run: FinishedRun) -> float:
    """The mean size of the updates that really left silos; 0 if none did."""
    sizes = [event["bytes_up"] for event in run.events_of("silo") if event.get("bytes_up")]
    return statistics.fmean(sizes) if sizes else 0.0


def full_parameters(run: FinishedRun) -> int | None:
    """Parameters of full fine-tuning: the bare model and its head (the largest, where silos' labels differ)."""
    tasks: dict[str, Any] = run.summary.get("tasks") or {}
    labels = max((len(task.get("labels") or ()) for task in tasks.values()), default=2)
    head = run.config.get("head") or {}
    return _full(str(run.summary["backbone"]), str(head.get("name", "mlp")), max(labels, 2))


@cache
def _full(backbone: str, head: str, labels: int) -> int | None:
    from silotune.cost.estimate import estimate
    from silotune.errors import InputError

    try:
        words = [f"backbone={backbone}", f"head={head}", "tuner=lora", f"labels={labels}"]
        return estimate("local", words, work=False).bare_parameters
    except InputError:  # the backbone is not here
        return None


def table_csv(entries: Sequence[ReportEntry], ddof: int) -> str:
    """`table.csv`: a row for every method and silo, and one for the average. Scores in percent.

    `bytes_up` is the run's total over all silos and rounds, as measured (mean over seeds). Where a backdoor was looked
    for, the attack's success rate comes as two more columns.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    backdoor = any_attacked(entries)
    writer.writerow([*COLUMNS, *(ATTACK_COLUMNS if backdoor else ())])
    for entry in entries:
        part, sent = cost_shares(entry), _plain(entry.mean_of("bytes_up"))
        for silo in [*silo_names([entry]), AVERAGE]:
            found = mean_score(entry, silo, ddof)
            if found is not None:
                percents = ("" if value is None else _plain(value) for value in (part.trained, part.sent))
                kind = metric_name(entry, silo)
                rate = _mean_and_std(success_rate(entry, silo, ddof)) if backdoor else []
                writer.writerow([entry.label, silo, kind, *_mean_and_std(found), found.n, *percents, sent, *rate])
    return text.getvalue()


def _mean_and_std(found: Score | None) -> list[str]:
    """Two cells; empty where there is nothing."""
    return ["", ""] if found is None else [_plain(found.mean), "" if found.std is None else _plain(found.std)]


def _plain(value: float) -> str:
    """All digits that matter; whole numbers without a point."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.6f}".rstrip("0")
