"""lm-evaluation-harness over a silo's model gives the numbers of its own HFLM over the merged export."""

from __future__ import annotations

import json
import sys

import pytest

from silotune.errors import InputError
from silotune.interop.export import export
from silotune.runs.personal_model import load_model
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from tests.support.chats import CHATML, chat_model, conversations, write_lines

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run over conversations."""
    folder = tmp_path_factory.mktemp("lm-eval")
    write_lines(folder / "a.jsonl", conversations())
    (folder / "run.yaml").write_text(
        f"{{method: fedit, backbone: {chat_model(tmp_path_factory.getbasetemp())}, tuner: {{name: lora, r: 2}}, "
        f"rounds: 1, threads: 1, precision: fp32, train: {{lr: 1e-2, max_length: 96}}, "
        f"silos: [{{name: a, path: {folder / 'a.jsonl'}}}]}}"
    )
    run(str(folder / "run.yaml"), out=folder / "out")
    return folder / "out"


@pytest.fixture
def harness(finished):
    """The run's model, as the harness asks it."""
    from silotune.interop.lm_eval_harness import HarnessModel

    return HarnessModel(load_model(finished, "a"))


@pytest.mark.long
@pytest.mark.parametrize("chat", [False, True])
def test_the_numbers_are_those_of_the_merged_export(finished, tmp_path, monkeypatch, chat):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from silotune.interop.lm_eval_harness import evaluate_on

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    export(load_run(finished, precision="fp32").model("a"), "merged", tmp_path / "merged")
    ours = evaluate_on(load_model(finished, "a"), list(TASKS), tasks, chat=chat)
    theirs = simple_evaluate(
        HFLM(str(tmp_path / "merged"), device="cpu", dtype="float32", batch_size=4),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
        apply_chat_template=chat,
    )["results"]
    for name in TASKS:
        numbers = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert numbers, theirs[name]
        assert {key: ours[name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5), name


@pytest.mark.long
def test_word_scores_are_computed_piece_by_piece(harness, monkeypatch):
    from silotune.models.heads import lm

    backbone, sizes = harness._backbone, []
    head = backbone.lm_head
    requests = [(None, harness.tok_encode(f"the soup {number}"), harness.tok_encode(" was warm")) for number in (1, 22)]
    expected = harness._loglikelihood_tokens(requests)

    class Watched:
        vocabulary_size = head.vocabulary_size

        def __call__(self, states, *more):
            sizes.append(len(states))
            return head(states, *more)

    monkeypatch.setattr(backbone, "lm_head", Watched())
    monkeypatch.setattr(lm, "SCORES_AT_ONCE", 3 * head.vocabulary_size)
    found = harness._loglikelihood_tokens(requests)
    assert max(sizes) == 3
    assert sum(sizes) == sum(len(continuation) for *_, continuation in requests)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def asked(text, **options):
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, (text, options), 0)


@pytest.mark.long
def test_long_prompts_lose_their_beginning_and_answers_need_room(harness, monkeypatch):
    from silotune.interop import lm_eval_harness

    monkeypatch.setattr(lm_eval_harness, "LONGEST", 64)
    text = "the garden was lovely " * 60
    ids = harness.tok_encode(text)
    assert len(ids) > harness.max_length
    (found,) = harness.generate_until([asked(text, max_gen_toks=harness.max_length - 5)])
    end = harness.tokenizer.decode(ids[-5:])
    assert harness.tok_encode(end)[-5:] == ids[-5:]
    (expected,) = harness.generate_until([asked(end, max_gen_toks=harness.max_length - 5)])
    assert found == expected
    for tokens in (harness.max_length, harness.max_length + 40):
        with pytest.raises(
            InputError, match=rf"--lm-eval: .* {tokens} tokens .*allowed: 1 to {harness.max_length - 1}"
        ):
            harness.generate_until([asked("the soup", max_new_tokens=tokens)])
    with pytest.raises(InputError, match="256 tokens"):  # the harness's own number
        harness.generate_until([asked("the soup")])


@pytest.mark.long
def test_a_template_without_generation_prompt_gets_the_header_of_the_answer(harness, monkeypatch):
    without = CHATML[: CHATML.index("{% if add_generation_prompt %}")]
    turns = [{"role": "user", "content": "the soup?"}]
    expected = harness.apply_chat_template(turns)
    assert expected == harness.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    begun = harness.apply_chat_template([*turns, {"role": "assistant", "content": "It"}], add_generation_prompt=False)
    assert begun == f"{expected}It"
    monkeypatch.setattr(harness.tokenizer, "chat_template", without)
    assert harness.apply_chat_template(turns) == expected


def test_a_missing_library_is_one_line(monkeypatch, silotune, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "silotune.interop.lm_eval_harness", raising=False)
    outcome = silotune("evaluate", tmp_path, "--silo", "a", "--lm-eval", "arc_easy")
    assert outcome.code == 2
    assert outcome.err == "silotune: --lm-eval: needs the package lm-eval; pip install 'silotune[lm-eval]'\n"
