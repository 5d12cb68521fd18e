"""Describe each family of transformers: which modules tuners act on, how it takes positions and prefixes.

Module names are relative to the base transformer (`model.base_model`), or to one of its blocks. A new family is one
entry; a family without an entry can still be tuned by naming its modules (`tuner.sites=`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from silotune.errors import InputError

if TYPE_CHECKING:
    from torch import nn

TARGET_FIELDS = (
    "query",
    "key",
    "value",
    "attention_output",
    "feedforward_input",
    "feedforward_gate",
    "feedforward_output",
)
"""The fields of an `Architecture` that name linear layers of a block; `tuner.sites` may name any of them."""


@dataclass(frozen=True)
class Architecture:
    """One family's target modules, and how it takes positions and prefixes.

    The fields of `TARGET_FIELDS` name linear layers inside a block. A field may name several, separated by commas
    (self- and cross-attention; alternatives of which a model has one), and several fields may name the same layer
    (query, key and value in one fused layer).

    Args:
        blocks: the module list of transformer blocks.
        query: projection of the queries.
        key: projection of the keys.
        value: projection of the values.
        attention_output: layer whose output attention adds to the residual stream; a bottleneck adapter follows it.
        feedforward_input: first layer of the feed-forward network; in mixtures of experts also the tensor that holds
            this layer of all experts, as in the next two fields (see `Backbone.experts`).
        feedforward_output: layer whose output the feed-forward network adds to the residual stream; a bottleneck
            adapter follows it.
        embeddings: module that embeds tokens.
        feedforward_gate: gate of the feed-forward network; empty: it has none.
        positions: name of the table of learned positions; `rotary`; or None for models with relative distances only.
            Read to count positions in batches in which only some rows have virtual tokens.
        prefix: how attention takes a prefix: `cache` (as the model's past keys and values), `attention` (as those of
            its attention modules), or None (it cannot).
        self_attention: the attention module inside a block, for `prefix="attention"`.
        more: further stacks, such as a decoder behind the encoder.
        allows_row_weights: whether weights may differ by row; False if a target module also acts on tensors without a
            row dimension.
    """

    blocks: str
    query: str
    key: str
    value: str
    attention_output: str
    feedforward_input: str
    feedforward_output: str
    embeddings: str
    feedforward_gate: str = ""
    positions: str | None = None
    prefix: Literal["cache", "attention"] | None = None
    self_attention: str = ""
    more: tuple[Architecture, ...] = ()
    allows_row_weights: bool = True

    @property
    def stacks(self) -> tuple[Architecture, ...]:
        """All stacks, in the order in which they run."""
        return (self, *self.more)

    def modules(self, field: str, block: int) -> list[str]:
        """Return the full names of a field's modules in one block, e.g. `modules("query", 3)`; empty if it has none."""
        names = str(getattr(self, field)).split(",")
        return [f"{self.blocks}.{block}.{name}" for name in names if name]


_BERT = Architecture(
    blocks="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    feedforward_input="intermediate.dense",
    feedforward_output="output.dense",
    embeddings="embeddings",
    positions="embeddings.position_embeddings",
    prefix="cache",
)

_LLAMA = Architecture(
    blocks="layers",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    feedforward_input="mlp.up_proj",
    feedforward_gate="mlp.gate_proj",
    feedforward_output="mlp.down_proj",
    embeddings="embed_tokens",
    positions="rotary",
    prefix="cache",
)

_PHI3 = replace(
    _LLAMA,
    query="self_attn.qkv_proj",
    key="self_attn.qkv_proj",
    value="self_attn.qkv_proj",
    feedforward_input="mlp.gate_up_proj",  # input and gate in one
    feedforward_gate="mlp.gate_up_proj",
)

_GPT_NEOX = Architecture(
    blocks="layers",
    query="attention.query_key_value",
    key="attention.query_key_value",
    value="attention.query_key_value",
    attention_output="attention.dense",
    feedforward_input="mlp.dense_h_to_4h",
    feedforward_output="mlp.dense_4h_to_h",
    embeddings="embed_in",
    positions="rotary",
    prefix="cache",
)

_MIXTURE_OF_EXPERTS = replace(
    _LLAMA,
    feedforward_input="mlp.up_proj,mlp.experts.gate_up_proj",  # some blocks have no experts; input and gate are one
    feedforward_gate="mlp.gate_proj,mlp.experts.gate_up_proj",
    feedforward_output="mlp.down_proj,mlp.experts.down_proj",
)
_GRANITE_EXPERTS = replace(
    _LLAMA,
    feedforward_input="block_sparse_moe.experts.gate_up_proj",
    feedforward_gate="block_sparse_moe.experts.gate_up_proj",
    feedforward_output="block_sparse_moe.experts.down_proj",
)


def _hybrid(family: Architecture, mixer: str, fused: str = "") -> Architecture:
    """Return a family in which some blocks have a recurrent mixer in the place of attention, and no prefix therefore.

    Args:
        family: the family with attention alone.
        mixer: the mixer's name in a block.
        fused: the mixer's layer that holds query, key and value; empty: it has none.
    """
    fields = dict.fromkeys(("query", "key", "value"), fused) if fused else {}
    fields["attention_output"] = "out_proj"
    changed: dict[str, Any] = {name: f"{getattr(family, name)},{mixer}.{layer}" for name, layer in fields.items()}
    return replace(family, prefix=None, **changed)


_T5_DECODER = Architecture(
    blocks="decoder.block",
    query="layer.0.SelfAttention.q,layer.1.EncDecAttention.q",
    key="layer.0.SelfAttention.k,layer.1.EncDecAttention.k",
    value="layer.0.SelfAttention.v,layer.1.EncDecAttention.v",
    attention_output="layer.0.SelfAttention.o,layer.1.EncDecAttention.o",
    feedforward_input="layer.2.DenseReluDense.wi,layer.2.DenseReluDense.wi_1",  # wi; gated: wi_0 and wi_1
    feedforward_gate="layer.2.DenseReluDense.wi_0",
    feedforward_output="layer.2.DenseReluDense.wo",
    embeddings="decoder.embed_tokens",
    prefix="cache",
)

_T5 = Architecture(
    blocks="encoder.block",
    query="layer.0.SelfAttention.q",
    key="layer.0.SelfAttention.k",
    value="layer.0.SelfAttention.v",
    attention_output="layer.0.SelfAttention.o",
    feedforward_input="layer.1.DenseReluDense.wi,layer.1.DenseReluDense.wi_1",
    feedforward_gate="layer.1.DenseReluDense.wi_0",
    feedforward_output="layer.1.DenseReluDense.wo",
    embeddings="shared",
    prefix="attention",
    self_attention="layer.0.SelfAttention",
    more=(_T5_DECODER,),
)

ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "distilbert": Architecture(
        blocks="transformer.layer",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attention_output="attention.out_lin",
        feedforward_input="ffn.lin1",
        feedforward_output="ffn.lin2",
        embeddings="embeddings",
        positions="embeddings.position_embeddings",
    ),
    "mpnet": replace(
        _BERT,
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_output="attention.attn.o",
        prefix=None,
    ),
    "deberta-v2": replace(  # no positions in models with relative ones only
        _BERT,
        query="attention.self.query_proj",
        key="attention.self.key_proj",
        value="attention.self.value_proj",
        prefix=None,
        allows_row_weights=False,  # query and key projections also act on the table of relative positions
    ),
    "modernbert": Architecture(
        blocks="layers",
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_output="attn.Wo",
        feedforward_input="mlp.Wi",  # input and gate in one
        feedforward_output="mlp.Wo",
        embeddings="embeddings",
        positions="rotary",
    ),
    "gpt2": Architecture(
        blocks="h",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        attention_output="attn.c_proj",
        feedforward_input="mlp.c_fc",
        feedforward_output="mlp.c_proj",
        embeddings="wte",
        positions="wpe",
        prefix="cache",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,  # as in Gemma 3 and OLMo 2, a norm lies between a bottleneck adapter and the residual stream
    "gemma3_text": _LLAMA,
    "olmo2": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "phi3": _PHI3,
    "gpt_neox": _GPT_NEOX,
    "mixtral": _MIXTURE_OF_EXPERTS,
    "qwen3_moe": _MIXTURE_OF_EXPERTS,
    "olmoe": _MIXTURE_OF_EXPERTS,
    "granitemoe": _GRANITE_EXPERTS,
    "qwen3_next": _hybrid(_MIXTURE_OF_EXPERTS, "linear_attn", "in_proj_qkvz"),
    "qwen3_5_text": _hybrid(_LLAMA, "linear_attn", "in_proj_qkv"),
    "qwen3_5_moe_text": _hybrid(_MIXTURE_OF_EXPERTS, "linear_attn", "in_proj_qkv"),
    "granitemoehybrid": _hybrid(
        replace(
            _GRANITE_EXPERTS,
            feedforward_input="shared_mlp.input_linear,block_sparse_moe.experts.gate_up_proj",
            feedforward_gate="shared_mlp.input_linear,block_sparse_moe.experts.gate_up_proj",
            feedforward_output="shared_mlp.output_linear,block_sparse_moe.experts.down_proj",
        ),
        "mamba",
    ),
    "bamba": _hybrid(
        replace(
            _LLAMA,
            feedforward_input="feed_forward.up_proj",
            feedforward_gate="feed_forward.gate_proj",
            feedforward_output="feed_forward.down_proj",
        ),
        "mamba",
    ),
    "t5": _T5,
}


def families_with_prefix() -> list[str]:
    """Return the model types whose attention takes a prefix."""
    return sorted(name for name, architecture in ARCHITECTURES.items() if architecture.prefix is not None)


def architecture_of(model_type: str) -> Architecture:
    """Look up a `config.model_type` in the table."""
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"backbone: no tuner sites are known for model type {model_type!r}; "
            f"known: {', '.join(sorted(ARCHITECTURES))} (see silotune/models/backbone/architectures.py); "
            "or name linear layers yourself, e.g. tuner=lora tuner.sites=q_proj,v_proj"
        )
    return ARCHITECTURES[model_type]


def max_positions(base: nn.Module, architecture: Architecture | None) -> int | None:
    """Return the number of tokens in the model's table of learned positions; None without such a table."""
    table = position_table(base, architecture)
    return None if table is None else table.num_embeddings - first_position(table)


def position_table(base: nn.Module, architecture: Architecture | None) -> nn.Embedding | None:
    """Return the model's table of learned positions; None without one."""
    if architecture is None or architecture.positions in (None, "rotary"):
        return None
    module, _, name = str(architecture.positions).rpartition(".")
    return cast("nn.Embedding | None", getattr(base.get_submodule(module), name))


def first_position(table: nn.Embedding) -> int:
    """Return the position of the first token: RoBERTa and MPNet count from the one after their padding index."""
    return 0 if table.padding_idx is None else table.padding_idx + 1
