"""Whole runs with the heads over the vocabulary: learn something, resume to the same bits, refuse what cannot be."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

from silotune.config.schema import EvaluationConfig
from silotune.data.loading import load_silos
from silotune.data.rows import Row
from silotune.errors import InputError
from silotune.evaluation.federation_scores import current_model_state
from silotune.lab.sweep import TRIAL
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.heads.lm import prompt_rows
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from silotune.runs.storage.readers import events
from tests.support.session_rig import federate

WORDS = 'head.words={bad: awful, good: [great, warm], "yes": surely, maybe: perhaps, "no": never}'
COLORS = ("bright", "kind", "grim", "rude")


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    """Two silos of instruction rows: a word is to be said again, or the same word whatever is asked."""
    path = tmp_path_factory.mktemp("instructions")
    for task, answer in (("echo", lambda word: word), ("always", lambda _: "sweet")):
        (path / task).mkdir()
        for split, count in (("train", 24), ("test", 6)):
            rows = [
                {"instruction": f"say {color}", "input": "" if n % 2 else "now", "output": answer(color)}
                for n, color in enumerate((COLORS * 6)[:count])
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (path / task / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return path


def words_of(*more):
    return ["precision=fp32", "threads=1", "data.merge=false", "train.batch_size=8", "train.max_length=64", *more]


def verbalizer(backbone, data, *more):
    words = [f"backbone={backbone}", f"data.path={data}", "data.tasks=alpha,gamma", "head=verbalizer", WORDS]
    words += ["method=fedavg", "method.adapters=1", "train.max_length=32", *more]
    return read_config("demo", words_of(*words))


def language_model(backbone, data, *more):
    words = [f"backbone={backbone}", f"data.path={data}", "data.tasks=echo,always", "head=lm", "head.max_new_tokens=4"]
    return read_config("demo", words_of(*words, "method=fedavg", "method.adapters=1", "tuner=lora", *more))


@pytest.mark.parametrize("position", ["start", "end", "random"])
def test_under_a_template_truncation_cuts_neither_the_trigger_nor_the_mask(position, model_folder, data_folder):
    """Rows longer than the model may read: with the trigger they hold it whole, and the template's one mask."""
    attack = ("attack=backdoor", "attack.target=good", "attack.trigger=shop films", "attack.fraction=1")
    config = verbalizer(model_folder("bert"), data_folder, *attack, f"attack.position={position}")
    whole = build(config)
    longest = max(map(len, whole.silos["alpha"].train["alpha"].ids))
    room = longest - 3
    federation = build(config.model_copy(update={"train": config.train.model_copy(update={"max_length": room})}))
    tokenizer = federation.backbone.tokenizer
    trigger = tokenizer("shop films", add_special_tokens=False)["input_ids"]
    silo = federation.silos["alpha"]
    clean = silo.train["alpha"].clean_count
    added = silo.train["alpha"].ids[clean:]
    assert len(added) > 0
    assert max(map(len, added)) == room  # some had to be shortened
    for ids in (*added, *silo.evaluations["alpha"].attack.rows.ids):
        assert len(ids) <= room
        assert any(ids[start : start + len(trigger)] == trigger for start in range(len(ids)))
        assert ids.count(tokenizer.mask_token_id) == 1


def test_a_shared_verbalizer_serves_silos_of_different_tasks(model_folder, data_folder, tmp_path):
    """It has no tensors: only the tuner is counted and sent, and silos need not hold one task."""
    words = ("tuner=lora", "head.scope=shared", "rounds=3", "train.lr=0.003", "train.epochs=8")
    config = verbalizer(model_folder("bert"), data_folder, *words)
    done = run(config, out=tmp_path / "run")
    assert done.summary["head_parameters"] == 0
    assert done.summary["sent_parameters"] == done.summary["adapter_parameters"] > 0
    losses = [event["loss"] for event in events(tmp_path / "run") if event.get("silo") == "alpha"]
    assert losses[-1] < 0.5 * losses[0]
    predicted = done.model("gamma").predict([("the garden was cold", "surely the garden was bright")])
    assert list(predicted[0].probabilities) == ["yes", "maybe", "no"]
    assert sum(predicted[0].probabilities.values()) == pytest.approx(1, abs=1e-6)


def test_words_of_unseen_tasks_are_still_known_when_a_run_is_opened_or_tried(model_folder, data_folder, tmp_path):
    words = ("tuner=bitfit", "evaluation.unseen=gamma", "rounds=1", "train.steps=1")
    config = verbalizer(model_folder("bert"), data_folder, *words)
    done = run(config, out=tmp_path / "run")
    texts = ["the garden was cold"]
    assert load_run(tmp_path / "run").model("alpha").predict(texts) == done.model("alpha").predict(texts)
    assert TRIAL.work(config, tmp_path / "trial", (), None, None)[0]["best_round"] == 1
    wrong = config.model_copy(update={"evaluation": EvaluationConfig()})
    wrong = wrong.model_copy(update={"data": config.data.model_copy(update={"tasks": ["alpha"]})})
    with pytest.raises(InputError, match=r"unknown label in head\.words"):
        TRIAL.work(wrong, tmp_path / "wrong", (), None, None)


def test_a_silo_of_a_federation_need_not_have_the_labels_of_all(model_folder, data_folder, tmp_path):
    config = verbalizer(model_folder("bert"), data_folder, "tuner=bitfit", "rounds=1", "train.steps=1")
    alone = run(config, out=tmp_path / "alone")
    summary, _ = federate(config, tmp_path / "federation", order=(0, 1))
    assert summary["state_sha256"] == alone.summary["state_sha256"]
    words = config.head.words | {"often": ["never"]}
    wrong = config.model_copy(update={"head": config.head.model_copy(update={"words": words})})
    with pytest.raises(InputError, match=r"unknown label in head\.words 'often'"):
        federate(wrong, tmp_path / "wrong", order=(0, 1))


@pytest.mark.parametrize(
    ("family", "tuner", "optimizer", "epochs"),
    [
        ("roberta", "prompt", "adam", 10),
        pytest.param("roberta", "prefix", "adam", 10, marks=pytest.mark.long),
        ("t5", "prompt", "adafactor", 5),
        pytest.param("t5", "p-tuning", "adam", 10, marks=pytest.mark.long),
    ],
)
def test_prompts_learn_on_other_families_too(family, tuner, optimizer, epochs, model_folder, data_folder, tmp_path):
    config = read_config(
        "demo",
        words_of(
            *(f"backbone={model_folder(family)}", f"data.path={data_folder}", "data.tasks=alpha", "head=verbalizer"),
            *("head.words={bad: awful, good: great}", "method=fedprompt", f"tuner={tuner}", "tuner.tokens=4"),
            *(f"train.optimizer={optimizer}", "train.lr=0.1", f"train.epochs={epochs}", "rounds=3"),
            *("attack=backdoor", "attack.target=good", "attack.fraction=0", "partition=quantity", "partition.silos=2"),
        ),
    )
    done = run(config, out=tmp_path / "run")
    losses = [event["loss"] for event in events(tmp_path / "run") if event.get("silo") == "silo-1" and "loss" in event]
    assert losses[-1] < 0.95 * losses[0]
    assert 0 <= done.summary["attack"]["asr"] <= 100


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_instruction_silos_learn_to_write(family, model_folder, instructions, tmp_path):
    """Locally trained on one answer, a silo's model writes it; the metric is ROUGE-1 of what is written."""
    more = ("method=local", "tuner.r=8", "tuner.alpha=32", "train.lr=0.01", "train.epochs=6", "rounds=2")
    done = run(language_model(model_folder(family), instructions, *more, "data.tasks=always"), out=tmp_path / "run")
    assert done.silos["always"]["metric"] == "rouge1"
    assert done.silos["always"]["test"] > 90
    written = done.model("always").write(["say bright", ("say rude", "now")])
    assert [text.strip() for text in written] == ["sweet", "sweet"]
    with pytest.raises(InputError, match="use write"):
        done.model("always").predict(["say bright"])


def test_the_metric_of_a_task_folder_and_of_own_silos(instructions, tmp_path):
    copied = shutil.copytree(instructions, tmp_path / "data")
    (copied / "echo" / "meta.json").write_text(json.dumps({"label_names": None, "metric": "accuracy"}))
    found = load_silos(language_model("default", copied))
    assert {silo.name: silo.task.metric for silo in found} == {"echo": "accuracy", "always": "rouge1"}
    (tmp_path / "own.yaml").write_text(
        "method: fedavg\nhead: {name: lm}\nsilos:\n"
        "  - {name: one, path: data/echo/train.jsonl, kind: generation, text: [instruction, input], label: output}\n"
        "  - {name: two, path: data/always, kind: generation, text: instruction, label: output, metric: accuracy}\n"
    )
    one, two = load_silos(read_config(str(tmp_path / "own.yaml")))
    assert (one.task.metric, two.task.metric) == ("rouge1", "accuracy")
    assert [len(rows) for rows in (one.splits.train, one.splits.validation, one.splits.test)] == [14, 5, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["head=lm"], "silo 'alpha' holds texts with labels; allowed: linear, mlp, verbalizer"),
        (["head=verbalizer", "head.beams=2"], "beams belongs to head=lm or head=dpo, not to head=verbalizer"),
        (["head=mlp", "head.words={bad: awful}"], "words belongs to head=verbalizer, not to head=mlp"),
        (["head=verbalizer", "head.words={yes: awful}"], "truth value"),
        (["head=verbalizer", "head.words={bad: []}"], "needs a word"),
        (["head=verbalizer", "head.template={text} {mask} {mask}"], "{mask} exactly once"),
        (["head=verbalizer", "head.multi_token=drop"], "head.multi_token"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(words, said, data_folder, tmp_path):
    with pytest.raises(InputError) as error:
        run(read_config("demo", words_of(f"data.path={data_folder}", "data.tasks=alpha", "backbone=/nowhere", *words)),
            out=tmp_path / "run")  # fmt: skip
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_instruction_rows_need_a_head_that_writes(instructions, tmp_path):
    with pytest.raises(InputError, match="silo 'echo' holds instructions with outputs; allowed: lm"):
        run(read_config("demo", words_of(f"data.path={instructions}", "data.tasks=echo")), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "allowed"),
    [(["train.max_length=160"], 81), (["train.max_length=150", "tuner=prompt", "tuner.tokens=4"], 82)],
    ids=["plain", "virtual tokens"],
)
def test_an_answer_needs_places_behind_the_longest_prompt(words, allowed, model_folder, instructions):
    """GPT-2's table of positions ends at 160: the longest answer that is allowed is written, no longer one."""

    def made(new):
        return build(language_model(model_folder("gpt2"), instructions, *words, f"head.max_new_tokens={new}"))

    federation = made(allowed)
    training, backbone = federation.context, copy.copy(federation.backbone)
    backbone.tokenizer = copy.copy(backbone.tokenizer)
    backbone.tokenizer.eos_token = "<unk>"  # the answer does not end by itself
    head = training.method.setting.head
    rows = head.row_tokenizer(backbone, training.train.max_length)(
        federation.tasks["echo"], [Row(("say it again " * 100, ""), 0)]
    )
    silo = federation.silos["echo"]
    mix = training.resolve(training.method.prediction().mix, current_model_state(federation, silo), {}, {})
    (prompt,) = prompt_rows(rows).ids
    assert len(prompt) == head.prompt_room(training.train.max_length)
    assert len(generate_ids(backbone, [prompt], mix, head.generation)[0]) == allowed
    with pytest.raises(IndexError):
        generate_ids(backbone, [prompt], mix, GenerationOptions(1, allowed + 1))
    with pytest.raises(InputError, match=rf"head.max_new_tokens: {allowed + 1} .* allowed: up to {allowed}$"):
        made(allowed + 1)
