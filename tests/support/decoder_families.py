"""Tiny language models of the decoder families that `tuner_families` does not have, with what is peculiar to each.

Windows of sliding attention are shorter than the prompts, soft caps are low, and layers differ where they may.
"""

from __future__ import annotations

import copy
from functools import cache

from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from silotune.models.backbone.backbone import Backbone
from tests.support.language_models import byte_tokenizer
from tests.support.tiny import drawn

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_WINDOW = {"sliding_window": 4}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
_EXPERTS = {"num_experts_per_tok": 2}
_DELTA_NET = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SHARED_EXPERT = _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8, "mamba_chunk_size": 4}

CONFIGS = {
    "llama": lambda **ids: LlamaConfig(**_GROUPED, **ids),
    "mistral": lambda **ids: MistralConfig(**_GROUPED, **_WINDOW, **ids),
    "qwen2": lambda **ids: Qwen2Config(**_GROUPED, **_WINDOW, **_LAYERS, use_sliding_window=True, **ids),
    "qwen3": lambda **ids: Qwen3Config(**_GROUPED, head_dim=8, **ids),
    "gemma": lambda **ids: GemmaConfig(**_GROUPED, head_dim=8, **ids),
    "gemma2": lambda **ids: Gemma2Config(
        **_GROUPED, **_GEMMA, **_WINDOW, **_LAYERS, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **ids
    ),
    "gemma3_text": lambda **ids: Gemma3TextConfig(**_GROUPED, **_GEMMA, **_WINDOW, **_LAYERS, **ids),
    "phi3": lambda **ids: Phi3Config(**_GROUPED, **_WINDOW, **ids),
    "olmo2": lambda **ids: Olmo2Config(**_GROUPED, **ids),
    "smollm3": lambda **ids: SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0], **ids),
    "granite": lambda **ids: GraniteConfig(
        **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, **ids
    ),
    "gpt_neox": lambda **ids: GPTNeoXConfig(**_SHAPE, **ids),
    "mixtral": lambda **ids: MixtralConfig(**_GROUPED, **_EXPERTS, num_local_experts=4, **ids),
    "qwen3_moe": lambda **ids: Qwen3MoeConfig(
        **_GROUPED, **_EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True, **ids
    ),
    "olmoe": lambda **ids: OlmoeConfig(**_GROUPED, **_EXPERTS, num_experts=4, **ids),
    "granitemoe": lambda **ids: GraniteMoeConfig(**_GROUPED, **_EXPERTS, num_local_experts=4, **ids),
    "qwen3_next": lambda **ids: Qwen3NextConfig(**_GROUPED, **_DELTA_NET, **_SHARED_EXPERT, **ids),
    "qwen3_5_text": lambda **ids: Qwen3_5TextConfig(**_GROUPED, **_DELTA_NET, **ids),
    "qwen3_5_moe_text": lambda **ids: Qwen3_5MoeTextConfig(**_GROUPED, **_DELTA_NET, **_SHARED_EXPERT, **ids),
    "granitemoehybrid": lambda **ids: GraniteMoeHybridConfig(
        **_GROUPED, **_EXPERTS, **_MAMBA, num_local_experts=4, shared_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"], **ids
    ),
    "bamba": lambda **ids: BambaConfig(**_GROUPED, **_MAMBA, attn_layer_indices=[1], **ids),
}  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "bamba")
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid")


def unsupported_opt(**ids):
    """OPT's configuration, whose transformer is one level deeper than the other families'."""
    shape = {name: value for name, value in _SHAPE.items() if name not in ("intermediate_size", "initializer_range")}
    return OPTConfig(**shape, ffn_dim=40, word_embed_proj_dim=24, **ids)


@cache
def tokenizer():
    return byte_tokenizer(begin=True)


@cache
def language_model(family: str):
    """The family's tiny model with its head; shared, so tests must not change it."""
    make = CONFIGS.get(family, unsupported_opt)
    config = make(vocab_size=len(tokenizer()), **_IDS)
    return drawn(lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), family, seed=13)


@cache
def backbone_of(family: str, *, double: bool = False, checkpointing: bool = False) -> Backbone:
    """A backbone over a copy of the family's model; shared."""
    model = copy.deepcopy(language_model(family))
    model = model.double() if double else model
    return Backbone(model, tokenizer(), checkpointing=checkpointing)
