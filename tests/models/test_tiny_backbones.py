"""The tiny backbones and data that every suite stands on."""

from __future__ import annotations

import pytest
import torch

from silotune.methods import METHODS as REGISTERED
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from tests.support.tiny import FAMILIES, HIDDEN, LAYERS, METHODS, ONE_TASK, ROWS, TASKS


def test_methods_follow_the_register():
    assert list(REGISTERED) == METHODS
    assert "fedmcp" in METHODS


@pytest.mark.parametrize("family", FAMILIES)
def test_backbone_loads_and_reads_text(family, backbone_folder):
    backbone = load_backbone(str(backbone_folder(family)), precision="fp32")
    assert backbone.model.config.model_type == family
    assert (backbone.blocks, backbone.hidden_size) == (LAYERS, HIDDEN)
    encoded = backbone.tokenizer(
        ["the garden was bright", "the soup looked cold again"],
        ["perhaps", "a song"],
        padding=True,
        return_tensors="pt",
    )
    assert ("token_type_ids" in encoded) is FAMILIES[family].types
    assert encoded["attention_mask"].sum(1).tolist() != [encoded["attention_mask"].shape[1]] * 2
    assert (encoded["input_ids"] == backbone.tokenizer.unk_token_id).sum() == 0
    states = backbone.encode(dict(encoded), ForwardPlan())
    assert states.shape == (*encoded["input_ids"].shape, HIDDEN)
    assert states.isfinite().all()
    assert states[:, 0].std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_can_be_encoded(family, backbone_folder):
    tokenizer = load_backbone(str(backbone_folder(family)), precision="fp32").tokenizer
    ids = tokenizer("Grüße, 42 of them – 🙂!")["input_ids"]
    assert len(ids) > 3
    assert max(ids) < len(tokenizer)


@pytest.mark.parametrize("method", METHODS)
def test_federation_holds_the_tiny_rows(method, tiny_federation):
    federation = tiny_federation(method)
    reported = {name: evaluation for silo in federation.silos.values() for name, evaluation in silo.evaluations.items()}
    one_task = method in ONE_TASK
    assert sorted(reported) == (["silo-1", "silo-2", "silo-3"] if one_task else list(TASKS))
    rows = ROWS["train"] * (1 if one_task else len(TASKS))
    if method == "server-only":  # trains on the coordinator's rows: five of each of two labels
        rows = 5 * 2
    assert sum(silo.rows for silo in federation.silos.values()) == rows
    assert {len(evaluation.test) for evaluation in reported.values()} == {ROWS["test"]}
    assert torch.get_num_threads() == 1
