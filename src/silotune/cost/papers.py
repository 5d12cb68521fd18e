"""The papers' parameter tables beside ours: what `silotune cost --papers` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from silotune.cost.claims import CLAIMS, Claim
from silotune.cost.estimate import Cost, estimate

LIMIT = 1.0
"""Differences above this many percent are explained."""

_HEADER = """\
# Parameter counts: the papers' and ours

Written by `silotune cost --papers`; a test compares this file with the command's output. Ours follow from shapes alone
(`backbone=shape:…`, no weights); each row's command is `silotune cost` with the words in the first column. *Parameters*
are ours, exact. *Message* is one silo's update as it is serialised, in bytes: 4 per parameter, and the names and shapes
of the tensors. Differences are of our number from the printed one; those above 1 % are explained below each table.
"""


@dataclass(frozen=True)
class Row:
    """A claim and our numbers for it."""

    claim: Claim
    cost: Cost
    parameters: int
    value: float

    @property
    def difference(self) -> float:
        """Ours from the printed one, in percent."""
        return 100 * (self.value / self.claim.printed - 1)

    @property
    def explained(self) -> str:
        """Why they differ, where they do by more than `LIMIT`."""
        return self.claim.note if abs(self.difference) > LIMIT else ""


def paper_rows() -> list[Row]:
    """Every claim with our numbers."""
    costs: dict[tuple[str, ...], Cost] = {}
    rows = []
    for claim in CLAIMS:
        if claim.words not in costs:
            costs[claim.words] = estimate(claim.words[0], claim.words[1:], work=False)
        cost = costs[claim.words]
        parameters, value = claim.measure(cost, claim.extra)
        rows.append(Row(claim, cost, parameters, value))
    return rows


def papers_table() -> str:
    """The whole table as Markdown."""
    rows = paper_rows()
    papers = list(dict.fromkeys(row.claim.paper for row in rows))
    sections = [_section(paper, [row for row in rows if row.claim.paper == paper]) for paper in papers]
    return "\n".join([_HEADER, *sections, _halves(rows)])


def _section(paper: str, rows: Sequence[Row]) -> str:
    notes = list(dict.fromkeys(row.explained for row in rows if row.explained))
    lines = [f"## {paper}", "", "| what | command | parameters | ours | paper | difference | message |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for row in rows:
        claim = row.claim
        mark = f" ({chr(ord('a') + notes.index(row.explained))})" if row.explained else ""
        message = f"{row.cost.message_bytes:,}" if row.cost.message_bytes and not claim.extra else "-"
        lines.append(
            f"| {claim.where}: {claim.what} | `{' '.join(claim.words)}` | {row.parameters:,} "
            f"| {_rounded(row.value, claim)} {claim.unit} | {claim.printed:.{claim.digits}f} {claim.unit} "
            f"| {_signed(row.difference)}{mark} | {message} |"
        )
    lines.append("")
    lines += [f"- ({chr(ord('a') + number)}) {note}" for number, note in enumerate(notes)]
    return "\n".join([*lines, ""] if notes else lines)


def _halves(rows: Sequence[Row]) -> str:
    """FedMCP against FedAvg (PEFT): what Table I's percentages have in common with ours."""
    costs = {row.claim.what: row.cost for row in rows}
    fedmcp, fedavg = costs["FedMCP, sent"], costs["FedAvg (PEFT), sent"]
    return (
        "## FedMCP against FedAvg (PEFT)\n\n"
        f"Adapters without heads: trained {fedmcp.adapter_parameters:,} and {fedavg.adapter_parameters:,}, "
        f"{fedmcp.adapter_parameters / fedavg.adapter_parameters:g} times as many (paper: 1.16 % and 1.16 %); sent "
        f"{fedmcp.sent_parameters:,} and {fedavg.sent_parameters:,}, "
        f"{fedmcp.sent_parameters / fedavg.sent_parameters:g} times as many (paper: 0.58 % and 1.16 %)."
    )


def _rounded(value: float, claim: Claim) -> str:
    """Two digits more than the paper prints."""
    return f"{value:.{claim.digits + 2}f}"


def _signed(percent: float) -> str:
    text = f"{percent:+.1f}"
    return "0 %" if float(text) == 0 else f"{text} %"
