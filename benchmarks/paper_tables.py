"""The papers' parameter tables beside ours, as Markdown: `python -m benchmarks paper-tables`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silotune.cost import Cost, estimate

Measure = Callable[[Cost, int], tuple[int, float]]
"""(our cost, further parameters) → number of parameters, and the same quantity in the paper's unit."""


PROJECTION = 768 * 256 + 256
"""FedFAME's projection head on BERT-base, hidden → 256, which it trains and sends besides tuner and classifier."""


@dataclass(frozen=True)
class PaperValue:
    """One number printed in a paper.

    Args:
        paper: the paper and its setting.
        where: the paper's table.
        what: the row and column in words.
        words: method and settings for `silotune cost`.
        measure: computes our number from the cost.
        printed: the paper's number.
        digits: digits of `printed` behind the point.
        unit: of the number.
        extra: parameters on top of the method's parts.
        note: the reason for a difference.
    """

    paper: str
    where: str
    what: str
    words: tuple[str, ...]
    measure: Measure
    printed: float
    digits: int
    unit: str
    extra: int = 0
    note: str = ""


def trained_adapters(cost: Cost, _: int) -> tuple[int, float]:
    """Adapters without heads, in percent of full fine-tuning."""
    return cost.adapter_parameters, 100 * cost.adapter_parameters / cost.bare_parameters


def trained(cost: Cost, _: int) -> tuple[int, float]:
    """All that is trained, in percent of full fine-tuning."""
    return cost.trainable_parameters, cost.trainable_percent


def sent(cost: Cost, _: int) -> tuple[int, float]:
    """All that is sent, in percent of full fine-tuning."""
    return cost.sent_parameters, cost.sent_percent


def sent_of_assembled(cost: Cost, extra: int) -> tuple[int, float]:
    """All that is sent, in percent of the model with everything in it."""
    return cost.sent_parameters + extra, 100 * (cost.sent_parameters + extra) / (cost.full_parameters + extra)


def sent_mib(cost: Cost, extra: int) -> tuple[int, float]:
    """All that is sent, at 4 bytes a parameter, in MiB."""
    return cost.sent_parameters + extra, 4 * (cost.sent_parameters + extra) / 2**20


def sent_millions(cost: Cost, _: int) -> tuple[int, float]:
    """All that is sent, in millions."""
    return cost.sent_parameters, cost.sent_parameters / 1e6


def full_millions(cost: Cost, _: int) -> tuple[int, float]:
    """The model with everything in it, in millions."""
    return cost.full_parameters, cost.full_parameters / 1e6


def _fedmcp() -> list[PaperValue]:
    underdetermined = (
        "The paper counts 0.58 % for one adapter. Bottleneck 16 after both sublayers of 12 blocks is "
        "24·(2·16·768 + 16 + 768) = 608,640, 0.49 % of RoBERTa-base, and LoRA of rank 16 on query and value 589,824, "
        "0.47 %; 0.58 % would be about 723,000. What else the paper's adapters hold it does not say; the factor of two "
        "between one and two adapters is the same."
    )
    patch = (
        "As (a); and FedMatch's idea is a shared adapter and a private patch, of which only the first is sent, while "
        "the table's cell counts both as sent."
    )
    cells: list[tuple[str, tuple[str, ...], Measure, float, str]] = []
    cells.append(("FedAvg (Full FT), trained", ("fedavg-full",), trained, 100, ""))
    cells.append(("FedAvg (Full FT), sent", ("fedavg-full",), sent, 100, ""))
    two, one = ("method.adapters=2",), ("method.adapters=1",)
    methods: list[tuple[str, tuple[str, ...], float, float | None]] = [
        ("Local", ("local", *two), 1.16, None),
        ("FedAvg (PEFT)", ("fedavg", *two), 1.16, 1.16),
        ("FedLR", ("fedlr", *one), 0.58, 0.58),
        ("FedAP", ("fedap", *one), 0.58, 0.58),
        ("MOON", ("moon", *two), 1.16, 1.16),
        ("FedRep", ("fedrep", *two), 1.16, 1.16),
        ("FedMatch", ("fedmatch",), 1.16, 1.16),
        ("FedMCP", ("fedmcp",), 1.16, 0.58),
    ]
    for name, words, trains, sends in methods:
        cells.append((f"{name}, trained", words, trained_adapters, trains, underdetermined))
        if sends is not None:
            cells.append((f"{name}, sent", words, sent, sends, patch if name == "FedMatch" else underdetermined))
    return [
        PaperValue(
            "FedMCP (RoBERTa-base, adapters without heads)",
            "Table I",
            what,
            (words[0], "backbone=shape:roberta-base", *words[1:]),
            measure,
            printed,
            2,
            "%",
            note=note,
        )
        for what, words, measure, printed, note in cells
    ]


def _peft_in_fl() -> list[PaperValue]:
    setting = ("fedavg", "backbone=shape:bert-base", "method.adapters=1", "head=linear", "head.scope=shared")
    tuners: dict[str, tuple[str, ...]] = {
        "Prefix": ("tuner=prefix", "tuner.tokens=6", "tuner.width=512"),
        "Adapter": ("tuner=bottleneck", "tuner.r=24"),
        "BitFit": ("tuner=bitfit",),
        "LoRA": ("tuner=lora", "tuner.r=1"),
    }
    files = (
        "The printed sizes are those of saved files, about 0.04 MiB more than the parameters alone, and have one digit "
        "where they are above 1 MB."
    )
    adapter = (
        "The FedFAME column prints 0.82 % for the same adapter; 0.81 is what remains of 0.8187 % (the adapter without "
        "the classifier) when digits are cut off."
    )
    bitfit = (
        "0.0926 % are the encoder's 101,376 biases alone, without classifier. Ours has the bias of the embeddings' "
        "norm (768) and the classifier (1,538) as well; BERT's pooler, with another 768 biases (0.0954 % in all), is "
        "not part of our backbone."
    )
    projection = (
        "The paper's FedFAME percentages leave out the 196,864 parameters of the projection head (768 → 256), which "
        "its sizes in MB include. Ours include it."
    )
    cells = {  # tuner: FedAvg's MB and digits, FedAvg's % and digits, FedFAME's MB and digits, FedFAME's % and digits
        "Prefix": ((37.1, 1), (8.14, 2), (37.9, 1), (8.16, 2)),
        "Adapter": ((3.5, 1), (0.81, 2), (4.3, 1), (0.82, 2)),
        "BitFit": ((0.447, 3), (0.092, 3), (1.2, 1), (0.094, 3)),
        "LoRA": ((0.186, 3), (0.035, 3), (0.952, 3), (0.037, 3)),
    }
    notes = {"Adapter": adapter, "BitFit": bitfit}
    kinds: tuple[tuple[str, Measure, str, int, str], ...] = (
        ("FedAvg, size", sent_mib, "MiB", 0, files),
        ("FedAvg, share", sent_of_assembled, "%", 0, ""),
        ("FedFAME, size", sent_mib, "MiB", PROJECTION, files),
        ("FedFAME, share", sent_of_assembled, "%", PROJECTION, projection),
    )
    return [
        PaperValue(
            "PEFT in FL, FedFAME (BERT-base, one shared linear classifier counted; shares of the assembled model)",
            "Table 2",
            f"{tuner}, {kind}" + (" (with the projection head's 196,864)" if extra else ""),
            (*setting, *tuners[tuner]),
            measure,
            *cells[tuner][column],
            unit,
            extra,
            note or notes.get(tuner, ""),
        )
        for tuner in tuners
        for column, (kind, measure, unit, extra, note) in enumerate(kinds)
    ]


def _fedprompt() -> list[PaperValue]:
    paper = "FedPrompt (20 soft tokens, frozen language-model head)"
    prompt = (
        "20·768 = 15,360, which is 0.015 M (the paper's own cell for T5). 0.016 M fits 21 vectors (16,128), and so "
        "does RoBERTa's 124.714 M (ours, with 20: 124.713 M)."
    )
    digit = "15,360 with fewer digits."
    shapes = {"BERT": "bert-base", "RoBERTa": "roberta-base", "T5": "t5-base"}
    table: dict[str, tuple[float, float, float]] = {  # sent (M), full model (M), ratio (%)
        "BERT": (0.016, 109.530, 0.014),
        "RoBERTa": (0.016, 124.714, 0.013),
        "T5": (0.015, 222.919, 0.007),
    }
    claims = []
    for name, (sends, full, ratio) in table.items():
        words = _words(shapes[name], "tuner=prompt", "tuner.tokens=20", head="verbalizer")
        note = digit if name == "T5" else prompt
        claims.append(PaperValue(paper, "Table 1", f"{name}, sent", words, sent_millions, sends, 3, "M", note=note))
        claims.append(PaperValue(paper, "Table 1", f"{name}, model and prompt", words, full_millions, full, 3, "M"))
        claims.append(
            PaperValue(paper, "Table 1", f"{name}, ratio", words, sent_of_assembled, ratio, 3, "%", note=note)
        )
    for name, shape in shapes.items():
        words = _words(shape, "tuner=p-tuning", "tuner.tokens=20", head="verbalizer")
        claims.append(PaperValue(paper, "Table 5", f"{name}, P-tuning", words, sent_millions, 25.420, 3, "M"))
    words = _words("t5-base", "tuner=prefix", "tuner.tokens=5", head="verbalizer")
    claims.append(PaperValue(paper, "Table 5", "T5, prefix tuning", words, sent_millions, 9.853, 3, "M"))
    return claims


def _feddpa() -> list[PaperValue]:
    paper = "FedDPA (LLaMA-7B, LoRA of rank 8 on query and value)"
    words = _words("llama-7b", "tuner=lora", "tuner.r=8", head="lm")
    what = "FedIT, FedLoRA, FedDPA-F, FedDPA-T: the one shared LoRA"
    note = "The paper prints one digit."
    return [
        PaperValue(paper, "Table 12", f"{what}, sent", words, sent_millions, 4.2, 1, "M"),
        PaperValue(paper, "Table 12", f"{what}, share", words, sent, 0.06, 2, "%", note=note),
    ]


def _words(shape: str, *tuner: str, head: str) -> tuple[str, ...]:
    return ("fedavg", f"backbone=shape:{shape}", "method.adapters=1", f"head={head}", *tuner)


CLAIMS: tuple[PaperValue, ...] = (*_fedmcp(), *_peft_in_fl(), *_fedprompt(), *_feddpa())


LIMIT = 1.0
"""Differences above this percentage need an explanation."""


_HEADER = """\
# Parameter counts: the papers' and ours

Written by `python -m benchmarks paper-tables`; a test compares this file with the command's output. Our numbers follow
from shapes alone (`backbone=shape:…`, no weights); each row's command is `silotune cost` with the words in the column
*command*. *Parameters* are ours, exact. *Message* is one silo's update as it is serialized, in bytes: 4 per parameter,
and the names and shapes of the tensors. Differences are of our number from the printed one; those above 1 % are
explained below each table.
"""


@dataclass(frozen=True)
class PaperRow:
    """A paper's number and ours."""

    claim: PaperValue
    cost: Cost
    parameters: int
    value: float

    @property
    def difference(self) -> float:
        """Difference of our number from the printed one, in percent."""
        return 100 * (self.value / self.claim.printed - 1)

    @property
    def explained(self) -> str:
        """The reason for a difference above `LIMIT`; empty below."""
        return self.claim.note if abs(self.difference) > LIMIT else ""


def paper_rows() -> list[PaperRow]:
    """Compute our number for each of `CLAIMS`."""
    costs: dict[tuple[str, ...], Cost] = {}
    rows = []
    for claim in CLAIMS:
        if claim.words not in costs:
            costs[claim.words] = estimate(claim.words[0], claim.words[1:], count_flops=False)
        cost = costs[claim.words]
        parameters, value = claim.measure(cost, claim.extra)
        rows.append(PaperRow(claim, cost, parameters, value))
    return rows


def measure() -> str:
    """Return the document as Markdown."""
    rows = paper_rows()
    papers = list(dict.fromkeys(row.claim.paper for row in rows))
    sections = [_section(paper, [row for row in rows if row.claim.paper == paper]) for paper in papers]
    return "\n".join([_HEADER, *sections, _halves(rows)])


def _section(paper: str, rows: Sequence[PaperRow]) -> str:
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


def _halves(rows: Sequence[PaperRow]) -> str:
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


def _rounded(value: float, claim: PaperValue) -> str:
    """Two digits more than the paper prints."""
    return f"{value:.{claim.digits + 2}f}"


def _signed(percent: float) -> str:
    text = f"{percent:+.1f}"
    return "0 %" if float(text) == 0 else f"{text} %"
