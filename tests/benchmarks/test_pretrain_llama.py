"""The small language model of `benchmarks`: made text, a plain folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from silotune.models.backbone.loading import load_backbone

ROOT = Path(__file__).parents[2]
TINY = {"vocabulary": 400, "hidden": 32, "layers": 1, "heads": 2, "intermediate": 48, "tokens": 300, "at_once": 200}
TINY |= {"tokenizer_rows": 300}


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import made_text, pretrain_llama, small_llama

    return made_text, small_llama, pretrain_llama


def test_rows_say_what_they_ask(benchmarks):
    made_text, small_llama, _ = benchmarks
    draws, kinds = random.Random(0), Counter()
    for _ in range(3000):
        row = made_text.made(draws)
        kinds[row.kind] += 1
        assert row.answer == row.answer.strip() != ""
        if row.kind == "copy":
            assert row.answer in row.instruction
        if row.kind in ("option", "yes-no"):
            options = [line[2:] for line in row.instruction.partition("OPTIONS:\n")[2].splitlines()]
            assert options.count(row.answer) == 1
            assert len(set(options)) == len(options) > 1
        if row.kind == "letter":
            assert f"\n({row.answer}) " in row.instruction
        if "in this text?" in row.instruction and row.kind == "yes-no":
            question, text = row.instruction.splitlines()[:2]
            assert (question.split()[3] in text.split()) is (row.answer == "yes")
        if "Are the two lines the same?" in row.instruction:
            one, other = row.instruction.splitlines()[:2]
            assert (one == other) is (row.answer == "yes")
    assert {*kinds} == {"copy", "option", "letter", "yes-no", "short", "passage"}
    stream, kept = small_llama.rows_of(1, "a"), small_llama.rows_of(1, "b", unseen=True)
    assert not any(small_llama.held_out(next(stream)) for _ in range(300))
    assert all(small_llama.held_out(next(kept)) for _ in range(30))


@pytest.mark.long  # a model is trained for it
def test_rows_are_encoded_as_the_head_encodes_them(benchmarks, trained):
    from silotune.data.rows import Row
    from silotune.data.tasks import make_task
    from silotune.models.heads.lm import LanguageModelHead

    made_text, small_llama, _ = benchmarks
    backbone = load_backbone(str(trained), precision="fp32", model_class="AutoModelForCausalLM")
    rows = [row for row in (made_text.made(random.Random(n)) for n in range(40)) if row.instruction]
    tokenize = LanguageModelHead().row_tokenizer(backbone, 1000)
    found = tokenize(make_task("t", "t", "generation"), [Row((row.instruction, ""), 0, row.answer) for row in rows])
    encoded = small_llama.encode(backbone.tokenizer, rows)
    assert [one.ids for one in encoded] == found.ids
    for one, reads, row in zip(encoded, found.reads, rows, strict=True):
        assert [place + 1 for place in reads] == [n for n, weight in enumerate(one.weights) if weight == 1]
        answer = one.ids[reads[0] + 1 : -1]
        assert backbone.tokenizer.decode(answer) == row.answer  # without the blank that the tokenizer puts before it
    word = small_llama.encode(backbone.tokenizer, [made_text.Row("short", "say yes", "yes")])[0].ids
    assert backbone.tokenizer("say yes")["input_ids"][-1] == word[-2]  # one token, in a text and as an answer


@pytest.mark.long  # a model is trained for it
def test_the_loss_is_the_weighted_mean_by_hand(benchmarks, trained):
    made_text, small_llama, _ = benchmarks
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    rows = small_llama.encode(tokenizer, [made_text.made(random.Random(n)) for n in range(9)])
    expected, weights = 0.0, 0.0
    with torch.no_grad():
        for row in rows:
            scores = torch.log_softmax(model(input_ids=torch.tensor([row.ids])).logits[0], -1)
            for place in range(1, len(row.ids)):
                expected -= row.weights[place] * float(scores[place - 1, row.ids[place]])
                weights += row.weights[place]
        loss, total = small_llama.weighted_loss(model, rows, "fp32")
    assert total == pytest.approx(weights)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    groups = list(small_llama.pieces(rows, 150))
    assert sorted(id(row) for group in groups for row in group) == sorted(map(id, rows))
    assert len(groups) > 1
    assert all(len(group) == 1 or len(group) * max(len(row.ids) for row in group) <= 150 for group in groups)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The command as a user calls it: six steps."""
    out = tmp_path_factory.mktemp("llama") / "model"
    words = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "benchmarks.pretrain_llama", "--steps", "6", "--seed", "3", "--probes", "2"]
    command += ["--out", str(out), "--threads", "1", *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True).stdout
    assert "step 6 of 6: loss" in said
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True).stdout
    assert "finished" in again
    return out


@pytest.mark.long  # a model is trained for it
def test_the_folder_is_a_backbone(trained):
    found = json.loads((trained / "pretraining.json").read_text())
    assert (found["steps"], found["seed"], found["threads"]) == (6, 3, 1)
    assert found["held_out"].keys() == {"loss", "copy", "option", "letter", "yes-no", "short"}
    assert 2 < found["held_out"]["loss"] < 7  # it has hardly begun: near ln 400
    assert found["held_out"]["yes-no"]["chance"] == 50
    assert not (trained / "training").exists()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in trained.iterdir()}
    backbone = load_backbone(str(trained), precision="fp32", model_class="AutoModelForCausalLM")
    assert (backbone.model_type, backbone.hidden_size, backbone.blocks) == ("llama", 32, 1)
