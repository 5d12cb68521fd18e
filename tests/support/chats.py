"""Conversations, chat templates of several families, a tokenizer with them, and a tiny Llama saved with it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.language_models import byte_tokenizer
from tests.support.tiny import drawn, save

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
CLOSED = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }} </s>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHANGING = "{% for m in messages %}{{ messages | length }} {{ m['content'] }}\n{% endfor %}"


def chat_tokenizer(template: Any = CHATML) -> Any:
    """Return a byte-level tokenizer with ChatML's tokens, whose end token is another one."""
    tokenizer = byte_tokenizer(begin=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@cache
def chat_model(folder: Path) -> Path:
    """Save a tiny Llama with ChatML below `folder` and return its path."""
    tokenizer = chat_tokenizer()
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        max_position_embeddings=160, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = drawn(lambda: AutoModelForCausalLM.from_config(config).eval(), "llama")
    return save(model, tokenizer, folder / "chat-llama")


def conversations(count: int = 20) -> list[dict[str, Any]]:
    """Return records of `messages`: with and without a system turn, of one and two exchanges."""
    records = []
    for number in range(count):
        turns = [{"role": "user", "content": f"the soup {number}?"}, {"role": "assistant", "content": "It was warm."}]
        if number % 2:
            turns += [{"role": "user", "content": "and now"}, {"role": "assistant", "content": f"cold {number}."}]
        if number % 3 == 0:
            turns.insert(0, {"role": "system", "content": "Be kind."})
        records.append({"messages": turns})
    return records


def sharegpt(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of `messages` in ShareGPT's shape."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in record["messages"]]
    return {"conversations": turns}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
