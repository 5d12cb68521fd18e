"""The verbalizer head against plain transformers, and its words by hand."""

from __future__ import annotations

import math
from copy import deepcopy as copy_of
from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers, pre_tokenizers

from silotune.data.batching import make_batch
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.templates import PAIR, SINGLE
from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.loading import load_backbone
from silotune.models.heads import VerbalizerHead
from silotune.models.heads.verbalizer import label_words
from tests.support.language_models import MASKED, backbone_of, ingredients, made
from tests.support.views import view_of_batch

TASK = Task("mood", ("bad", "good"))
WORDS = {"bad": ["awful"], "good": ["great"]}
TEXTS = [
    "the garden was lovely",
    "the soup felt cold again today",
    "a song",
    "the winter became dull at last without a word and all the same the river was warm and sweet again",
]
PAIRS = [
    ("the garden was lovely", "and kind"),
    ("a song", "the soup felt cold again"),
    ("soup", "warm and kind and sweet and great and lovely and bright in the end for us all the same"),
]


def rows_of(texts):
    return [Row((text,) if isinstance(text, str) else text, position % 2) for position, text in enumerate(texts)]


def head_logits(backbone, head, task, rows, mix=(), call_cost=1, max_length=64):
    """The head's logits, in the rows' order, and the batch; `call_cost=1` makes many micro-batches."""
    encoded = head.row_tokenizer(backbone, max_length)(task, rows)
    batch = make_batch(encoded, range(len(rows)), int(backbone.tokenizer.pad_token_id), call_cost)
    view = view_of_batch(backbone, batch, mix, head_readings={head.name: head.reading(backbone, task)})
    logits = torch.zeros(len(rows), len(task.labels))
    logits[batch.rows] = head.logits({}, view, task).detach()
    return logits, batch, view


@pytest.mark.parametrize("family", MASKED)
@pytest.mark.parametrize("texts", [TEXTS, PAIRS], ids=["single", "pair"])
def test_logits_are_the_masked_language_models_own_at_the_mask(family, texts):
    model, tokenizer = made(family)
    rows = rows_of(texts)
    actual, batch, _ = head_logits(backbone_of(family), VerbalizerHead(words=WORDS), TASK, rows)
    assert len(batch.micro) > 1
    ids = [tokenizer(f" {WORDS[label][0]}", add_special_tokens=False)["input_ids"] for label in TASK.labels]
    assert all(len(one) == 1 for one in ids)
    for row, logits in zip(rows, actual, strict=True):
        slots = dict(zip(("text",) if len(row.texts) == 1 else ("a", "b"), row.texts, strict=True))
        text = (SINGLE if len(row.texts) == 1 else PAIR).format(mask=tokenizer.mask_token, **slots)
        encoded = tokenizer(text, return_tensors="pt")
        (position,) = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero()
        with torch.no_grad():
            expected = model(**encoded).logits[0, position.item(), [one[0] for one in ids]]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_t5_is_read_where_the_decoder_answers_the_sentinel():
    model, tokenizer = made("t5")
    actual, _, _ = head_logits(backbone_of("t5"), VerbalizerHead(words=WORDS), TASK, rows_of(TEXTS))
    words = tokenizer.convert_tokens_to_ids(["▁awful", "▁great"])
    for text, logits in zip(TEXTS, actual, strict=True):
        encoded = tokenizer(f"{text} is <extra_id_0>.", return_tensors="pt")
        sentinel = tokenizer.convert_tokens_to_ids("<extra_id_0>")
        assert (encoded["input_ids"] == sentinel).sum() == 1
        decoder = torch.tensor([[model.config.decoder_start_token_id, sentinel]])
        with torch.no_grad():
            expected = model(input_ids=encoded["input_ids"], decoder_input_ids=decoder).logits[0, 1, words]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_prompt_before_the_text_does_not_move_the_mask(family):
    """Virtual tokens: equal to the model run by hand over embeddings with the vectors before the text's."""
    model, tokenizer = made(family)
    backbone = backbone_of(family)
    (part,) = mix = ingredients(backbone, 1.0, tuner="prompt", tokens=3)
    actual, _, _ = head_logits(backbone, VerbalizerHead(words=WORDS), TASK, rows_of(TEXTS), mix)
    mask = "<extra_id_0>" if family == "t5" else tokenizer.mask_token
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("awful", "great")]
    for text, logits in zip(TEXTS, actual, strict=True):
        ids = tokenizer(f"{text} is {mask}.", return_tensors="pt")["input_ids"]
        vectors = part.tensors["prompt_embeddings"].unsqueeze(0)
        embedded = torch.cat([vectors, model.get_input_embeddings()(ids)], 1)
        with torch.no_grad():
            if family == "t5":
                decoder = torch.tensor([[0, tokenizer.convert_tokens_to_ids(mask)]])
                expected = model(inputs_embeds=embedded, decoder_input_ids=decoder).logits[0, 1, words]
            else:
                position = 3 + (ids[0] == tokenizer.mask_token_id).nonzero().item()
                expected = model(inputs_embeds=embedded).logits[0, position, words]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_vocabulary_logits_of_other_words_are_never_made(monkeypatch):
    """Only the states at the masks meet only the label words."""
    backbone = backbone_of("bert")
    seen = []
    linear = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        seen.append((*x.shape[:-1], len(weight)))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    head_logits(backbone, VerbalizerHead(words=WORDS), TASK, rows_of(TEXTS), call_cost=10**6)
    assert (1, 4, 2) in seen  # four masks, two words
    assert not any(shape[-1] == len(backbone.tokenizer) for shape in seen)


def test_several_words_a_class_by_hand():
    """Class scores from the words' own scores, taken one at a time through one-to-one verbalizers."""
    backbone, rows = backbone_of("bert"), rows_of(TEXTS)
    chosen = {"bad": ["awful", "rude", "grim"], "good": ["great"]}
    single = {}
    for word in ("awful", "rude", "grim"):
        pair, _, _ = head_logits(backbone, VerbalizerHead(words={"bad": [word], "good": ["great"]}), TASK, rows)
        single[word], single["great"] = pair[:, 0].tolist(), pair[:, 1].tolist()
    logits, _, _ = head_logits(backbone, VerbalizerHead(words=chosen), TASK, rows)
    probable, _, _ = head_logits(backbone, VerbalizerHead(words=chosen, average="probabilities"), TASK, rows)
    best, _, _ = head_logits(backbone, VerbalizerHead(words=chosen, average="best"), TASK, rows)
    for row in range(len(rows)):
        mean = sum(single[word][row] for word in chosen["bad"]) / 3
        assert logits[row].tolist() == pytest.approx([mean, single["great"][row]], abs=1e-5)
        most = max(single[word][row] for word in chosen["bad"])
        assert best[row].tolist() == pytest.approx([most, single["great"][row]], abs=1e-5)
        bad = sum(math.exp(single[word][row]) for word in chosen["bad"]) / 3
        good = math.exp(single["great"][row])
        expected = [bad / (bad + good), good / (bad + good)]
        assert torch.softmax(probable[row], -1).tolist() == pytest.approx(expected, abs=1e-5)


def test_words_of_several_tokens_are_averaged_where_that_is_chosen():
    model, tokenizer = made("bert")
    head = VerbalizerHead(words={"bad": ["awful"], "good": ["xyz"]}, multi_token="average")
    actual, _, _ = head_logits(backbone_of("bert"), head, TASK, rows_of(TEXTS[:1]))
    pieces = tokenizer.convert_tokens_to_ids(["x", "##y", "##z"])
    encoded = tokenizer(f"{TEXTS[0]} is [MASK].", return_tensors="pt")
    position = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    with torch.no_grad():
        scores = model(**encoded).logits[0, position]
    assert actual[0, 1].item() == pytest.approx(scores[pieces].double().mean().item(), abs=1e-5)
    assert actual[0, 0].item() == pytest.approx(scores[tokenizer.convert_tokens_to_ids("awful")].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"good": ["xyz"]}, "'xyz', for label 'good' of task 'mood', splits into x + ##y + ##z"),
        ({"good": ["awful"], "bad": ["awful"]}, "is also the word of label 'bad'"),
        ({"good": ["漢"]}, "not in the backbone's vocabulary"),
    ],
)
def test_words_that_cannot_work_are_refused_and_named(words, said):
    with pytest.raises(InputError, match=r"head\.words") as error:
        VerbalizerHead(words={"good": ["great"], "bad": ["awful"]} | words).check(backbone_of("bert"), [TASK])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"words": {"goood": ["great"]}}, r"head\.words.*'goood'.*did you mean 'good'"),
        ({"template": {"mod": "{text} {mask}"}}, r"head\.template.*'mod'.*did you mean 'mood'"),
    ],
)
def test_options_for_what_no_task_has_are_refused(options, said):
    head = VerbalizerHead(**options)
    head.check(backbone_of("bert"), [Task("t", ("cold", "warm"))])  # some of a run's tasks: another may have it
    with pytest.raises(InputError, match=said):
        head.check_names([TASK])


def test_words_that_a_tokenizer_reads_as_one_count_once():
    tokenizer = copy_of(backbone_of("bert").tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    backbone = SimpleNamespace(tokenizer=tokenizer, device="cpu")
    actual = label_words(backbone, TASK, [["awful", "Awful", "dull"], ["great"]], "refuse")
    assert actual.ids.tolist() == tokenizer.convert_tokens_to_ids(["awful", "dull", "great"])
    assert actual.of_class.tolist() == [[1, 1, 0], [0, 0, 1]]


def test_a_word_is_read_as_inside_a_text():
    """RoBERTa's own tokenizer has other tokens for a word at the start of a text: its first blank is not added."""
    tokenizer = copy_of(backbone_of("roberta").tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inside = tokenizer("it was great", add_special_tokens=False)["input_ids"][-1]
    assert tokenizer.convert_ids_to_tokens(inside) == "Ġgreat"
    backbone = SimpleNamespace(tokenizer=tokenizer, device="cpu")
    assert label_words(backbone, TASK, [["awful"], ["great"]], "average").ids.tolist()[-1] == inside
    assert tokenizer("great", add_special_tokens=False)["input_ids"] != [inside]


def test_label_names_are_their_own_words():
    task = Task("mood", ("cold", "warm"))
    default, _, _ = head_logits(backbone_of("bert"), VerbalizerHead(), task, rows_of(TEXTS))
    said, _, _ = head_logits(
        backbone_of("bert"), VerbalizerHead(words={"cold": ["cold"], "warm": ["warm"]}), task, rows_of(TEXTS)
    )
    assert torch.equal(default, said)
    with pytest.raises(InputError, match="label 'maybe'"):
        VerbalizerHead().check(backbone_of("bert"), [Task("t", ("cold", "maybe"))])


def test_a_tuned_vocabulary_is_read_where_it_is_tied():
    """Full fine-tuning moves the word embeddings: the tied head scores with the moved ones, as transformers would."""
    model, tokenizer = made("bert")
    backbone = backbone_of("bert")
    (part,) = mix = ingredients(backbone, 1.0, tuner="full")
    actual, _, _ = head_logits(backbone, VerbalizerHead(words=WORDS), TASK, rows_of(TEXTS[:1]), mix)
    tuned = copy_of(model)
    with torch.no_grad():
        for name, tensor in tuned.base_model.named_parameters():
            tensor.copy_(part.tensors[name])
    assert tuned.cls.predictions.decoder.weight is tuned.base_model.embeddings.word_embeddings.weight
    encoded = tokenizer(f"{TEXTS[0]} is [MASK].", return_tensors="pt")
    position = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    with torch.no_grad():
        expected = tuned(**encoded).logits[0, position, tokenizer.convert_tokens_to_ids(["awful", "great"])]
    torch.testing.assert_close(actual[0], expected, atol=1e-4, rtol=1e-4)


def test_backbones_without_a_masked_head_are_refused(backbone_folder):
    with pytest.raises(InputError, match=r"saved without 'cls\."):
        load_backbone(str(backbone_folder("bert")), model_class="AutoModelForMaskedLM")


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_loading_with_or_without_the_head_gives_the_same_transformer(family, model_folder):
    folder = str(model_folder(family))
    alone = load_backbone(folder, precision="fp32")
    with_head = load_backbone(folder, precision="fp32", model_class="AutoModelForMaskedLM")
    assert alone.lm_head is None
    assert with_head.lm_head is not None
    mine, other = (dict(one.base.named_parameters()) for one in (alone, with_head))
    assert mine.keys() == other.keys() | ({"pooler.dense.weight"} & mine.keys())
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert alone.fingerprint == with_head.fingerprint  # of the files
    in_memory = [Backbone(one.model, one.tokenizer).fingerprint for one in (alone, with_head)]
    assert (in_memory[0] == in_memory[1]) is (family == "t5")  # its head is the word embeddings


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_in_bf16_logits_are_near_those_in_float32(family):
    """The head's weights are in bf16 then, while states at the masks may be in float32."""
    model, tokenizer = made(family)
    half = Backbone(copy_of(model).to(torch.bfloat16), tokenizer, precision="bf16")
    rows = rows_of(TEXTS)
    exact, _, _ = head_logits(backbone_of(family), VerbalizerHead(words=WORDS), TASK, rows)
    rounded, _, _ = head_logits(half, VerbalizerHead(words=WORDS), TASK, rows)
    torch.testing.assert_close(rounded, exact, atol=0.3, rtol=0.1)
    assert not torch.equal(rounded, exact)
