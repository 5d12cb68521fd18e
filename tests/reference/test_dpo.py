"""DPO (Rafailov et al. 2023, eq. 7) against the formula written out, and trained by every kind of method."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from silotune.data.batching import epoch_batches, evaluation_batches, make_batch
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.errors import InputError
from silotune.evaluation.predict import mean_loss
from silotune.interop.export import export
from silotune.models.forward.views import View
from silotune.models.heads import PreferenceHead
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from tests.support.chats import chat_model, conversations, write_lines
from tests.support.preferences import write_preferences

TASK = Task("t", (), "loss", "generation")


@pytest.fixture
def dpo(tmp_path, tmp_path_factory):
    return str(write_preferences(tmp_path, tmp_path_factory.getbasetemp()))


def pairs(lengths):
    ids = [[7] * length for length in lengths]
    return TokenizedRows(TASK, ids, None, torch.zeros(len(ids), dtype=torch.int64), sizes=[2] * (len(ids) // 2))


def test_the_loss_is_the_formula_whatever_the_rows_order():
    rows, head = pairs([9, 3, 4, 8, 5, 5]), PreferenceHead()
    batch = make_batch(rows, rows.sequences([2, 0, 1]), 0)
    assert batch.rows.tolist() != sorted(batch.rows.tolist())  # by length
    policy, reference = torch.rand(6, dtype=torch.float64) * 9, torch.rand(6, dtype=torch.float64) * 9

    def view(losses):
        return View({"dpo": torch.stack([losses[batch.rows], torch.ones(6, dtype=torch.float64)], 1)})

    expected = 0.0
    for pair in range(3):
        chosen, rejected = 2 * pair, 2 * pair + 1
        margin = (-policy[chosen] + reference[chosen]) - (-policy[rejected] + reference[rejected])
        expected += -math.log(1 / (1 + math.exp(-0.1 * float(margin)))) / 3
    assert float(head.referenced_loss({}, view(policy), view(reference), batch)) == pytest.approx(expected, abs=1e-12)


def test_pairs_stay_together_and_count_as_one():
    rows = pairs([3, 30, 4, 29, 5, 28, 6, 27])
    assert rows.examples == rows.clean_count == 4
    for batches in (epoch_batches({"t": rows}, 3, 0, 1), evaluation_batches(rows, 0, rows_at_once=1)):
        seen = []
        for batch in batches:
            chosen = sorted(batch.rows.tolist())
            assert all(first + 1 == second for first, second in zip(chosen[::2], chosen[1::2], strict=True))
            seen += chosen
        assert sorted(seen) == list(range(8))


def test_before_training_the_loss_is_that_of_a_coin(dpo):
    federation = build(read_config(dpo))
    context, silo = federation.context, federation.silos["a"]
    state = federation.coordinator.shared | context.state_of(silo).private
    rows = silo.evaluations["a"].validation
    assert mean_loss(context, state, rows) == pytest.approx(math.log(2), abs=1e-6)
    (trained,) = federation.trainer.rounds([silo], federation.coordinator.shared, 1)
    assert mean_loss(context, trained.state, silo.train["a"]) < 0.6


def test_a_shown_row_is_both_answers_of_its_own_prompt(dpo, silotune):
    outcome = silotune("data", dpo, "--show", 3, "--silo", "a", "--json")
    assert outcome.code == 0, outcome.err
    for row in json.loads(outcome.out)["silos"]["a"]["shown"]:
        asked = row["texts"][0].removeprefix("user: ")
        read, trained = (
            {
                part: "".join(
                    token["text"] for token in row["tokens"] if token["input"] == part and token["trained"] in flags
                )
                for part in ("chosen", "rejected")
            }
            for flags in ((False, True), (True,))
        )
        assert all(asked in text for text in read.values())
        assert trained["chosen"] == f"{row['target']}<|im_end|>"
        assert trained["rejected"] == f"cold {asked.removeprefix('the soup ').removesuffix('?')}<|im_end|>"


def test_other_rows_are_refused(dpo, tmp_path):
    with pytest.raises(InputError, match="rows of task 'a' are preference pairs; allowed: dpo"):
        build(read_config(dpo, ["head=lm"]))
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", conversations())
    with pytest.raises(InputError, match="rows of task 'a' are no preference pairs; allowed: lm"):
        build(read_config(dpo))


@pytest.mark.long
def test_the_loss_of_a_trained_model_is_that_of_its_merged_export(dpo, tmp_path, tmp_path_factory):
    finished = run(dpo, out=tmp_path / "out")
    export(load_run(tmp_path / "out", precision="fp32").model("a"), "merged", tmp_path / "merged")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    reference = AutoModelForCausalLM.from_pretrained(chat_model(tmp_path_factory.getbasetemp())).eval()
    rows = finished.federation.silos["a"].evaluations["a"].test

    def log_probability(model, row):
        with torch.no_grad():
            scores = model(torch.tensor([rows.ids[row]])).logits[0, rows.reads[row]].double()
        return float(torch.log_softmax(scores, -1).gather(1, torch.tensor(rows.targets[row])[:, None]).sum())

    losses = []
    for pair in range(rows.examples):
        chosen, rejected = (
            log_probability(policy, row) - log_probability(reference, row) for row in (2 * pair, 2 * pair + 1)
        )
        losses.append(-math.log(1 / (1 + math.exp(-0.5 * (chosen - rejected)))))
    assert finished.silos["a"]["test"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert finished.silos["a"]["rows"] == {"train": 12, "validation": 4, "test": 4}
    assert isinstance(finished.model("a").write(["the soup?"])[0], str)


@pytest.mark.long
@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "ditto", "fedrep", "feddpa-t", "feddpa-f", "local", "centralised"]
)
def test_methods_train_by_it(method, dpo, tmp_path):
    words = [f"method={method}"]
    whole = run(dpo, *words, out=tmp_path / "out")
    assert all(silo["test"] < math.log(2) for silo in whole.silos.values())
    bounded = run(dpo, *words, "train.tokens_at_once=400", out=tmp_path / "bounded")
    assert bounded.silos["a"]["test"] == pytest.approx(whole.silos["a"]["test"], abs=1e-4)
