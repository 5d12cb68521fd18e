"""Where tuners attach: a declarative table of the backbone families.

Module names are relative to the base transformer (`model.base_model`); `{}` stands for the block's index. A new family
is one entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from silotune.errors import InputError


@dataclass(frozen=True)
class Architecture:
    """One family's sites.

    `blocks` is the module list of transformer blocks; the other fields name modules inside a block. `attention_output`
    and `feedforward_output` are the linear layers whose output goes into the residual sum: bottleneck adapters sit
    right behind them.
    """

    blocks: str
    query: str
    key: str
    value: str
    attention_output: str
    feedforward_input: str
    feedforward_output: str
    embeddings: str

    def module(self, field: str, block: int) -> str:
        """The full name of one site, e.g. `module("query", 3)`."""
        return f"{self.blocks}.{block}.{getattr(self, field)}"


_BERT = Architecture(
    blocks="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    feedforward_input="intermediate.dense",
    feedforward_output="output.dense",
    embeddings="embeddings",
)

ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": Architecture(
        blocks="transformer.layer",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attention_output="attention.out_lin",
        feedforward_input="ffn.lin1",
        feedforward_output="ffn.lin2",
        embeddings="embeddings",
    ),
    "mpnet": Architecture(
        blocks="encoder.layer",
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_output="attention.attn.o",
        feedforward_input="intermediate.dense",
        feedforward_output="output.dense",
        embeddings="embeddings",
    ),
}

SITE_FIELDS = ("query", "key", "value", "attention_output", "feedforward_input", "feedforward_output")


def architecture_of(model_type: str) -> Architecture:
    """The table's entry for a `config.model_type`.

    Raises:
        InputError: for a family that has no entry.
    """
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"backbone: no tuner sites are known for model type {model_type!r}; "
            f"known: {', '.join(sorted(ARCHITECTURES))} (see silotune/architectures.py)"
        )
    return ARCHITECTURES[model_type]
