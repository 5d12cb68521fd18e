"""Preference pairs, alone and beside rows of the other kinds, and a configuration of them over a tiny Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.chats import chat_model, write_lines
from tests.support.tiny import write_data


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


def write_kinds(root: Path, rows: dict[str, int]) -> Path:
    """Write `classes/`, `marks/`, `queries/`, `texts/`, `pairs/`: two tasks each of every kind of row, of many lengths.

    Args:
        root: the folder.
        rows: split → number of rows of every task.
    """
    write_data(root / "classes", ["alpha", "beta"], rows)
    for task in ("alpha", "beta"):
        for split, count in rows.items():
            marks = [
                {"tokens": ["cold", "sweet"] * (n % 3 + 1), "tags": ["O", "B-PER"] * (n % 3 + 1)} for n in range(count)
            ]
            queries = [{"query": f"cold {n}", "passage": f"{n} " + "sweet " * (n % 3 + 1)} for n in range(count)]
            for kind, records in (("marks", marks), ("queries", queries)):
                (root / kind / task).mkdir(parents=True, exist_ok=True)
                write_lines(root / kind / task / f"{split}.jsonl", records)
    for task in ("echo", "always"):
        for split, count in rows.items():
            texts = [
                {"instruction": f"say {'now ' * (n % 3)}", "input": "now" * (n % 2), "output": "sweet " * (n % 4 + 1)}
                for n in range(count)
            ]
            pairs = [{"prompt": f"say {n}", "chosen": "sweet " * (n % 3 + 1), "rejected": "cold"} for n in range(count)]
            for kind, records in (("texts", texts), ("pairs", pairs)):
                (root / kind / task).mkdir(parents=True, exist_ok=True)
                write_lines(root / kind / task / f"{split}.jsonl", records)
    return root
