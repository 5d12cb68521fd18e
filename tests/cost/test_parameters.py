"""Parameter counts against arithmetic by hand: the contract's examples, further tuners."""

from __future__ import annotations

import json

import pytest

from silotune.cost import estimate

D, BLOCKS, FEED = 768, 12, 3072
CLASSIFIER = 2 * D + 2
MLP_HEAD = D * D + D + CLASSIFIER
ADAPTER = 2 * BLOCKS * (D * 16 + 16 + 16 * D + D)  # two bottlenecks of width 16 a block


CONTRACT_KEYS = (
    *("full_parameters", "trainable_parameters", "sent_parameters", "adapter_parameters", "head_parameters"),
    *("trainable_percent", "sent_percent", "message_mib", "flops_per_sample_train", "flops_per_sample_predict"),
)


def test_json_has_the_contracts_keys_and_numbers(silotune):
    words = ("tuner=lora", "tuner.r=1", "head=linear", "head.scope=shared", "silos=7", "tokens=16")
    outcome = silotune("cost", "fedap", "backbone=shape:bert-base", *words, "--json")
    assert outcome.code == 0
    cost = json.loads(outcome.out)
    assert set(CONTRACT_KEYS) <= cost.keys()
    assert cost["sent_parameters"] == cost["trainable_parameters"] == 38_402
    assert (cost["adapter_parameters"], cost["head_parameters"]) == (36_864, 1_538)
    assert cost["full_parameters"] == 109_483_778 + 36_864
    assert cost["sent_percent"] == pytest.approx(100 * 38_402 / 109_483_778, rel=1e-12)
    assert cost["message_mib"] == cost["message_bytes"] / 2**20
    assert cost["bytes_up"] == 7 * cost["message_bytes"]


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        (("tuner=ia3",), BLOCKS * (D + D + FEED)),
        (("tuner=bottleneck", "tuner.sites=pfeiffer", "tuner.r=16"), ADAPTER // 2),
        (("tuner=prompt", "tuner.tokens=5"), 5 * D),
        (("tuner=prefix", "tuner.reparametrise=0", "tuner.tokens=6"), 6 * 2 * BLOCKS * D),
        (("tuner=lora", "tuner.r=4", "tuner.sites=feedforward_input"), BLOCKS * 4 * (D + FEED)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_tuners(words, trained):
    cost = estimate(
        "fedavg", ["backbone=shape:bert-base", "method.adapters=1", "head=linear", *words], count_flops=False
    )
    assert cost.adapter_parameters == cost.sent_parameters == trained
    assert cost.trainable_parameters == trained + CLASSIFIER
    assert cost.full_parameters == 109_483_778 + trained


def test_parts_that_replace_the_backbones_tensors_add_none_to_the_model():
    full = estimate("fedavg-full", ["backbone=shape:bert-base"], count_flops=False)
    assert full.full_parameters == full.bare_parameters == full.trainable_parameters == 109_483_778
    assert full.trainable_percent == 100
    bitfit = estimate("fedavg", ["backbone=shape:bert-base", "method.adapters=1", "tuner=bitfit"], count_flops=False)
    assert bitfit.full_parameters == 109_483_778


def test_labels_widen_the_head_and_private_heads_are_not_sent():
    cost = estimate("fedavg", ["backbone=shape:roberta-base", "method.adapters=1", "labels=3"], count_flops=False)
    assert cost.head_parameters == D * D + D + 3 * D + 3
    assert cost.sent_parameters == ADAPTER
    local = estimate("local", ["backbone=shape:roberta-base"], count_flops=False)
    assert (local.sent_parameters, local.message_bytes, local.bytes_up, local.bytes_down) == (0, 0, 0, 0)
    assert local.trainable_parameters == 2 * ADAPTER + MLP_HEAD
