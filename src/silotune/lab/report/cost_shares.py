"""`cost_shares`: what an entry trained and sent, in percent of full fine-tuning; bytes of a message."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache
from typing import Any

from silotune.lab.report.entries import FinishedRun, ReportEntry

_BYTES_PER_WEIGHT = 4  # float32


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
    """Return the shares of an entry; all its runs have those of the first."""
    run = entry.first
    full_count = full_fine_tuning_parameters(run)

    def percent(number: float) -> float | None:
        return None if not full_count else 100 * number / full_count

    summary = run.summary
    return CostShares(
        percent(summary["trainable_parameters"]),
        percent(summary["adapter_parameters"]),
        percent(summary["sent_parameters"]),
        percent(message_bytes(run) / _BYTES_PER_WEIGHT),
    )


def message_bytes(run: FinishedRun) -> float:
    """Return the mean size of the updates that left silos; 0 if none did."""
    sizes = [event["bytes_up"] for event in run.events_of("silo") if event.get("bytes_up")]
    return statistics.fmean(sizes) if sizes else 0.0


def full_fine_tuning_parameters(run: FinishedRun) -> int | None:
    """Count the parameters of full fine-tuning: the bare model with a head for the task with most labels.

    None if the backbone is not on this machine, so that its size is unknown.
    """
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
        return estimate("local", words, count_flops=False).bare_parameters
    except InputError:  # the backbone is not on this machine
        return None
