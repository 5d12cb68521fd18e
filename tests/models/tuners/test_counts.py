"""Parameter counts on the papers' models, which exist here as shapes without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, BertConfig, LlamaConfig, RobertaConfig, T5Config

from silotune.core.tensors import count_parameters
from silotune.models.backbone.backbone import Backbone
from silotune.models.tuners import TUNERS

SHAPES = {
    "bert-base": BertConfig,
    "roberta-base": lambda: RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
    "t5-base": lambda: T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "llama-7b": LlamaConfig,
}


def trained(shape: str, tuner: str, **options) -> int:
    """How many parameters a part has, from its tensors' shapes alone."""
    with FakeTensorMode():
        model = AutoModel.from_config(SHAPES[shape]())
        backbone = Backbone(model, None)
        made = TUNERS[tuner](TUNERS[tuner].Options(**options))
        return count_parameters(made.init(backbone, [], torch.Generator().manual_seed(0)))


CLASSIFIER = 768 * 2 + 2
BERT = 109_482_240 + CLASSIFIER  # with its pooler


@pytest.mark.parametrize(
    ("tuner", "options", "parameters", "percent", "mib"),
    [
        # PEFT in FL, Table 2: what follows from shapes, percent of all parameters and MiB, the classifier included
        ("prefix", {"tokens": 6, "reparametrise": 512, "width": 512}, 9_721_344, 8.16, 37.1),
        ("bottleneck", {"r": 24}, 903_744, 0.820, 3.45),
        ("lora", {"r": 1}, 36_864, 0.0351, 0.146),
    ],
)
def test_peft_in_fl(tuner, options, parameters, percent, mib):
    actual = trained("bert-base", tuner, **options)
    assert actual == parameters
    sent = actual + CLASSIFIER
    assert float(f"{100 * sent / (BERT + actual):.3g}") == percent
    assert float(f"{4 * sent / 2**20:.3g}") == mib


def test_bitfit_on_bert_base():
    blocks = 12 * (4 * 768 + 768 + 3072 + 768 + 768)  # q, k, v, o; norm; feed-forward in and out; norm
    assert trained("bert-base", "bitfit", sites="encoder.*") == blocks == 101_376
    assert trained("bert-base", "bitfit") == blocks + 768  # and the embeddings' norm
    assert 100 * blocks / BERT == pytest.approx(0.0926, rel=1e-3)  # "encoder biases alone, no classifier"
    # the checklist's 0.0954 % also counts the bias of BERT's pooler, which no head here reads
    assert 100 * (blocks + 768 + 768 + CLASSIFIER) / BERT == pytest.approx(0.0954, rel=1e-3)


def test_fedprompt():
    """Tables 1 and 5; the paper rounds up: 0.016 M, 25.420 M."""
    for shape in ("bert-base", "roberta-base", "t5-base"):
        assert trained(shape, "prompt", tokens=20) == 20 * 768
    two_embeddings, lstm, mlp = 2 * 20 * 768, 0, 1536 * 768 + 768 + 768 * 768 + 768
    for inputs in (768, 1536):
        lstm += 2 * (4 * 768 * inputs + 4 * 768 * 768 + 2 * 4 * 768)
    assert trained("bert-base", "p-tuning", tokens=20) == two_embeddings + lstm + mlp == 25_419_264
    assert trained("bert-base", "p-tuning", tokens=20, offset=False) == 25_419_264 - 20 * 768
    assert trained("t5-base", "prefix", tokens=5, reparametrise=512) == 9_853_184
    assert trained("t5-base", "prefix", tokens=5, reparametrise=512, stack="decoder") == 9_853_184


def test_fedmcp_and_feddpa():
    assert trained("roberta-base", "bottleneck", r=16) == 608_640
    assert trained("roberta-base", "bottleneck", r=16, sites="pfeiffer") == 608_640 // 2
    assert trained("roberta-base", "bottleneck", reduction=48) == 608_640
    assert trained("roberta-base", "lora", r=16) == 589_824
    assert trained("llama-7b", "lora", r=8) == 4_194_304


def test_variants_of_lora():
    """The numbers of docs/tuners.md."""
    assert trained("bert-base", "lora", init="orthogonal") == 24 * 8 * 2 * 768 == 294_912
    assert trained("bert-base", "dora") == 294_912 + 24 * 768 == 313_344
    assert trained("bert-base", "dora", init="pissa") == 313_344
    assert trained("bert-base", "vera") == 24 * (256 + 768) == 24_576
    assert trained("bert-base", "loha") == 2 * 294_912
