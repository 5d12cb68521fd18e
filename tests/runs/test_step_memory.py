"""A step that cannot fit is refused before training, with the keys under which it would; tested with faked figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from silotune.errors import InputError
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.backbone.loading import load_backbone
from silotune.runs.build import step_memory
from silotune.training.token_memory import blocks_with_graph, least_kept
from tests.support.language_models import folder_of


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """`free(bytes)` sets the device's free memory."""
    return lambda size: monkeypatch.setattr(step_memory, "free_memory", lambda _: size)


@pytest.fixture(scope="module")
def backbone(tiny_federation) -> Backbone:
    return tiny_federation("fedavg").backbone


WORDS = ("train.batch_size=8", "precision=fp32")


def refusal(federation, *words: str, **more) -> str:
    with pytest.raises(InputError) as refused:
        federation("fedavg", *WORDS, *words, **more)
    return str(refused.value)


def test_a_step_that_fits_is_not_refused(tiny_federation, backbone, free):
    free(2**30)
    tiny_federation("fedavg", *WORDS, backbone=backbone)


def test_what_would_fit_is_named(tiny_federation, backbone, free):
    free(2**18)
    message = refusal(tiny_federation, backbone=backbone)
    assert message.startswith("train: a batch of about ")
    assert "cpu has 0.0 GiB free; what would fit, each alone: train.gradient_checkpointing=true" in message
    allowed = {word.partition("=")[0]: word.partition("=")[2] for word in message.split(": ")[-1].split(", ")}
    assert {"train.tokens_at_once", "train.batch_size"} <= allowed.keys()
    for key in ("train.tokens_at_once", "train.batch_size", "train.gradient_checkpointing"):
        given = backbone if key != "train.gradient_checkpointing" else None
        tiny_federation("fedavg", *WORDS, f"{key}={allowed[key]}", backbone=given)
    assert "tokens" in refusal(tiny_federation, "train.batch_size=8", backbone=backbone)


def test_where_nothing_helps_it_says_so(tiny_federation, backbone, free):
    free(100)
    assert "no shorter row would fit; use backbone.quantization" in refusal(tiny_federation, backbone=backbone)


def test_weights_that_are_not_on_the_device_yet_are_counted(tiny_federation, backbone, free, monkeypatch):
    free(2**30)
    monkeypatch.setattr(Backbone, "resting_bytes", 2**30)
    assert "cpu has 0.0 GiB free" in refusal(tiny_federation, backbone=backbone)


def test_a_preference_pair_is_two_rows_of_a_batch(tiny_federation, backbone):
    (silo, *_) = tiny_federation("fedavg", *WORDS, backbone=backbone).silos.values()
    (rows,) = silo.train.values()
    assert step_memory._batch_tokens(replace(rows, pairs=True), 2) == 2 * step_memory._batch_tokens(rows, 2)
    few = replace(rows, pairs=True, ids=rows.ids[:4])
    assert step_memory._batch_tokens(few, 8) == sum(map(len, few.ids))


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_blocks_below_the_first_tuned_one_keep_nothing(tiny_federation, backbone, free, method):
    last = ("tuner=lora", f"tuner.sites=encoder.layer.{backbone.blocks - 1}.attention.self.query", *WORDS)
    federation = tiny_federation(method, *last, backbone=backbone)
    silos = [*federation.silos.values()]
    batch = max(step_memory._batch_tokens(rows, 8) for silo in silos for rows in silo.train.values())
    needed = batch * least_kept(backbone, checkpointing=False)
    free(int(0.9 * needed))
    tiny_federation(method, *last, backbone=backbone)
    free(int(0.3 * needed))
    assert "train.batch_size=" in refusal(tiny_federation, *last, f"method={method}", backbone=backbone)


def test_decoder_blocks_are_not_those_of_the_encoder(tmp_path):
    backbone = load_backbone(str(folder_of("t5", tmp_path)), precision="fp32")
    names = [f"{stack.blocks}.1.layer.0.SelfAttention.q.lora_A.weight" for stack in backbone.architecture.stacks]
    assert [blocks_with_graph(backbone, [name]) for name in (*names, "shared.weight")] == [1, 0, 2]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_lower_bound_is_one(tmp_path, family):
    """What blocks really keep for a token, counted by PyTorch's hooks, is more than what is estimated."""
    backbone = load_backbone(str(folder_of(family, tmp_path)), precision="fp32")
    weights = {tensor.data_ptr() for tensor in backbone.model.parameters()}
    kept: dict[int, int] = {}
    ids = torch.randint(5, 40, (4, 16))

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    plan = ForwardPlan()
    first = backbone.architecture.modules("query", 0)[0]
    plan.outputs[first].append(lambda _, y: y + torch.zeros(1, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        states = backbone.encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, plan)
    assert states.requires_grad
    of_a_token = sum(kept.values()) / ids.numel()
    estimated = least_kept(backbone, checkpointing=False)
    assert estimated < of_a_token < 5 * estimated
    assert least_kept(backbone, checkpointing=True) < estimated
