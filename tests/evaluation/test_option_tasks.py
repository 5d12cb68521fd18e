"""Accuracy beside ROUGE-1 where a task's answers are options: which tasks these are, and what is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from silotune.data.generation_rows import lists_options
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.evaluation import predict
from silotune.methods.base import PredictionMix
from silotune.methods.parts import Part, Scope
from silotune.models.forward.generation import GenerationOptions
from silotune.models.heads import LanguageModelHead
from silotune.models.heads.lm import prompt_rows
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.training.prediction import PredictionContext
from tests.support.language_models import backbone_of, made
from tests.support.tiny import NOUNS


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("Which?\nOPTIONS:\n- no\n- yes", "yes", True),
        ("Which?\nOPTIONS:\n-  the same meaning\n- other", "the same meaning", False),  # not as it is written there
        ("Which?\nOPTIONS:\n- not the same\n- other", "the same", False),
        ("Say yes or no", "yes", False),
        ("Which?\nOPTIONS:\n- his son \n- he", " his son", True),
        ("Which?\nOPTIONS:\n- Yes\n- No", "yes", False),
    ],
)
def test_a_row_picks_where_a_line_is_its_answer(text, answer, found):
    assert lists_options(Row((text, ""), 0, answer)) is found
    assert lists_options(Row(("Look:", text), 0, answer)) is found


@pytest.fixture(scope="module")
def config(tmp_path_factory, model_folder):
    """`pick` has options in all rows, `some` in all but one, `say` in none."""
    path = tmp_path_factory.mktemp("options")
    for task in ("pick", "some", "say"):
        (path / task).mkdir()
        for split, number in (("train", 8), ("test", 6)):
            rows = []
            for n in range(number):
                listed = task == "pick" or (task == "some" and n)
                options = "\nOPTIONS:\n- warm\n- cold" if listed else ""
                answer = ("warm", "cold")[n % 2]
                rows.append({"instruction": f"how is the {NOUNS[n]}?{options}", "input": "", "output": answer})
            (path / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    backbone = model_folder("llama")

    def make(method, *more):
        words = [f"method={method}", f"backbone={backbone}", f"data.path={path}", "data.tasks=pick,some,say"]
        words += ["head.beams=1", "head.max_new_tokens=4", "rounds=1", "train.epochs=8", "train.lr=0.03"]
        words += ["train.batch_size=8", "train.max_length=96", "precision=fp32", "threads=1", *more]
        return read_config("feddpa-dataset1", words)

    return make


def exact(done, silo, task):
    """The share of answers written exactly, from the public model and the file."""
    path = Path(done.federation.config.data.path) / task / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    written = done.model(silo).write([row["instruction"] for row in rows])
    return 100 * np.mean([text.strip() == row["output"] for text, row in zip(written, rows, strict=True)])


@pytest.fixture(scope="module")
def judged(config, tmp_path_factory):
    return run(config("feddpa-t", "evaluation.unseen=some"), out=tmp_path_factory.mktemp("runs") / "judged")


def test_option_tasks_have_an_accuracy_on_every_silo(judged):
    for name, entry in judged.silos.items():
        assert entry["metric"] == "rouge1"
        assert entry["accuracy_on_tasks"] == pytest.approx({"pick": exact(judged, name, "pick")})
        assert entry["test_time_accuracy"] == pytest.approx(entry["accuracy_on_tasks"]["pick"])
        assert ("accuracy" in entry) is (name == "pick")
    assert judged.silos["pick"]["accuracy"] == judged.silos["pick"]["accuracy_on_tasks"]["pick"]
    assert "accuracy" not in judged.summary["unseen"]["some"]  # one row has no options


def test_both_scores_are_of_the_same_answers(judged, monkeypatch):
    """Six answers: three as they are, one among other words (ROUGE-1 ½), one wrong, one in capitals (ROUGE-1 1)."""
    federation = judged.federation
    test = federation.silos["pick"].evaluations["pick"].test
    right, wrong = test.answers, ["cold" if answer == "warm" else "warm" for answer in test.answers]
    written = [right[0], f" {right[1]} ", right[2], "cold and warm", wrong[4], right[5].upper()]
    monkeypatch.setattr(predict, "answers", lambda *_: written)
    found = predict.measure(federation.context, {}, test)
    assert found.accuracy == pytest.approx(100 * 3 / 6)
    assert found.score == pytest.approx(100 * (3 + 1 / 2 + 1) / 6)
    assert predict.measure(federation.context, {}, federation.silos["say"].evaluations["say"].test).accuracy is None


def test_without_test_time_own_rows_have_it(config, judged, tmp_path):
    words = ("evaluation.test_time=false", "evaluation.unseen=pick")
    done = run(config("fedit", *words), out=tmp_path / "run")
    assert not any("accuracy" in entry for entry in done.silos.values())
    found = done.summary["unseen"]["pick"]["accuracy"]
    assert found["silos"] == pytest.approx({name: exact(done, name, "pick") for name in done.silos})
    assert found["maximum"] == max(found["silos"].values())
    assert found["average"] == pytest.approx(np.mean(list(found["silos"].values())))
    own = run(config("feddpa-t", "evaluation.test_time=false", "evaluation.unseen=some"), out=tmp_path / "own")
    assert own.silos["pick"]["accuracy"] == judged.silos["pick"]["accuracy"]
    assert "accuracy" not in own.silos["say"]
    measured = run(config("fedit", "data.metric=accuracy"), out=tmp_path / "measured")
    assert not any("accuracy" in entry for entry in measured.silos.values())  # it is the score


def test_tables_show_it(judged, silotune, tmp_path):
    outcome = silotune("personalization", judged.folder, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    blocks = (tmp_path / "out" / "tables.md").read_text().split("## ")[1:]
    assert [block.split(" (%)")[0] for block in blocks] == [
        "personalization",
        "test-time personalization",
        "personalization, accuracy of tasks with options",
        "test-time personalization, accuracy of tasks with options",
        "tasks left out of training",
    ]
    cells = blocks[2].strip().splitlines()[-1].split("|")[2:-1]
    accuracy = f"{judged.silos['pick']['accuracy']:.2f}"
    assert [cell.strip() for cell in cells] == [accuracy, "–", accuracy]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_the_likeliest_option_is_picked(family):
    """By the mean log-likelihood of its tokens, which transformers' own loss gives."""
    model, tokenizer = made(family)
    head = LanguageModelHead("{instruction} Answer:", GenerationOptions(max_new_tokens=8))
    backbone = backbone_of(family)
    options = ("warm", "the train felt cold", "sweet")
    rows = [Row((f"{noun}?\n- {options[0]}\n- {options[1]}\n- {options[2]}", ""), 0, "warm") for noun in NOUNS[:4]]
    tokenized = head.row_tokenizer(backbone, 80)(Task("t", (), "accuracy", "generation"), rows)
    assert tokenized.choices == [list(options)] * 4
    parts = {"head": Part(head, Scope.SHARED)}
    context = PredictionContext(backbone, parts, PredictionMix({}), head, method="none", max_length=80, rows_scored=5)
    measured = predict.measure(context, {"head": {}}, tokenized)
    expected = []
    for prompt in prompt_rows(tokenized).ids:
        losses = []
        for option in options:
            ids = tokenizer(option, add_special_tokens=False)["input_ids"]
            inputs, labels = (prompt, ids) if family == "t5" else ([*prompt, *ids], [-100] * len(prompt) + ids)
            with torch.no_grad():
                losses.append(model(input_ids=torch.tensor([inputs]), labels=torch.tensor([labels])).loss.item())
        expected.append(options[losses.index(min(losses))])
    assert measured.written == expected
    head.picks = False
    assert predict.measure(context, {"head": {}}, tokenized).written == predict.answers(
        context, {"head": {}}, tokenized
    )
