"""The language-model head's loss against transformers' own, and how it adds up."""

from __future__ import annotations

import copy

import pytest
import torch

from silotune.data.batching import make_batch
from silotune.data.rows import Row
from silotune.data.tasks import Task
from silotune.data.tokenized import TokenizedRows
from silotune.models.heads import LanguageModelHead, lm
from tests.support.language_models import CAUSAL, backbone_of, ingredients, made
from tests.support.views import view_of_batch

TASK = Task("w", (), "rouge1", "generation")
ROWS = [
    Row(("the garden was lovely", ""), 0, "kind"),
    Row(("say it", "the soup felt cold again"), 0, "a much longer answer, indeed"),
    Row(("a song", ""), 0, "no"),
    Row(("the winter became dull at last without a word", ""), 0, "the winter was grim"),
    Row(("train", ""), 0, "perhaps"),
]


def encoded(family):
    return LanguageModelHead().row_tokenizer(backbone_of(family), 120)(TASK, ROWS)


def our_loss(family, mix=(), call_cost=4):
    backbone, head = backbone_of(family), LanguageModelHead()
    batch = make_batch(encoded(family), range(len(ROWS)), 0, call_cost)
    view = view_of_batch(backbone, batch, mix, head_readings={head.name: head.reading(backbone, TASK)})
    return head.cross_entropy({}, view, batch), view[head.name], batch


def their_loss(model, rows):
    """transformers: the whole batch at once, labels −100 wherever no response token is to come."""
    longest = max(map(len, rows.ids))
    ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in rows.ids])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in rows.ids])
    if rows.decoder is not None:
        width = max(map(len, rows.targets))
        labels = torch.tensor([[*one, *[-100] * (width - len(one))] for one in rows.targets])
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss
    labels = torch.full_like(ids, -100)
    for row, (one, response) in enumerate(zip(rows.ids, rows.targets, strict=True)):
        labels[row, len(one) - len(response) : len(one)] = torch.tensor(response)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize("family", [*CAUSAL, "t5"])
def test_the_loss_is_transformers_own_with_masked_labels(family):
    loss, view, batch = our_loss(family)
    assert len(batch.micro) > 1
    with torch.no_grad():
        expected = their_loss(made(family)[0], encoded(family))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    lengths = [len(response) for response in encoded(family).targets]
    assert view[:, 1].tolist() == [lengths[row] for row in batch.rows.tolist()]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradients_are_transformers_own_on_a_merged_model(family):
    """d loss / d B of one LoRA site equals the chain rule through the gradient of the merged weight."""
    backbone, (model, _) = backbone_of(family), made(family)
    (part,) = mix = ingredients(backbone, 1.0, r=2, alpha=4)
    for tensor in part.tensors.values():
        tensor.requires_grad_()
    our_loss(family, mix)[0].backward()
    merged = copy.deepcopy(model).requires_grad_(True)
    base = merged if family == "t5" else merged.base_model
    sites = sorted({name.removesuffix(".lora_A.weight") for name in part.tensors if "lora_A" in name})
    low, high = ({site: part.tensors[f"{site}.lora_{which}.weight"] for site in sites} for which in "AB")
    with torch.no_grad():
        for site in sites:
            base.get_submodule(site).weight.add_(2 * high[site] @ low[site])
    their_loss(merged, encoded(family)).backward()
    for site in sites:
        slope = base.get_submodule(site).weight.grad
        torch.testing.assert_close(high[site].grad, 2 * slope @ low[site].detach().T, atol=2e-5, rtol=2e-4)


def test_micro_batches_and_pieces_of_the_vocabulary_change_nothing(monkeypatch):
    backbone = backbone_of("llama")
    (part,) = mix = ingredients(backbone, 1.0)
    results = []
    for call_cost, at_once in ((1, 2**25), (10**6, 2**25), (4, 3 * backbone.lm_head.vocabulary_size), (4, 1)):
        monkeypatch.setattr(lm, "SCORES_AT_ONCE", at_once)
        for tensor in part.tensors.values():
            tensor.requires_grad_().grad = None
        loss, _, batch = our_loss("llama", mix, call_cost)
        loss.backward()
        results.append((len(batch.micro), loss.item(), torch.cat([t.grad.flatten() for t in part.tensors.values()])))
    assert results[0][0] > 2
    assert results[1][0] == 1
    for _, loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][1], abs=1e-5)
        torch.testing.assert_close(gradient, results[0][2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_last_reading_is_the_last_real_token(family):
    backbone, (model, tokenizer) = backbone_of(family), made(family)
    texts = ["the garden", "the soup felt cold again today", "a"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    batch = make_batch(TokenizedRows(TASK, ids, None, torch.zeros(3, dtype=torch.int64)), range(3), 0, 10**6)
    view = view_of_batch(backbone, batch, [])
    for position, row in enumerate(batch.rows.tolist()):
        with torch.no_grad():
            expected = model.base_model(input_ids=torch.tensor([ids[row]])).last_hidden_state[0, -1]
        torch.testing.assert_close(view["last"][position], expected, atol=1e-5, rtol=1e-5)
