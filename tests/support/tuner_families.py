"""Tiny models of every backbone family, every tuner with options, and forwards of their pairs.

A new family joins by an entry of `CONFIGS`, a new tuner by its registration; a pair that cannot work joins
`UNSUPPORTED`; tests then check that it is refused.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    T5Config,
)
from transformers.models.modernbert import modeling_modernbert

from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.forward_plan import ForwardPlan
from silotune.models.tuners import TUNERS, WeightedTensors
from tests.support.tiny import FAMILIES as TOKENIZERS
from tests.support.tiny import drawn

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 150, 24, 40, 2, 4, 64

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = _SHAPE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PADDED = _ENCODER | {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DECODER = _SHAPE | _IDS | {"num_key_value_heads": 2}

CONFIGS = {
    "bert": lambda: BertConfig(**_ENCODER),
    "roberta": lambda: RobertaConfig(**_PADDED, type_vocab_size=1),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCABULARY, dim=HIDDEN, hidden_dim=INNER, n_layers=LAYERS, n_heads=HEADS,
        max_position_embeddings=POSITIONS, initializer_range=0.2, dropout=0.0, attention_dropout=0.0,
    ),
    "mpnet": lambda: MPNetConfig(**_PADDED),
    "electra": lambda: ElectraConfig(**_ENCODER, embedding_size=16),
    "deberta-v2": lambda: DebertaV2Config(
        **_ENCODER, relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"],
        share_att_key=True, norm_rel_ebd="layer_norm", position_buckets=8,
    ),
    "modernbert": lambda: ModernBertConfig(
        **_SHAPE, **_IDS, cls_token_id=1, sep_token_id=2, initializer_cutoff_factor=3.0,
        global_attn_every_n_layers=2, local_attention=8,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_inner=INNER, n_layer=LAYERS, n_head=HEADS, n_positions=POSITIONS,
        initializer_range=0.2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_IDS,
    ),
    "llama": lambda: LlamaConfig(**_DECODER),
    "mistral": lambda: MistralConfig(**_DECODER, sliding_window=POSITIONS),
    "qwen2": lambda: Qwen2Config(**_DECODER),
    "qwen3": lambda: Qwen3Config(**_DECODER, head_dim=8),
    "t5": lambda: T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=6, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    ),
}  # fmt: skip
FAMILIES = list(CONFIGS)

KINDS = {
    name: (name, dict(tuner.example)) for name, tuner in TUNERS.items() if tuner.__module__.startswith("silotune.")
}
"""Every built-in tuner with its example options, and other options that act in other ways."""
KINDS |= {
    "pfeiffer": ("bottleneck", {"sites": "pfeiffer", "reduction": 8}),
    "lora-patterns": ("lora", {"r": 2, "sites": "attention_output,feedforward_input,*"}),
    "fed-sb-svd": ("fed-sb", {"r": 4, "alpha": 3}),
    "pissa": ("lora", {"r": 4, "alpha": 3, "init": "pissa", "scaling": "rslora"}),
    "vera": ("vera", {"r": 5, "sites": "query,feedforward_output", "seed": 3}),
    "prefix": ("prefix", {"tokens": 3, "reparametrise": 5, "width": 7}),
    "prefix-direct": ("prefix", {"tokens": 3, "reparametrise": 0, "stack": "decoder"}),
    "p-tuning-mlp": ("p-tuning", {"tokens": 3, "encoder": "mlp", "offset": False}),
}

_NO_PREFIX = ("distilbert", "mpnet", "deberta-v2", "modernbert")
_NO_BIASES = ("llama", "mistral", "qwen3", "t5", "modernbert")
UNSUPPORTED = {
    *((kind, family) for kind in ("prefix", "prefix-direct") for family in _NO_PREFIX),
    *(("bitfit", family) for family in _NO_BIASES),
}
FORMS = ("bert", "gpt2", "llama", "t5", "deberta-v2")
"""Families that differ in biases, fused layers, stacks and weights of rows (`models/test_spanning_families.py`)."""
_AS_LORA = {
    (kind, family)
    for kind in ("pissa", "dora", "vera", "loha", "fed-sb", "fed-sb-svd", "ravan")
    for family in FAMILIES
    if family not in FORMS or family == "deberta-v2"
}
"""Not repeated: they act where LoRA does."""

PAIRS = [(kind, family) for kind in KINDS for family in FAMILIES if (kind, family) not in UNSUPPORTED | _AS_LORA]


def forms_of(kind, count):
    """Return so many of the `FORMS` that a tuner works on; the next tuner begins at the next one."""
    own = [form for form in FORMS if (kind, form) in PAIRS]
    first = [*KINDS].index(kind) % len(own)
    return (own[first:] + own[:first])[:count]


def as_parameters(pairs, together=True):
    """Return pairs as parameters of a suite; `make test` has LoRA on all families, and other tuners on some `FORMS`.

    These are three of `FORMS`, in turn; one where tuner and family do not act `together`.
    """

    def short(kind, family):
        return kind == "lora" or family in forms_of(kind, 3 if together else 1)

    return [pytest.param(*pair, marks=() if short(*pair) else pytest.mark.long) for pair in pairs]


LENGTHS = (7, 3, 6, 4)
DECODER_LENGTH = 3


class RootMeanSquare(torch.nn.Module):
    """The families' RMS norm without their detour through float32, for tests in float64."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def _rotated(q, k, cos, sin, unsqueeze_dim=1):
    """ModernBERT's rotary positions in the precision of what is rotated; the library goes through float32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return rotated(q), rotated(k)


modeling_modernbert.apply_rotary_pos_emb = _rotated


def _to_double(model) -> None:
    model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                setattr(module, name, RootMeanSquare(child.weight, child.variance_epsilon))


@cache
def _model(family: str) -> torch.nn.Module:
    return drawn(lambda: AutoModel.from_config(CONFIGS[family](), attn_implementation="eager"), family, 11).eval()


def make_model(family: str) -> torch.nn.Module:
    return copy.deepcopy(_model(family))


def make_backbone(family: str, *, double: bool = False, **options) -> Backbone:
    """Return a new backbone over a copy of the family's tiny model."""
    tokenizer = TOKENIZERS["bert"].tokenizer()
    backbone = Backbone(make_model(family), tokenizer, **options)
    if double:
        _to_double(backbone.base)
        if family not in ("mpnet", "deberta-v2"):
            # plain attention takes its softmax in float32 in some families
            backbone.base.set_attn_implementation("sdpa")
    return backbone


@cache
def shared_backbone(family: str, double: bool = False, **options) -> Backbone:
    """Return the backbone that all tests share which leave it unchanged: one per family and options."""
    return make_backbone(family, double=double, **options)


def make_tuner(kind: str):
    name, options = KINDS[kind]
    return TUNERS[name](TUNERS[name].Options(**options))


def first_part(tuner, backbone: Backbone, seed: int = 1):
    """Return a part's initial tensors in the backbone's dtype."""
    tensors = tuner.init(backbone, [], torch.Generator().manual_seed(seed))
    dtype = backbone.word_embeddings.dtype
    return {name: tensor.to(backbone.device, dtype) for name, tensor in tensors.items()}


def random_part(tuner, backbone: Backbone, seed: int = 1, spread: float = 0.2):
    """Return a part whose tensors are moved away from their initial values (adapters start without effect)."""
    draws = torch.Generator().manual_seed(100 + seed)
    return {
        name: tensor + spread * torch.randn(tensor.shape, generator=draws, dtype=torch.float64).to(tensor)
        for name, tensor in first_part(tuner, backbone, seed).items()
    }


def batch(family: str, side: str = "right", lengths=LENGTHS, seed: int = 3):
    """Return a padded batch of random tokens, with segments for BERT and decoder tokens for T5."""
    draws = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    pad = 1 if family in ("roberta", "mpnet") else 0
    inputs = {
        "input_ids": torch.full((len(lengths), longest), pad),
        "attention_mask": torch.zeros(len(lengths), longest, dtype=torch.int64),
    }
    if family == "bert":
        inputs["token_type_ids"] = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids = torch.randint(5, VOCABULARY, (length,), generator=draws)
        where = slice(0, length) if side == "right" else slice(longest - length, longest)
        inputs["input_ids"][row, where] = ids
        inputs["attention_mask"][row, where] = 1
        if family == "bert":
            inputs["token_type_ids"][row, where] = (torch.arange(length) >= 2).long()
    if family == "t5":
        decoder = torch.randint(5, VOCABULARY, (len(lengths), DECODER_LENGTH), generator=draws)
        inputs["decoder_input_ids"] = decoder
    return inputs


def row_of(inputs, row: int):
    """Return one row of a batch without its padding."""
    real = inputs["attention_mask"][row] == 1
    return {
        name: tensor[row : row + 1] if name.startswith("decoder_") else tensor[row : row + 1, real]
        for name, tensor in inputs.items()
    }


def real_states(states, inputs):
    """Return each row's states without padding: a list of (tokens, hidden)."""
    if "decoder_input_ids" in inputs:
        return list(states)
    return [states[row][inputs["attention_mask"][row] == 1] for row in range(len(states))]


def run(backbone: Backbone, inputs, *acting):
    """Encode a batch; `acting` are pairs of a tuner and its mix, a list of (tensors, weight)."""
    plan = ForwardPlan()
    for tuner, mix in acting:
        present = [WeightedTensors(tensors, weight) for tensors, weight in mix]
        tuner.act(backbone, present, plan)
    inputs = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
    return backbone.encode(inputs, plan)


def trainable(part):
    """Return the part's tensors as leaves with gradients."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in part.items()}
