"""What a report says of every run, also where nothing happened: privacy, attacks and defenses, traffic."""

from __future__ import annotations

from collections.abc import Sequence

from silotune.lab.report.caveats import describe_sent_parts
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.scores import success_rate
from silotune.lab.report.tables_by_method import ResultTable, TableCell

Statement = tuple[str, str]
"""An entry's label, and what is said of it."""

_MEANS = ("samples", "uniform")
"""Aggregations that take every update as it is."""


def privacy_statements(entries: Sequence[ReportEntry]) -> list[Statement]:
    """Say of every entry whether noise protects what was sent, and what that does not cover."""
    return [(entry.label, _privacy(entry)) for entry in entries]


def _privacy(entry: ReportEntry) -> str:
    guarantees = [run.summary["privacy"] for run in entry.runs if run.summary.get("privacy")]
    if not guarantees:
        if not entry.first.summary["bytes_up"]:
            return "Nothing was sent, so nothing needed protection from the coordinator."
        return (
            "No differential privacy: updates left the silos without noise. What they tell about rows is not bounded."
        )
    limits = dict.fromkeys(str(guarantee["uncovered"]) for guarantee in guarantees if guarantee.get("uncovered"))
    spent = sorted({f"{guarantee['epsilon_total']:.4g}" for guarantee in guarantees})
    text = f"Differential privacy by {guarantees[0]['mechanism']}: ε = {', '.join(spent)} in total, δ = "
    text += f"{guarantees[0]['delta']:g}."
    if len(guarantees) < len(entry.runs):
        text += f" In {len(guarantees)} of {len(entry.runs)} runs only."
    return text + "".join(f" The guarantee does not hold against {limit}." for limit in limits)


def privacy_table(entries: Sequence[ReportEntry]) -> ResultTable | None:
    """Make the table of the guarantee of every run with noise; None without any."""
    rows = []
    for entry in entries:
        for run in entry.runs:
            if guarantee := run.summary.get("privacy"):
                texts = [
                    run.folder.name,
                    str(guarantee["mechanism"]),
                    f"{guarantee['epsilon_round']:.4g}",
                    f"{guarantee['epsilon_total']:.4g}",
                    f"{guarantee['delta']:g}",
                    str(guarantee["participations"]),
                ]
                rows.append((entry.label, [TableCell(text) for text in texts]))
    header = ["folder", "mechanism", "ε a round", "ε in total", "δ", "participations"]
    return ResultTable("differential privacy of every noised run", header, rows) if rows else None


def attack_statements(entries: Sequence[ReportEntry]) -> list[Statement]:
    """Say of every entry whether an attack was simulated, with what success, and which aggregation defended."""
    return [(entry.label, _attack(entry)) for entry in entries]


def _attack(entry: ReportEntry) -> str:
    config = entry.first.config
    attack, aggregation = config.get("attack") or {}, config.get("aggregation") or {}
    name = str(aggregation.get("name", "samples") if isinstance(aggregation, dict) else aggregation)
    defense = (
        f"Aggregation: {name}, a mean that takes updates as they are."
        if name in _MEANS
        else f"Aggregation: {name}."
    )  # fmt: skip
    rate = success_rate(entry)
    if rate is None and attack.get("name", "none") == "none":
        return f"No attack was simulated. {defense}"
    share = 100 * float(attack.get("fraction", 0))
    text = f"Backdoor by {share:g} % of the silos toward the label {attack.get('target')!r}"
    measured = "not measured" if rate is None else f"{rate.text} % of the test rows with the trigger"
    return f"{text}: success {measured}. {defense}"


def traffic_statements(entries: Sequence[ReportEntry]) -> list[Statement]:
    """Say of every entry which parts left the silos, and the bytes of all messages of a run."""
    return [(entry.label, f"{describe_sent_parts(entry)} {_traffic(entry)}".strip()) for entry in entries]


def _traffic(entry: ReportEntry) -> str:
    up, down = (entry.mean_of(key) / 2**20 for key in ("bytes_up", "bytes_down"))
    return f"In all, {up:.2f} MiB from silos and {down:.2f} MiB to them." if up or down else ""
