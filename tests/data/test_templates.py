"""Templates: checked when they are made; truncation takes from the texts alone, whatever they are."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.templates import ClozeTemplate, InstructionTemplate, encode_fitting
from silotune.errors import InputError
from silotune.models.forward.generation import GenerationOptions
from silotune.models.heads import LanguageModelHead, VerbalizerHead
from silotune.models.heads.lm import prompt_rows
from tests.support.language_models import CHAT_TEMPLATE, backbone_of, made

TASK = Task("t", ("cold", "warm"))
WRITE = Task("w", (), "rouge1", "generation")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{text} is good.", "{mask} exactly once"),
        ("{text} {mask} {mask}", "{mask} exactly once"),
        ("It is {mask}.", "{text} once, or {a} and {b}"),
        ("{text} {text} {mask}", "{text} once, or {a} and {b}"),
        ("{a} {mask}", "{text} once, or {a} and {b}"),
        ("{text} {b} {mask}", "{text} once, or {a} and {b}"),
        ("{words} {mask}", "unknown slot {words}"),
        ("{text {mask}", "head.template"),
        ("{text!r} {mask}", "a slot is a name in braces"),
        ("{} {mask}", "a slot is a name in braces"),
    ],
)
def test_cloze_templates_are_checked(text, said):
    with pytest.raises(InputError, match=r"head\.template") as error:
        ClozeTemplate(text)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["{input}", "{instruction} {instruction}", "{instruction} {mask}", "no slot"])
def test_instruction_templates_are_checked(text):
    with pytest.raises(InputError, match=r"head\.template"):
        InstructionTemplate(text)


def test_filling():
    assert ClozeTemplate("{{{b}}} {mask}: {a}").fill(("one", "two {mask}"), "[M]") == ("{two {mask}} [M]: one", 16)
    assert InstructionTemplate()(("Do it.", "")) == "### Instruction:\nDo it.\n\n### Response:\n"
    assert InstructionTemplate()(("Do it.", "With this.")) == "### Instruction:\nDo it.\nWith this.\n\n### Response:\n"
    assert InstructionTemplate("I {instruction} In {input} R ")(("a", "b")) == "I a In b R "


def test_a_template_of_the_wrong_number_of_texts_is_refused():
    head = VerbalizerHead("{text} {mask}")
    with pytest.raises(InputError, match=r"takes \{text\}, but rows of task 't' have two texts"):
        head.row_tokenizer(backbone_of("bert"), 32)(TASK, [Row(("one", "two"), 0)])


def test_a_template_longer_than_the_limit_is_refused():
    head = VerbalizerHead("the garden was lovely and the soup felt cold {text} {mask}.")
    with pytest.raises(InputError, match="takes 13 tokens without any text, but there is room for 12"):
        head.row_tokenizer(backbone_of("bert"), 12)(TASK, [Row(("one",), 0)])


def test_templates_by_task():
    head = VerbalizerHead({"t": "{mask} {text}"})
    ids = head.row_tokenizer(backbone_of("bert"), 32)(TASK, [Row(("the soup",), 0)]).ids[0]
    other = head.row_tokenizer(backbone_of("bert"), 32)(Task("u", TASK.labels), [Row(("the soup",), 0)]).ids[0]
    tokenizer = made("bert")[1]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "[MASK]", "the", "soup", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(other) == ["[CLS]", "the", "soup", "i", "##s", "[MASK]", ".", "[SEP]"]


TEXT = st.text(st.sampled_from("abc .,!?'-é漢🙂\n\t{}[]<>#0"), max_size=60) | st.lists(
    st.sampled_from(["the", "garden", "was", "lovely", "[MASK]", "<mask>", "<extra_id_0>", "</s>", "soup"]), max_size=30
).map(" ".join)
FAMILIES = ["bert", "roberta", "t5"]
PROPERTY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("family", FAMILIES)
@PROPERTY
@given(text=TEXT, length=st.integers(16, 40))
def test_truncation_never_takes_the_mask_or_what_follows_it(family, text, length):
    """What is left is the whole template around a beginning of the text; what fits is not touched."""
    backbone, (_, tokenizer) = backbone_of(family), made(family)
    rows = VerbalizerHead("so {text} is {mask}.").row_tokenizer(backbone, length)(TASK, [Row((text,), 0)])
    (ids,), mask = rows.ids, "<extra_id_0>" if family == "t5" else tokenizer.mask_token
    assert len(ids) <= length
    whole = tokenizer(f"so {text} is {mask}.")["input_ids"]
    if len(whole) <= length:
        assert ids == whole
    beginnings = (text[:end] for end in reversed(range(len(text) + 1)))
    kept = any(tokenizer(f"so {beginning} is {mask}.")["input_ids"] == ids for beginning in beginnings)
    assert kept, "not the template around a beginning of the text"
    if family == "t5":
        assert rows.decoder == [[0, tokenizer.convert_tokens_to_ids(mask)]]
        assert rows.reads == [[1]]
    else:
        (place,) = rows.reads[0]
        assert ids[place:] == tokenizer(f"{mask}.")["input_ids"][1:]  # the mask, the template's own end, nothing else


@PROPERTY
@given(one=TEXT, two=TEXT, length=st.integers(16, 40))
def test_pairs_lose_tokens_from_the_longer_text(one, two, length):
    backbone, (_, tokenizer) = backbone_of("bert"), made("bert")
    rows = VerbalizerHead().row_tokenizer(backbone, length)(TASK, [Row((one, two), 0)])
    (ids,), (place,) = rows.ids, rows.reads[0]
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (one, two)]
    assert len(ids) <= length
    assert ids[place] == tokenizer.mask_token_id
    left, right = place - 2, len(ids) - place - 3  # [CLS] a ? [MASK] , b [SEP]
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[place - 1], ids[place + 1], ids[-1]]) == [
        "[CLS]",
        "?",
        ",",
        "[SEP]",
    ]
    if sum(counts) + 5 <= length:
        assert [left, right] == counts
    else:
        # The longer one is cut down to the other before that one loses anything. White space behind a cut goes, and
        # pieces of one word may join, so that a few tokens more than needed may go.
        shorter, longer = (left, right) if counts[0] <= counts[1] else (right, left)
        assert longer <= max(counts)
        assert shorter == min(counts) or abs(longer - shorter) <= 12
        assert sum(counts) > left + right


@cache
def tokenizing(family, template):
    """A tokenizer with a chat template, and what makes rows by it."""
    backbone, tokenizer = copy.copy(backbone_of(family)), copy.deepcopy(made(family)[1])
    backbone.tokenizer, tokenizer.chat_template = tokenizer, CHAT_TEMPLATE
    head = LanguageModelHead(template, GenerationOptions(max_new_tokens=8))
    return tokenizer, head.row_tokenizer(backbone, 80)


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("template", ["### Instruction:\n{instruction}\n\n### Response:\n", "chat"])
@PROPERTY
@given(text=TEXT, more=TEXT)
def test_prompts_end_where_the_response_begins(family, template, text, more):
    tokenizer, tokenize = tokenizing(family, template)
    (prompt,) = prompt_rows(tokenize(WRITE, [Row((text, more), 0, "yes")])).ids
    (same,) = prompt_rows(tokenize(WRITE, [Row((text, more), 0, "a much longer answer than before")])).ids
    assert prompt == same, "the prompt knows its answer"
    opening = "<assistant> " if template == "chat" else "\n\n### Response:\n"
    if family == "llama":
        end = tokenizer(opening, add_special_tokens=False)["input_ids"][-3:]
        assert prompt[-3:] == end
        assert len(prompt) <= 72
        assert prompt.count(tokenizer.bos_token_id) == (0 if template == "chat" else 1) + text.count("<s>")


def test_responses_and_what_is_read():
    backbone, (_, tokenizer) = backbone_of("llama"), made("llama")
    rows = LanguageModelHead(generation=GenerationOptions(max_new_tokens=10)).row_tokenizer(backbone, 60)(
        WRITE, [Row(("a", ""), 0, "the soup"), Row(("a", ""), 0, "x" * 99)]
    )
    response = tokenizer("the soup", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("### Instruction:\na\n\n### Response:\n")["input_ids"]
    assert rows.ids[0] == [*prompt, *response, tokenizer.eos_token_id]
    assert rows.targets[0] == rows.ids[0][len(prompt) :]
    assert [rows.ids[0][place + 1] for place in rows.reads[0]] == rows.targets[0]
    assert rows.reads[0][0] == len(prompt) - 1
    assert len(rows.ids[1]) == 60
    assert tokenizer.eos_token_id not in rows.ids[1], "a response that was cut does not end there"


def test_many_rows_are_encoded_as_each_alone():
    tokenizer = made("bert")[1]
    texts = [("the soup was cold " * n,) for n in (1, 30, 2, 9)]
    fill = lambda row: f"so {row[0]}!"  # noqa: E731
    together = encode_fitting(tokenizer, fill, texts, 24)
    assert [one.ids for one in together] == [encode_fitting(tokenizer, fill, [text], 24)[0].ids for text in texts]
    assert [len(one.ids) for one in together].count(24) == 2


def test_a_mask_that_takes_the_blank_before_it():
    """RoBERTa's own mask token does: it then covers more characters than its name."""
    backbone, tokenizer = copy.copy(backbone_of("roberta")), copy.deepcopy(made("roberta")[1])
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    backbone.tokenizer = tokenizer
    rows = VerbalizerHead().row_tokenizer(backbone, 24)(TASK, [Row(("a <mask> was",), 0), Row(("so" * 30,), 0)])
    for ids, (place,) in zip(rows.ids, rows.reads, strict=True):
        assert tokenizer.convert_ids_to_tokens(ids[place : place + 1]) == ["<mask>"]
        assert place == max(at for at, token in enumerate(ids) if token == tokenizer.mask_token_id)
    assert rows.ids[0].count(tokenizer.mask_token_id) == 2
    assert tokenizer.convert_ids_to_tokens(rows.ids[0][rows.reads[0][0] - 1]) == "s"  # no blank of its own left
