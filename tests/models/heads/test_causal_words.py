"""Label words on causal models: the next token's logits, and log-likelihoods of words, against plain transformers."""

from __future__ import annotations

import pytest
import torch

from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.interop.export import export
from silotune.models.backbone.loading import load_backbone
from silotune.models.heads import VerbalizerHead
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from silotune.runs.run_result import load_run
from tests.models.heads.test_verbalizer import PAIRS, TASK, TEXTS, WORDS, head_logits, rows_of
from tests.support.language_models import backbone_of, ingredients, made
from tests.support.tiny import tiny_overrides
from tests.support.tiny import words as all_words

LONG = {"bad": ["quite awful"], "good": ["great", "xyzzy now"]}


def prompts(texts, tokenizer):
    filled = [f"{text} is" if isinstance(text, str) else f"{text[0]}\n{text[1]}\nAnswer:" for text in texts]
    return [tokenizer(text)["input_ids"] for text in filled]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("texts", [TEXTS, PAIRS], ids=["single", "pair"])
def test_logits_are_those_of_the_next_token(family, texts):
    model, tokenizer = made(family)
    whole = [word for word in all_words() if len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1]
    chosen = {"bad": whole[:1], "good": whole[1:2]}
    head = VerbalizerHead(words=chosen)
    head.check(backbone_of(family), [TASK])
    assert not head.forwards_again
    actual, batch, _ = head_logits(backbone_of(family), head, TASK, rows_of(texts))
    assert len(batch.micro) > 1
    ids = [tokenizer(f" {chosen[label][0]}", add_special_tokens=False)["input_ids"] for label in TASK.labels]
    for prompt, logits in zip(prompts(texts, tokenizer), actual, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1, [one[0] for one in ids]]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_word_of_several_tokens_scores_its_mean_log_likelihood(tuned):
    """By one forward over prompt and word in transformers; tuned, with the prompt's vectors before it."""
    model, tokenizer = made("llama")
    backbone = backbone_of("llama")
    mix = ingredients(backbone, 1.0, tuner="prompt", tokens=3) if tuned else []
    head = VerbalizerHead(words=LONG, average="best")
    head.check(backbone, [TASK])
    assert head.forwards_again
    actual, _, _ = head_logits(backbone, head, TASK, rows_of(TEXTS), mix)
    for prompt, logits in zip(prompts(TEXTS, tokenizer), actual, strict=True):
        expected = {}
        for label, words in LONG.items():
            scores = []
            for word in words:
                ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
                whole = torch.tensor([[*prompt, *ids]])
                embedded = model.get_input_embeddings()(whole)
                if tuned:
                    embedded = torch.cat([mix[0].tensors["prompt_embeddings"].unsqueeze(0), embedded], 1)
                with torch.no_grad():
                    likely = torch.log_softmax(model(inputs_embeds=embedded).logits[0, -len(ids) - 1 : -1], -1)
                scores.append(likely[range(len(ids)), ids].mean().item())
            expected[label] = max(scores)
        torch.testing.assert_close(logits, torch.tensor([*expected.values()]), atol=2e-5, rtol=1e-4)


def test_long_texts_leave_room_for_the_words():
    head = VerbalizerHead(words=LONG)
    backbone = backbone_of("llama")
    longest = max(len(ids) for ids in head._label_words(backbone, TASK).tokens)
    rows = head.row_tokenizer(backbone, 24)(TASK, [Row(("the garden was warm " * 9,), 0)])
    assert len(rows.ids[0]) + longest - 1 <= 24
    assert backbone.tokenizer.decode(rows.ids[0]).endswith(" is")


@pytest.mark.parametrize("template", ["{text} is {mask} today.", "{a}? {mask}, {b}"])
def test_what_stands_behind_the_mask_is_refused(template):
    with pytest.raises(InputError, match=r"has text behind \{mask\}, and a causal model"):
        VerbalizerHead(template, WORDS).check(backbone_of("llama"), [TASK])


def test_a_soft_prompt_keeps_its_place():
    head = VerbalizerHead("{text} {soft} is {mask}.", WORDS)
    backbone = backbone_of("llama")
    rows = head.row_tokenizer(backbone, 40)(TASK, rows_of(TEXTS))
    behind = [backbone.tokenizer.decode(ids[soft:]) for ids, soft in zip(rows.ids, rows.soft, strict=True)]
    assert behind == [" is"] * len(TEXTS)


@pytest.mark.parametrize("chosen", ["{bad: awful, good: great}", "{bad: quite awful, good: great}"])
def test_fedprompt_runs_on_a_causal_model(chosen, model_folder, tmp_path, data_folder):
    """Its models tell texts apart, and the untouched backbone is a baseline."""
    config = read_config(
        "demo",
        [
            *tiny_overrides("fedprompt", model_folder("llama"), data_folder),
            *("head=verbalizer", f"head.words={chosen}", "data.tasks=[alpha]", "train.max_length=40"),
            *("tuner=prompt", "tuner.tokens=4", "rounds=1", "train.steps=2", "train.lr=0.3", "evaluation.shots=2"),
        ],
    )
    finished = run(config, out=tmp_path / "run")
    (name, *_) = finished.federation.tasks
    scores = finished.summary["baselines"]["silos"][name]
    assert {"untouched", "shown"} <= scores.keys()
    model = load_run(tmp_path / "run").model(name)
    found = model.predict(["the garden was warm", "the soup was grim"])
    assert found[0].probabilities != found[1].probabilities


def test_a_merged_export_is_a_causal_model(model_folder, tmp_path, data_folder):
    words = ["method=fedavg", "method.adapters=1", "tuner=lora", "head=verbalizer", "data.tasks=[alpha]"]
    words += ["head.words={bad: awful, good: great}", "rounds=1", "train.steps=1", "precision=fp32"]
    given = tiny_overrides("fedavg", model_folder("llama"), data_folder)
    finished = run(read_config("demo", [*given, *words]), out=tmp_path / "run")
    (name, *_) = finished.federation.tasks
    about = export(load_run(tmp_path / "run").model(name), "merged", tmp_path / "merged")
    assert about["base_class"] == "AutoModelForCausalLM"
    assert load_backbone(str(tmp_path / "merged"), model_class="AutoModelForCausalLM").lm_head is not None


def test_answered_rows_before_a_question():
    head = VerbalizerHead(words={"bad": ["awful"], "good": ["great"]}).after(
        [Row(("the {garden}",), 1), Row(("soup",), 0)], TASK, causal=True
    )
    rows = head.row_tokenizer(backbone_of("llama"), 60)(TASK, rows_of(["a song"]))
    asked = backbone_of("llama").tokenizer.decode(rows.ids[0], skip_special_tokens=True)
    assert asked.strip() == "the {garden} is great.\nsoup is awful.\na song is"


def test_labels_that_are_words():
    """Label names are their own words, of any number of tokens."""
    task = Task("mood", ("unbelievable", "warm"))
    head = VerbalizerHead()
    head.check(backbone_of("llama"), [task])
    logits, _, _ = head_logits(backbone_of("llama"), head, task, rows_of(TEXTS))
    assert logits.isfinite().all()
