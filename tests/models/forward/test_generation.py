"""Generation: batched with a cache equals row by row without one, under any mix; beams equal transformers' search."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import masking_utils

from silotune.models.backbone.backbone import Backbone
from silotune.models.forward import generation
from silotune.models.forward.decoding import start_decoding
from silotune.models.forward.generation import GenerationOptions, generate_ids
from silotune.models.forward.mixing import MixEntry, make_plan
from silotune.models.forward.search import Steps
from tests.support.language_models import CAUSAL, backbone_of, generated, ingredients, made

TEXTS = ["the garden was", "say it: the soup felt cold again and", "a", "perhaps the winter", "surely", "no song at"]
FAMILIES = [*CAUSAL, "t5"]
END = {"llama": 2, "gpt2": 2, "t5": 1}


def prompts(family):
    tokenizer = made(family)[1]
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def of_row(mix, row):
    return [MixEntry(p.tuner, p.tensors, float(p.weight[row]) if torch.is_tensor(p.weight) else p.weight) for p in mix]


@torch.no_grad()
def by_full_forwards(family, prompt, mix, length):
    """One row, no cache, no padding: the whole sequence is encoded again for every token. Also the smallest margin."""
    backbone, written, margin = backbone_of(family), [], float("inf")
    plan = make_plan(backbone, mix)
    for _ in range(length):
        inputs = {"input_ids": torch.tensor([prompt if family == "t5" else [*prompt, *written]])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if family == "t5":
            inputs["decoder_input_ids"] = torch.tensor([[0, *written]])
        scores = backbone.lm_head(backbone.encode(inputs, plan)[0, -1], None, plan.weights)
        best = scores.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        token = best.indices[0].item()
        if token == END[family]:
            break
        written.append(token)
    return written, margin


@cache
def whole_forwards(family, mix, length):
    """What each prompt is followed by under a mix of `MIXES`, with its margin; tests must not change it."""
    mixed = MIXES[mix](backbone_of(family))
    return [by_full_forwards(family, prompt, of_row(mixed, row), length) for row, prompt in enumerate(prompts(family))]


MIXES = {
    "none": lambda backbone: [],
    "lora": lambda backbone: ingredients(backbone, 1.0),
    "two loras": lambda backbone: ingredients(backbone, 0.3, 0.7),
    "two loras by row": lambda backbone: ingredients(
        backbone, torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    ),
    "bottleneck": lambda backbone: ingredients(backbone, 1.0, tuner="bottleneck", r=4),
    "prompt": lambda backbone: ingredients(backbone, 1.0, tuner="prompt", tokens=2, seed=3),
    "prompt by row": lambda backbone: ingredients(
        backbone, torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 1.0]), tuner="prompt", tokens=3
    ),
    "prefix": lambda backbone: ingredients(backbone, 1.0, tuner="prefix", tokens=2, reparametrise=0),
    "prefix by row": lambda backbone: ingredients(
        backbone, torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]), tuner="prefix", tokens=2, reparametrise=0
    ),
    "full": lambda backbone: ingredients(backbone, 1.0, tuner="full"),
    "two fulls by row": lambda backbone: ingredients(
        backbone,
        torch.tensor([0.0, 0.5, 1.0, 0.0, 0.5, 0.0]),
        torch.tensor([1.0, 0.5, 0.0, 1.0, 0.5, 1.0]),
        tuner="full",
    ),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_with_a_cache_is_row_by_row_without(family, mix):
    backbone, length = backbone_of(family), 7
    mixed = MIXES[mix](backbone)
    answers = generate_ids(backbone, prompts(family), mixed, GenerationOptions(1, length), rows_at_once=4)
    compared = set()
    for answer, (expected, margin) in zip(answers, whole_forwards(family, mix, length), strict=True):
        assert margin > 1e-4, "the best two words are too near to each other to tell an error from rounding"
        assert answer == expected
        compared.add(tuple(expected))
    assert len(compared) > 1, "all rows write the same: the test would not see rows being confused"


@pytest.mark.parametrize("mix", ["none", "two loras by row", "prompt by row", "prefix by row", "two fulls by row"])
@pytest.mark.parametrize("family", CAUSAL)
def test_waiting_rows_take_the_places_of_those_that_are_done(family, mix, monkeypatch):
    backbone, length = backbone_of(family), 7
    mixed = MIXES[mix](backbone)
    whole = [written for written, _ in whole_forwards(family, mix, length)]
    chosen = {ids[1 + row] for row, ids in enumerate(whole[:4]) if len(ids) > 1 + row}
    ends = {END[family], *chosen} - {ids[0] for ids in whole if ids}
    monkeypatch.setattr(generation, "end_tokens", lambda _: frozenset(ends))
    joined, join = [], Steps.join
    monkeypatch.setattr(Steps, "join", lambda steps, other: joined.append(join(steps, other)) or joined[-1])
    answers = generate_ids(backbone, prompts(family), mixed, GenerationOptions(1, length), rows_at_once=2)
    for ids, expected in zip(answers, whole, strict=True):
        assert ids == expected[: next((at for at, token in enumerate(expected) if token in ends), length)]
    assert len({len(ids) for ids in answers}) > 1
    if family == "llama" and mix != "two fulls by row":
        assert any(joined)


STACKS = [("llama", {}), ("gpt2", {}), ("t5", {}), ("t5", {"stack": "decoder"})]


@pytest.mark.parametrize(("family", "options"), STACKS, ids=["llama", "gpt2", "t5", "t5-decoder"])
@torch.no_grad()
def test_scores_of_every_step_are_those_of_whole_forwards(family, options):
    """Prefixes that only some rows have, and rows that change places on the way: scores, not just words."""
    backbone, ids = backbone_of(family), prompts(family)
    weights = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 1.0])
    mix = ingredients(backbone, weights, tuner="prefix", tokens=2, reparametrise=0, **options)
    mix += ingredients(backbone, 1 - weights, weights)
    decoding, rows = start_decoding(backbone, ids, mix), list(range(len(ids)))
    written = [[] for _ in ids]
    scores = decoding.first()
    for turn in ([0, 1, 2, 3, 4, 5], [5, 3, 3, 0, 1], [4, 2, 0]):
        for position, row in enumerate(rows):
            begin = [0] if family == "t5" else []
            inputs = {"input_ids": torch.tensor([ids[row] if family == "t5" else [*ids[row], *written[position]]])}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if family == "t5":
                inputs["decoder_input_ids"] = torch.tensor([[*begin, *written[position]]])
            states = backbone.encode(inputs, make_plan(backbone, of_row(mix, row)))
            torch.testing.assert_close(scores[position], backbone.lm_head(states[0, -1]), atol=5e-5, rtol=1e-5)
        decoding.select(torch.tensor(turn))
        rows, written = [rows[position] for position in turn], [written[position] for position in turn]
        tokens = [5 + position for position in range(len(turn))]
        written = [[*tokens_so_far, token] for tokens_so_far, token in zip(written, tokens, strict=True)]
        scores = decoding.next(torch.tensor(tokens))


@cache
def theirs(family, prompt, beams, length, end):
    return generated(made(family)[0], [*prompt], length, beams, end)


@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_transformers_own(family, beams):
    """With the family's end token, which the tiny models never write, and with ends at words that they do write."""
    backbone, length, ids = backbone_of(family), 10, prompts(family)
    frequent = [theirs(family, tuple(prompt), beams, length, END[family]) for prompt in ids]
    ends = {END[family], *(answer[place] for answer, place in zip(frequent[:4], (3, 5, 2, 7), strict=True))}
    lengths = set()
    for end in ends:
        tokenizer = copy.deepcopy(backbone.tokenizer)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        assert tokenizer.eos_token_id == end
        ending = copy.copy(backbone)
        ending.tokenizer = tokenizer
        answers = generate_ids(ending, ids, [], GenerationOptions(beams, length), rows_at_once=4)
        for prompt, answer in zip(ids, answers, strict=True):
            assert answer == theirs(family, tuple(prompt), beams, length, end)
            lengths.add(len(answer))
    assert min(lengths) < length
    assert len(lengths) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_do_not_depend_on_the_batch(family):
    backbone = backbone_of(family)
    mix = MIXES["two loras by row"](backbone)
    options = GenerationOptions(3, 7)
    together = generate_ids(backbone, prompts(family), mix, options, rows_at_once=6)
    alone = [
        generate_ids(backbone, [prompt], of_row(mix, row), options)[0] for row, prompt in enumerate(prompts(family))
    ]
    assert together == alone
    assert together != generate_ids(backbone, prompts(family), mix, GenerationOptions(1, 7))


@pytest.mark.parametrize("family", CAUSAL)
def test_sdpa_answers_the_same_and_reads_no_mask_on_the_way(family, monkeypatch):
    """transformers looks into a mask to leave it out under sdpa, for which a GPU's host has to wait."""
    model, tokenizer = made(family)
    fused = copy.deepcopy(model)
    fused.set_attn_implementation("sdpa")
    looks, look = [], masking_utils.fast_all
    monkeypatch.setattr(masking_utils, "fast_all", lambda mask: looks.append(mask.shape) or look(mask))
    options, ids = GenerationOptions(1, 7), prompts(family)
    answers = generate_ids(Backbone(fused, tokenizer), ids, [], options, rows_at_once=6)
    assert answers == generate_ids(backbone_of(family), ids, [], options, rows_at_once=6)
    assert len(looks) <= 2  # before the first token alone
