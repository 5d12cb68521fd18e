"""What the peers' own scripts share: the model with peft's LoRA, tokenized rows, and an epoch of plain training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from benchmarks.peer import BATCH, LENGTH, RATE


def lora_model(source: str, labels: int) -> Any:
    """Read the model with a classifier of so many labels, and LoRA on query and value."""
    base = AutoModelForSequenceClassification.from_pretrained(source, num_labels=labels)
    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"]))


def tokenized(tokenizer: Any, rows: Sequence[tuple[Sequence[str], int]]) -> list[dict[str, Any]]:
    """Tokenize rows of (texts, label), without padding."""
    return [dict(tokenizer(*texts, truncation=True, max_length=LENGTH)) | {"labels": label} for texts, label in rows]


def batches(source: str, rows: Sequence[tuple[Sequence[str], int]]) -> Any:
    """Shuffled batches of rows, each padded to its longest."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    dataset: Any = tokenized(tokenizer, rows)
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))


def train_epoch(model: Any, loader: Any, precision: str) -> float:
    """Train one epoch with a new Adam; returns the mean loss of its batches."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
    model.train()
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    return total / len(loader)
