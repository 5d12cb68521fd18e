"""`backbone.device_map`: a backbone whose blocks are on two devices does what it does on one, with the same numbers.

The devices are fake (`tests/support/fake_cuda.py`): every operation over tensors of two devices is refused, as on GPUs.
"""

from __future__ import annotations

import pytest
import torch

from silotune.models.backbone.block_devices import BlockDevices
from tests.support.device_rig import Make, actions, at_rest, prediction
from tests.support.fake_cuda import CUDA, MISMATCH, REAL, fake_cuda, is_tensor_on_device

pytestmark = pytest.mark.skipif(REAL is not None, reason="needs two devices")

SECOND = torch.device("cuda:1")

CASES = [
    # method, head, family, words
    ("fedmcp", "mlp", "bert", ()),
    ("fedmcp", "mlp", "bert", ("cache=frozen-prefix",)),
    ("fedavg", "mlp", "bert", ("tuner=ia3", "train.tokens_at_once=120")),
    ("fedavg", "mlp", "bert", ("tuner=bitfit",)),
    ("fedavg", "mlp", "bert", ("tuner=prefix",)),
    ("moon", "mlp", "bert", ("tuner=lora", "tuner.dropout=0.1", "train.tokens_at_once=120")),
    ("fedprompt", "verbalizer", "bert", ()),
    ("fedfame", "mlp", "bert", ()),
    ("fedavg", "verbalizer", "t5", ("tuner=lora",)),
    ("fedmcp", "mlp", "gpt2", ("tuner=lora", "train.gradient_checkpointing=true")),
    ("feddpa-t", "lm", "llama", ("train.gradient_checkpointing=true",)),
    ("fedavg", "lm", "llama", ("tuner=prefix", "head.beams=2")),
    ("fedavg", "lm", "t5", ("tuner=prefix", "tuner.stack=decoder", "head.beams=2")),
    ("fedit", "dpo", "llama", ()),
    ("fedavg", "mlp", "bert", ("tuner=dora", "tuner.init=pissa")),
    ("fedavg", "mlp", "bert", ("tuner=vera", "tuner.dropout=0.1")),
]
QUICK = {0, 5, 11, 14}
cases = pytest.mark.parametrize(
    ("method", "head", "family", "words"),
    [pytest.param(*case, marks=[] if index in QUICK else [pytest.mark.long]) for index, case in enumerate(CASES)],
)


def spread(family: str, order: int) -> dict[str, torch.device]:
    """Every second block of each list on the second device."""
    lists = {"bert": ["encoder.layer"], "gpt2": ["h"], "t5": ["encoder.block", "decoder.block"], "llama": ["layers"]}
    return {f"{blocks}.{order}": SECOND for blocks in lists[family]}


@cases
@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_action_runs_over_two_devices(make: Make, method, head, family, words, order):
    federation = make(method, head, *words, family=family, blocks=spread(family, order))
    assert {tensor.device for tensor in federation.backbone.model.parameters()} == {CUDA, SECOND}
    with fake_cuda():
        for action in actions(federation).values():
            action(federation)
            assert not any(is_tensor_on_device(tensor) for tensor in at_rest(federation))


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.long)])
@pytest.mark.parametrize("words", [("tuner=lora",), pytest.param(("tuner=prefix",), marks=pytest.mark.long)])
@pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.long)])
def test_answers_are_those_of_one_device(make: Make, beams, words, family):
    options = (f"head.beams={beams}", *words)
    on_cpu = prediction(make("feddpa-t", "lm", *options, family=family, on_cuda=False))
    federation = make("feddpa-t", "lm", *options, family=family, blocks=spread(family, 1))
    with fake_cuda():
        assert prediction(federation) == on_cpu


@pytest.mark.parametrize("order", [0, 1])
def test_probabilities_are_those_of_one_device(make: Make, order):
    on_cpu = prediction(make("fedmcp", "mlp", on_cuda=False))
    federation = make("fedmcp", "mlp", blocks=spread("bert", order))
    with fake_cuda():
        assert prediction(federation) == on_cpu


@pytest.mark.parametrize("left_out", ["beside", "move_at_borders"])
def test_without_moves_every_action_fails(make: Make, left_out, monkeypatch):
    monkeypatch.setattr(BlockDevices, left_out, lambda self, *given: given[0])
    federation = make("fedmcp", "mlp", blocks=spread("bert", 1))
    with fake_cuda():
        for action in actions(federation).values():
            with pytest.raises(MISMATCH):
                action(federation)
