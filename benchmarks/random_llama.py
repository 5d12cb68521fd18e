"""A Llama of random weights with a tokenizer of whole words, which never ends a text by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def random_llama(width: int, blocks: int = 4, heads: int = 4, vocabulary: int = 2000) -> tuple[Any, Any]:
    """Make a model and its tokenizer, whose words are `w0` (padding), `w1` (unknown), `w2` (the end), `w3`, and so on.

    Args:
        width: of the states; a layer's inner width is three times that.
        blocks: number of transformer blocks.
        heads: attention heads; each has keys and values of its own.
        vocabulary: number of words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        attn_implementation="eager",  # type: ignore[call-arg]  # every configuration takes it
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[2].zero_()  # its score is 0, and some word's is always higher
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")


def save_random_llama(folder: Path, width: int, blocks: int = 4, heads: int = 4, vocabulary: int = 2000) -> str:
    """Save such a model and its tokenizer, and return the folder's name."""
    model, tokenizer = random_llama(width, blocks, heads, vocabulary)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
