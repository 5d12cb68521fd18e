"""The papers' parameter tables against arithmetic by hand, and the document made of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.paper_tables import PaperRow

ROOT = Path(__file__).parents[2]
D, BLOCKS, FEED = 768, 12, 3072
SITES = 2 * BLOCKS
CLASSIFIER = 2 * D + 2
MLP_HEAD = D * D + D + CLASSIFIER


def bottleneck(r: int) -> int:
    return SITES * (D * r + r + r * D + D)


def lora(r: int, width: int = D, blocks: int = BLOCKS) -> int:
    return 2 * blocks * (width * r + r * width)


def prefix(tokens: int, embedding: int, hidden: int) -> int:
    values = 2 * BLOCKS * D
    return tokens * embedding + (embedding + 1) * hidden + (hidden + 1) * values


def lstm(inputs: int, hidden: int) -> int:
    return 2 * 4 * hidden * (inputs + hidden + 2)


ENCODER_BIASES = BLOCKS * (4 * D + D + FEED + D + D)  # query, key, value, output; norm; feed-forward's two; norm
P_TUNING = 2 * 20 * D + lstm(D, D) + lstm(2 * D, D) + (2 * D + 1) * D + (D + 1) * D

# an encoder block: four attention maps, two feed-forward maps, two norms
_BLOCK = 4 * (D * D + D) + (D * FEED + FEED) + (FEED * D + D) + 4 * D
BERT = (30522 + 512 + 2) * D + 2 * D + BLOCKS * _BLOCK
ROBERTA = (50265 + 514 + 1) * D + 2 * D + BLOCKS * _BLOCK
BERT_LM = BERT + (D * D + D) + 2 * D + 30522  # transform, its norm, the vocabulary's biases; the matrix is tied
ROBERTA_LM = ROBERTA + (D * D + D) + 2 * D + 50265
_T5_ENCODER = BLOCKS * (4 * D * D + 2 * D * FEED + 2 * D) + 12 * 32 + D  # relative positions once, last norm
_T5_DECODER = BLOCKS * (8 * D * D + 2 * D * FEED + 3 * D) + 12 * 32 + D
T5 = 32128 * D + _T5_ENCODER + _T5_DECODER
LLAMA = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096

ADAPTER, PROJECTION, PROMPT = 608_640, 196_864, 15_360
EXPECTED: dict[tuple[str, str], int] = {
    ("Table I", "FedAvg (Full FT), trained"): ROBERTA + MLP_HEAD,
    ("Table I", "FedAvg (Full FT), sent"): ROBERTA,
    ("Table I", "Local, trained"): 2 * ADAPTER,
    ("Table I", "FedAvg (PEFT), trained"): 2 * ADAPTER,
    ("Table I", "FedAvg (PEFT), sent"): 2 * ADAPTER,
    ("Table I", "FedLR, trained"): 589_824,
    ("Table I", "FedLR, sent"): 589_824,
    ("Table I", "FedAP, trained"): ADAPTER,
    ("Table I", "FedAP, sent"): ADAPTER,
    ("Table I", "MOON, trained"): 2 * ADAPTER,
    ("Table I", "MOON, sent"): 2 * ADAPTER,
    ("Table I", "FedRep, trained"): 2 * ADAPTER,
    ("Table I", "FedRep, sent"): 2 * ADAPTER,
    ("Table I", "FedMatch, trained"): 2 * ADAPTER,
    ("Table I", "FedMatch, sent"): ADAPTER,
    ("Table I", "FedMCP, trained"): 2 * ADAPTER,
    ("Table I", "FedMCP, sent"): ADAPTER,
    **{
        ("Table 2", f"{tuner}, {column}, {kind}{further}"): number + extra
        for tuner, number in {
            "Prefix": 9_721_344 + CLASSIFIER,
            "Adapter": 903_744 + CLASSIFIER,
            "BitFit": 101_376 + D + CLASSIFIER,  # and the embeddings' norm
            "LoRA": 38_402,
        }.items()
        for kind in ("size", "share")
        for column, extra, further in (
            ("FedAvg", 0, ""),
            ("FedFAME", PROJECTION, " (with the projection head's 196,864)"),
        )
    },
    ("Table 1", "BERT, sent"): PROMPT,
    ("Table 1", "BERT, model and prompt"): BERT_LM + PROMPT,
    ("Table 1", "BERT, ratio"): PROMPT,
    ("Table 1", "RoBERTa, sent"): PROMPT,
    ("Table 1", "RoBERTa, model and prompt"): ROBERTA_LM + PROMPT,
    ("Table 1", "RoBERTa, ratio"): PROMPT,
    ("Table 1", "T5, sent"): PROMPT,
    ("Table 1", "T5, model and prompt"): T5 + PROMPT,
    ("Table 1", "T5, ratio"): PROMPT,
    ("Table 5", "BERT, P-tuning"): 25_419_264,
    ("Table 5", "RoBERTa, P-tuning"): 25_419_264,
    ("Table 5", "T5, P-tuning"): 25_419_264,
    ("Table 5", "T5, prefix tuning"): 9_853_184,
    ("Table 12", "FedIT, FedLoRA, FedDPA-F, FedDPA-T: the one shared LoRA, sent"): 4_194_304,
    ("Table 12", "FedIT, FedLoRA, FedDPA-F, FedDPA-T: the one shared LoRA, share"): 4_194_304,
}
VALUES: dict[tuple[str, str], float] = {  # the checklist's shares and sizes, and those of full models
    ("Table I", "FedMCP, sent"): 0.49,
    ("Table 2", "Prefix, FedAvg, share"): 8.16,
    ("Table 2", "Adapter, FedAvg, share"): 0.820,
    ("Table 2", "LoRA, FedAvg, share"): 0.0351,
    ("Table 2", "Prefix, FedAvg, size"): 37.1,
    ("Table 2", "Adapter, FedAvg, size"): 3.45,
    ("Table 2", "LoRA, FedAvg, size"): 0.146,
    ("Table 1", "BERT, model and prompt"): 109.530,
    ("Table 1", "RoBERTa, model and prompt"): 124.713,
    ("Table 1", "T5, model and prompt"): 222.919,
    ("Table 12", "FedIT, FedLoRA, FedDPA-F, FedDPA-T: the one shared LoRA, share"): 0.062,
}


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """The module of the tables, which estimates each configuration once for all tests here."""
    from benchmarks import paper_tables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_tables, "estimate", cache(paper_tables.estimate))
        yield paper_tables


@pytest.fixture(scope="module")
def rows(tables: ModuleType) -> dict[tuple[str, str], PaperRow]:
    return {(row.claim.where, row.claim.what): row for row in tables.paper_rows()}


def test_arithmetic_by_hand_gives_the_numbers_known_from_the_papers() -> None:
    assert bottleneck(16) == ADAPTER
    assert bottleneck(24) == 903_744
    assert lora(16) == 589_824
    assert lora(1) + CLASSIFIER == 38_402
    assert lora(8, 4096, 32) == 4_194_304
    assert prefix(6, 512, 512) == 9_721_344
    assert prefix(5, D, 512) == 9_853_184
    assert P_TUNING == 25_419_264
    assert ENCODER_BIASES == 101_376
    assert (D + 1) * 256 == PROJECTION
    # what transformers' classes are known to have
    assert (BERT_LM, ROBERTA_LM, T5, LLAMA) == (109_514_298, 124_697_433, 222_903_552, 6_738_415_616)
    assert (BERT + MLP_HEAD, ROBERTA + MLP_HEAD) == (109_483_778, 124_647_170)


def test_every_claim_is_asserted_exactly(rows: dict[tuple[str, str], PaperRow]) -> None:
    assert {key: row.parameters for key, row in rows.items()} == EXPECTED


@pytest.mark.parametrize("key", VALUES, ids=lambda key: f"{key[0]} {key[1]}")
def test_in_the_papers_unit(rows: dict[tuple[str, str], PaperRow], key: tuple[str, str]) -> None:
    digits = len(f"{VALUES[key]}".partition(".")[2])
    assert round(rows[key].value, digits) == VALUES[key]


def test_differences_above_one_percent_are_explained_and_others_are_not(rows: dict[tuple[str, str], PaperRow]) -> None:
    from benchmarks.paper_tables import LIMIT

    assert LIMIT == 1
    for row in rows.values():
        assert (abs(row.value / row.claim.printed - 1) > 0.01) == bool(row.explained), row.claim.what


def test_fedmcp_trains_what_fedavg_trains_and_sends_exactly_half(rows: dict[tuple[str, str], PaperRow]) -> None:
    fedmcp, fedavg = rows["Table I", "FedMCP, trained"].cost, rows["Table I", "FedAvg (PEFT), trained"].cost
    assert fedmcp.adapter_parameters == fedavg.adapter_parameters
    assert 2 * fedmcp.sent_parameters == fedavg.sent_parameters


@pytest.mark.usefixtures("tables")
def test_the_document_is_the_commands_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.__main__ import main

    monkeypatch.setattr(sys, "argv", ["benchmarks", "paper-tables"])
    assert main() == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "results" / "parameters.md").read_text("utf-8")
