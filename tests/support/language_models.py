"""Tiny language models with their heads and tokenizers, and backbones and mixes over them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from silotune.models.backbone.backbone import Backbone
from silotune.models.forward.mixing import MixEntry
from silotune.models.tuners import TUNERS
from tests.support.tiny import FAMILIES as ENCODERS
from tests.support.tiny import drawn, save, words

MASKED = ["bert", "roberta", "distilbert", "mpnet", "electra"]
CAUSAL = ["llama", "gpt2"]
POSITIONS = 160
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
}
CHAT_TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}> {{ turn['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def byte_tokenizer(begin: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges as in GPT-2; with `begin`, a start token comes before the text as in LLaMA."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {word}" for word in words()), trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram tokenizer as in T5: words with the blank before them, an end token and sentinels."""
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"]
    pieces = [f"▁{word}" for word in words()] + ["▁", *"abcdefghijklmnopqrstuvwxyz.,?:#\n0123456789"]
    scores = [(token, 0.0) for token in special] + [
        (piece, -float(len(pieces[0])) - 0.01 * place) for place, piece in enumerate(dict.fromkeys(pieces))
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"]})
    return wrapped


def _causal(family: str, vocabulary: int):
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "llama":
        return LlamaConfig(**_SHAPE, **ids, num_key_value_heads=1)
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, initializer_range=0.2, **ids, **dropped)


@cache
def made(family: str):
    """Return (model with its head, tokenizer); both are shared, so tests must not change them."""
    if family in CAUSAL:
        tokenizer, kind = byte_tokenizer(begin=family == "llama"), AutoModelForCausalLM
        config = _causal(family, len(tokenizer))
    elif family == "t5":
        tokenizer, kind = sentence_tokenizer(), AutoModelForSeq2SeqLM
        config = T5Config(
            vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )  # fmt: skip
    else:
        shape = ENCODERS["bert" if family == "electra" else family]
        tokenizer, kind = shape.tokenizer(), AutoModelForMaskedLM
        size = len(tokenizer)
        config = ElectraConfig(vocab_size=size, embedding_size=24, **_SHAPE) if family == "electra" else None
        config = config or shape.model(size).config
    return drawn(lambda: kind.from_config(config, attn_implementation="eager").eval(), family), tokenizer


@cache
def folder_of(family: str, parent: Path) -> Path:
    """Save the model and its tokenizer below `parent` and return their folder."""
    return save(*made(family), parent / family)


@cache
def backbone_of(family: str) -> Backbone:
    model, tokenizer = made(family)
    return Backbone(model, tokenizer)


def generated(model, prompt: list[int], length: int, beams: int = 1, ends: int | list[int] = 2) -> list[int]:
    """Return what transformers' own search writes behind a prompt, without the end token and what follows it."""
    ids = torch.tensor([prompt])
    written = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=beams,
        max_new_tokens=length, pad_token_id=0, eos_token_id=ends,
    )[0].tolist()  # fmt: skip
    answer = written[1:] if model.config.is_encoder_decoder else written[len(prompt) :]
    stops = [ends] if isinstance(ends, int) else ends
    return next((answer[:at] for at, token in enumerate(answer) if token in stops), answer)


def ingredients(backbone: Backbone, *weights, tuner: str = "lora", seed: int = 0, **options) -> list[MixEntry]:
    """Return one mix entry per weight: a part of one tuner whose tensors are moved away from their initial values."""
    made_tuner = TUNERS[tuner](TUNERS[tuner].Options(**options))
    draws = torch.Generator().manual_seed(seed)
    entries = []
    for weight in weights:
        tensors = {
            name: tensor + 0.3 * torch.randn(tensor.shape, generator=draws)
            for name, tensor in made_tuner.init(backbone, [], draws).items()
        }
        entries.append(MixEntry(made_tuner, tensors, weight))
    return entries
