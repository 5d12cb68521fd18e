"""The cache of a generation: what attention sees is what transformers' own cache would give it, and in which type."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from silotune.models.backbone import generation_cache
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.generation_cache import GenerationCache, room_pays
from silotune.models.forward.decoding import start_decoding
from tests.support.language_models import made


@pytest.mark.parametrize("with_room", [True, False])
def test_it_holds_what_transformers_own_holds(with_room, monkeypatch):
    monkeypatch.setattr(generation_cache, "ROOM", 2)  # so that buffers are replaced on the way
    config, draws = made("llama")[0].config, torch.Generator().manual_seed(1)
    ours, theirs = GenerationCache(config, None, with_room), DynamicCache(config=config)
    rows = 3
    for new in (4, 1, 1, 1, 2):
        for layer in range(2):
            pair = [torch.randn(rows, 1, new, 8, generator=draws) for _ in range(2)]
            for got, expected in zip(ours.update(*pair, layer), theirs.update(*pair, layer), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert ours.get_seq_length() == theirs.get_seq_length()
        chosen = torch.tensor([2, 0, 0, 1][: rows + 1])
        ours.batch_select_indices(chosen)
        theirs.batch_select_indices(chosen)
        rows = len(chosen)


def test_new_tokens_are_written_in_place():
    cache = GenerationCache(made("llama")[0].config, None, with_room=True)
    pair = [torch.zeros(2, 1, 3, 8)] * 2
    keys, _ = cache.update(*pair, 0)
    more, _ = cache.update(*[tensor[:, :, :1] for tensor in pair], 0)
    assert more.shape[2] == 4
    assert more.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("with_room", [True, False])
def test_keys_and_values_have_the_backbones_type(with_room, monkeypatch):
    monkeypatch.setattr("silotune.models.forward.decoding.room_pays", lambda *_: with_room)
    model, tokenizer = made("llama")
    backbone = Backbone(model, tokenizer, precision="bf16")  # float32 weights: keys come in float32
    prompts = [tokenizer(text)["input_ids"] for text in ("the garden was", "a")]
    with torch.no_grad():
        decoding = start_decoding(backbone, prompts, [])
        decoding.first()
        decoding.next(torch.tensor([5, 6]))
    assert {tensor.dtype for layer in decoding._cache.layers for tensor in (layer.keys, layer.values)} == {
        torch.bfloat16
    }


def test_room_is_left_where_products_take_buffers_as_they_lie():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [room_pays(cpu, None), room_pays(cpu, torch.bfloat16), room_pays(cuda, torch.bfloat16)] == [
        True,
        False,
        True,
    ]
