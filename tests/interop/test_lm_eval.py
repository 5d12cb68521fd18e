"""lm-evaluation-harness over a silo's model gives the numbers of its own HFLM over the merged export."""

from __future__ import annotations

import json
import sys

import pytest

from silotune.interop.export import export
from silotune.runs.load import load_model, load_run
from silotune.runs.run import run
from tests.support.chats import chat_model, conversations, write_lines

pytest.importorskip("lm_eval")

TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["warm", "cold as ice"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "e",
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "bleu"}, {"metric": "chrf"}],
    },
}


def write_tasks(folder):
    questions = [{"question": f"the soup {number} was rather", "answer": number % 2} for number in range(12)]
    write_lines(folder / "rows.jsonl", questions)
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, "test_split": "test", **task}))


@pytest.mark.long
def test_the_numbers_are_those_of_the_merged_export(tmp_path, tmp_path_factory, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from silotune.interop.lm_eval_harness import evaluate_on

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    write_lines(tmp_path / "a.jsonl", conversations())
    (tmp_path / "run.yaml").write_text(
        f"{{method: fedit, backbone: {chat_model(tmp_path_factory.getbasetemp())}, tuner: {{name: lora, r: 2}}, "
        f"rounds: 1, threads: 1, precision: fp32, train: {{lr: 1e-2, max_length: 96}}, "
        f"silos: [{{name: a, path: {tmp_path / 'a.jsonl'}}}]}}"
    )
    run(str(tmp_path / "run.yaml"), out=tmp_path / "out")
    export(load_run(tmp_path / "out", precision="fp32"), "a", "merged", tmp_path / "merged")
    ours = evaluate_on(load_model(tmp_path / "out", "a"), list(TASKS), tasks)
    theirs = simple_evaluate(
        HFLM(str(tmp_path / "merged"), device="cpu", dtype="float32", batch_size=4),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )["results"]
    for name in TASKS:
        numbers = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert numbers, theirs[name]
        assert {key: ours[name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5), name


def test_a_missing_library_is_one_line(monkeypatch, silotune, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "silotune.interop.lm_eval_harness", raising=False)
    outcome = silotune("evaluate", tmp_path, "--silo", "a", "--lm-eval", "arc_easy")
    assert outcome.code == 2
    assert outcome.err == "silotune: --lm-eval: needs the package lm-eval; pip install 'silotune[lm-eval]'\n"
