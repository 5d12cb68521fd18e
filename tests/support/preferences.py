"""Preference pairs, and a configuration of a silo of them over a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.chats import chat_model, write_lines


def preferences(count: int = 20) -> list[dict[str, Any]]:
    """Return records of `prompt`, `chosen` and `rejected`; every third is a list of turns."""
    records: list[dict[str, Any]] = []
    for number in range(count):
        prompt, chosen, rejected = f"the soup {number}?", "It was warm and kind.", f"cold {number}"
        if number % 3:
            records.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        else:
            turns = [{"role": "user", "content": prompt}]
            records.append(
                {
                    "prompt": turns,
                    "chosen": [{"role": "assistant", "content": chosen}],
                    "rejected": [{"role": "assistant", "content": rejected}],
                }
            )
    return records


def write_preferences(folder: Path, models: Path) -> Path:
    """Write `dpo.yaml` with two silos of preference pairs, of which one has texts alone."""
    write_lines(folder / "a.jsonl", preferences())
    write_lines(folder / "b.jsonl", [record for record in preferences(40) if isinstance(record["prompt"], str)])
    (folder / "dpo.yaml").write_text(
        f"""
method: fedit
backbone: {chat_model(models)}
tuner: {{name: lora, r: 2}}
head: {{name: dpo, beta: 0.5, template: chat, max_new_tokens: 4}}
rounds: 1
threads: 1
precision: fp32
train: {{lr: 1e-2, batch_size: 5, max_length: 96}}
silos: [{{name: a, path: {folder / "a.jsonl"}}}, {{name: b, path: {folder / "b.jsonl"}}}]
""",
        encoding="utf-8",
    )
    return folder / "dpo.yaml"
