"""Test scores over seeds, shares of full fine-tuning, and `table.csv`."""

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

_BYTES = 4  # per float32 parameter


@dataclass(frozen=True)
class Score:
    """A test score (percent) over seeds.

    Args:
        mean: mean over seeds.
        std: standard deviation; None with too few seeds.
        n: number of seeds.
    """

    mean: float
    std: float | None
    n: int

    @property
    def text(self) -> str:
        """The score for display."""
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def standard_deviation(values: Sequence[float], ddof: int) -> float | None:
    """Return the standard deviation with divisor n − ddof; None if the divisor is not positive."""
    if len(values) <= ddof:
        return None
    return statistics.pstdev(values) if ddof == 0 else statistics.stdev(values)


def scores_over_seeds(entry: ReportEntry, silo: str) -> list[float]:
    """Return the test score of every run that has one, for a silo or the average."""
    if silo == AVERAGE:
        scores = [run.summary["average"] for run in entry.runs]
    else:
        scores = [run.summary["silos"].get(silo, {}).get("test") for run in entry.runs]
    return [float(value) for value in scores if value is not None]


def mean_score(entry: ReportEntry, silo: str, ddof: int = 1) -> Score | None:
    """Return mean and standard deviation of a silo's test score over seeds; None without scores."""
    values = scores_over_seeds(entry, silo)
    return Score(statistics.fmean(values), standard_deviation(values, ddof), len(values)) if values else None


def any_attacked(entries: Sequence[ReportEntry]) -> bool:
    """Whether any run measured a backdoor attack."""
    return any(run.summary.get("attack") for entry in entries for run in entry.runs)


def success_rate(entry: ReportEntry, silo: str = AVERAGE, ddof: int = 1) -> Score | None:
    """Return the attack's success rate (percent) over seeds, for a silo or the average; None if not measured."""
    owners = [(run.summary.get("attack") if silo == AVERAGE else run.summary["silos"].get(silo)) for run in entry.runs]
    values = [float(owner["asr"]) for owner in owners if owner and owner.get("asr") is not None]
    return Score(statistics.fmean(values), standard_deviation(values, ddof), len(values)) if values else None


def metric_name(entry: ReportEntry, silo: str) -> str:
    """Return a silo's metric; for the average the common one, or `mixed`."""
    silos = entry.first.summary["silos"]
    if silo != AVERAGE:
        return str(silos.get(silo, {}).get("metric", ""))
    central = entry.first.summary.get("global") or {}
    names = {str(silo_summary["metric"]) for silo_summary in silos.values()} or {str(central.get("metric", ""))}
    return names.pop() if len(names) == 1 else "mixed"


@dataclass(frozen=True)
class CostShares:
    """What a method trains and sends, in percent of full fine-tuning; None if the backbone's size is unknown.

    Args:
        trained: trained parameters, with heads.
        adapters: trained parameters without heads.
        sent: sent parameters.
        message: measured bytes of one silo's update, relative to all weights in float32.
    """

    trained: float | None
    adapters: float | None
    sent: float | None
    message: float | None


def cost_shares(entry: ReportEntry) -> CostShares:
    """Return the shares of a row, from its first run."""
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
    """Return the mean size of the updates that left silos; 0 if none did."""
    sizes = [event["bytes_up"] for event in run.events_of("silo") if event.get("bytes_up")]
    return statistics.fmean(sizes) if sizes else 0.0


def full_parameters(run: FinishedRun) -> int | None:
    """Count the parameters of full fine-tuning: the bare model and its largest head; None if unknown."""
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
    except InputError:  # the backbone is not on this machine
        return None


def table_csv(entries: Sequence[ReportEntry], ddof: int) -> str:
    """Return `table.csv`: a row for every method and silo, and one for the average; scores in percent.

    `bytes_up` is the measured total over all silos and rounds (mean over seeds). With a backdoor attack, two more
    columns have its success rate.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    backdoor = any_attacked(entries)
    writer.writerow([*COLUMNS, *(ATTACK_COLUMNS if backdoor else ())])
    for entry in entries:
        shares, sent = cost_shares(entry), _plain(entry.mean_of("bytes_up"))
        for silo in [*silo_names([entry]), AVERAGE]:
            silo_score = mean_score(entry, silo, ddof)
            if silo_score is not None:
                percents = ("" if value is None else _plain(value) for value in (shares.trained, shares.sent))
                metric = metric_name(entry, silo)
                rate = _mean_and_std(success_rate(entry, silo, ddof)) if backdoor else []
                writer.writerow(
                    [entry.label, silo, metric, *_mean_and_std(silo_score), silo_score.n, *percents, sent, *rate]
                )
    return text.getvalue()


def _mean_and_std(score: Score | None) -> list[str]:
    """Format mean and standard deviation as two cells; empty if missing."""
    return ["", ""] if score is None else [_plain(score.mean), "" if score.std is None else _plain(score.std)]


def _plain(value: float) -> str:
    """Format a number with all significant digits; whole numbers without a decimal point."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.6f}".rstrip("0")
