"""Against a plain loop with peft, as scripts around FedPETuning's method have it: `benchmarks.peer` says what both do.

One process and one model: a silo's turn sets the averaged adapters and the silo's own classifier, trains, and reads
both back; the mean is weighted by rows. No messages, checks, checkpoints or scores. Batches are padded to their longest
row. Last key: seconds of its command over ours, at the peer's last precision.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import BATCH, LENGTH, RATE, compare, options

__all__ = ["measure", "options"]


def measure(**options: Any) -> dict[str, Any]:
    """See `benchmarks.peer.compare`."""
    return compare("benchmarks.peer_loop", **options)


def main(path: str, precision: str, threads: int) -> None:
    """The peer's own command."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from torch.utils.data import DataLoader
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    torch.set_num_threads(threads)
    known = json.loads(Path(path).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(known["model"])
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    models: dict[int, Any] = {}  # by number of labels: their classifiers have different shapes
    silos: list[tuple[Any, Any]] = []
    for silo in known["silos"]:
        if silo["labels"] not in models:
            base = AutoModelForSequenceClassification.from_pretrained(known["model"], num_labels=silo["labels"])
            models[silo["labels"]] = get_peft_model(base, lora)
        rows: Any = [
            dict(tokenizer(*texts, truncation=True, max_length=LENGTH)) | {"labels": label}
            for texts, label in silo["rows"]
        ]
        loader = DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
        silos.append((models[silo["labels"]], loader))
    state = get_peft_model_state_dict(silos[0][0])
    mean = {name: tensor.clone() for name, tensor in state.items() if "lora" in name}
    heads = [
        {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items() if "lora" not in name}
        for model, _ in silos
    ]
    total = sum(len(loader.dataset) for _, loader in silos)
    for _ in range(known["rounds"]):
        after = {name: torch.zeros_like(tensor) for name, tensor in mean.items()}
        for number, (model, loader) in enumerate(silos):
            set_peft_model_state_dict(model, mean | heads[number])
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    loss = model(**batch).loss
                loss.backward()
                optimizer.step()
            state = get_peft_model_state_dict(model)
            heads[number] = {name: tensor.clone() for name, tensor in state.items() if "lora" not in name}
            for name in after:
                after[name] += state[name] * (len(loader.dataset) / total)
        mean = after


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
