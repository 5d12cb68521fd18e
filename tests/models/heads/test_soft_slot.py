"""A template's {soft}: the prompt's vectors stand exactly there, in every family, row by row and padded."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silotune.data.rows import Row
from silotune.data.templates import ClozeTemplate
from silotune.errors import InputError
from silotune.models.heads import VerbalizerHead
from silotune.models.tuners.prompts import PROMPT_TENSOR
from silotune.runs.build.builder import build
from silotune.runs.build.resolve import read_config
from silotune.runs.run import run
from tests.models.heads.test_verbalizer import TASK, TEXTS, WORDS, head_logits, rows_of
from tests.support.language_models import MASKED, backbone_of, ingredients, made
from tests.support.tiny import words

TOKENS = 3
# (template, what is before the prompt, what is behind it)
PLACES = {
    "between": ("{text} {soft} is {mask}.", "{text}", " is {mask}."),
    "behind": ("{text} is {mask}. {soft}", "{text} is {mask}.", ""),
    "first": ("{soft} {text} is {mask}.", "", "{text} is {mask}."),
    "at-the-mask": ("{text} is {soft}{mask}", "{text} is ", "{mask}"),
}


def pieces_by_hand(tokenizer, before, behind):
    """Token ids of the two halves inside one text's special tokens."""
    whole = tokenizer("a")["input_ids"]
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next(position for position in range(len(whole)) if whole[position : position + len(alone)] == alone)
    halves = [tokenizer(half, add_special_tokens=False)["input_ids"] if half else [] for half in (before, behind)]
    return whole[:start] + halves[0], halves[1] + whole[start + len(alone) :]


@pytest.mark.parametrize("family", [*MASKED, "t5"])
@pytest.mark.parametrize("position", PLACES)
def test_logits_are_the_models_own_with_the_vectors_put_there(family, position):
    template, before, behind = PLACES[position]
    model, tokenizer = made(family)
    backbone = backbone_of(family)
    (part,) = ingredients(backbone, 1.0, tuner="prompt", tokens=TOKENS)
    actual, batch, _ = head_logits(backbone, VerbalizerHead(template, WORDS), TASK, rows_of(TEXTS), [part])
    assert len(batch.micro) > 1
    mask = "<extra_id_0>" if family == "t5" else tokenizer.mask_token
    mask_id = tokenizer.convert_tokens_to_ids(mask)
    words_of = [tokenizer(f" {WORDS[label][0]}", add_special_tokens=False)["input_ids"] for label in TASK.labels]
    embed = model.get_input_embeddings()
    for text, logits in zip(TEXTS, actual, strict=True):
        left, right = pieces_by_hand(tokenizer, *(half.format(text=text, mask=mask) for half in (before, behind)))
        vectors = [embed(torch.tensor(left, dtype=torch.long)), part.tensors[PROMPT_TENSOR], embed(torch.tensor(right))]
        given_vectors = torch.cat(vectors).unsqueeze(0)
        with torch.no_grad():
            if family == "t5":
                decoder = torch.tensor([[0, mask_id]])
                scores = model(inputs_embeds=given_vectors, decoder_input_ids=decoder).logits[0, 1]
            else:
                at = left.index(mask_id) if mask_id in left else len(left) + TOKENS + right.index(mask_id)
                scores = model(inputs_embeds=given_vectors).logits[0, at]
        torch.testing.assert_close(logits, scores[[one[0] for one in words_of]], atol=2e-5, rtol=1e-4)


@given(
    texts=st.lists(st.lists(st.sampled_from([*words(), "-", "é"]), max_size=12).map(" ".join), min_size=1, max_size=4),
    room=st.integers(9, 20),
)
@settings(max_examples=25, deadline=None)
def test_the_prompt_is_never_moved_by_truncation(texts, room):
    """Before the token that begins " is", whatever is cut off the text before it."""
    tokenizer = made("bert")[1]
    head = VerbalizerHead("{text} {soft} is {mask}.", WORDS)
    actual = head.row_tokenizer(backbone_of("bert"), room)(TASK, [Row((text,), 0) for text in texts])
    for ids, position in zip(actual.ids, actual.soft, strict=True):
        assert len(ids) <= room
        behind = tokenizer.convert_ids_to_tokens(ids[position:])
        assert "".join(behind).replace("##", "") == "is[MASK].[SEP]"


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{text} {soft} is {mask}.", "x is M."),
        ("{soft} {text} is {mask}.", "x is M."),
        ("{text}{soft} is {mask}.", "x is M."),
        ("{text} is {mask}. {soft}", "x is M."),
    ],
)
def test_the_slot_leaves_one_blank(template, filled):
    assert ClozeTemplate(template).fill(("x",), "M")[0] == filled


def test_two_slots_are_refused():
    with pytest.raises(InputError, match=r"may have \{soft\} once"):
        ClozeTemplate("{soft} {text} {soft} {mask}")


def config_of(backbone, data, *more):
    template = 'head.template="{text} {soft} is {mask}."'
    words = [f"backbone={backbone}", f"data.path={data}", "data.tasks=alpha", "data.merge=false"]
    words += ["head=verbalizer", template, "head.words={bad: awful, good: great}", "threads=1", "precision=fp32"]
    words += ["method=fedprompt", "rounds=1", "train.steps=2", "train.max_length=32", *more]
    return read_config("demo", words)


def test_a_tuner_without_a_soft_prompt_is_refused(model_folder, data_folder):
    config = config_of(model_folder("bert"), data_folder, "tuner=lora")
    with pytest.raises(
        InputError, match=r"\{soft\} is a place for a soft prompt; tuner=lora has none; .*p-tuning, pro"
    ):
        build(config)


@pytest.mark.parametrize("tuner", ["prompt", "p-tuning"])
def test_a_run_with_the_prompt_inside_the_text(tuner, model_folder, tmp_path, data_folder):
    done = run(config_of(model_folder("bert"), data_folder, f"tuner={tuner}", "tuner.tokens=4"), out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sent_parameters"] == summary["adapter_parameters"] > 0
    (actual,) = done.model("alpha").predict(["the garden was awful"])
    assert sum(actual.probabilities.values()) == pytest.approx(1, abs=1e-6)
