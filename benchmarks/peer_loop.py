"""Against a plain loop with peft, as scripts around FedPETuning's method have it: `benchmarks.peer` says what both do.

One process, and one model for each number of labels: a silo's turn sets the averaged adapters and the silo's own
classifier, trains, and reads both back; the mean is weighted by rows. No messages, checks, checkpoints or scores.
Batches are padded to their longest row. Last key: seconds of its command over ours, at the peer's last precision.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import compare, options

__all__ = ["measure", "options"]


def measure(**arguments: Any) -> dict[str, Any]:
    """See `benchmarks.peer.compare`."""
    return compare("benchmarks.peer_loop", **arguments)


def main(path: str, precision: str, threads: int) -> None:
    """The peer's own command."""
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    from benchmarks.peer_training import batches, lora_model, train_epoch

    torch.set_num_threads(threads)
    setting = json.loads(Path(path).read_text(encoding="utf-8"))
    models: dict[int, Any] = {}  # by number of labels: their classifiers have different shapes
    silos: list[tuple[Any, Any]] = []
    for silo in setting["silos"]:
        if silo["labels"] not in models:
            models[silo["labels"]] = lora_model(setting["model"], silo["labels"])
        silos.append((models[silo["labels"]], batches(setting["model"], silo["rows"])))
    state = get_peft_model_state_dict(silos[0][0])
    mean = {name: tensor.clone() for name, tensor in state.items() if "lora" in name}
    heads = [
        {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items() if "lora" not in name}
        for model, _ in silos
    ]
    total = sum(len(loader.dataset) for _, loader in silos)
    for _ in range(setting["rounds"]):
        after = {name: torch.zeros_like(tensor) for name, tensor in mean.items()}
        for number, (model, loader) in enumerate(silos):
            set_peft_model_state_dict(model, mean | heads[number])
            train_epoch(model, loader, precision)
            state = get_peft_model_state_dict(model)
            heads[number] = {name: tensor.clone() for name, tensor in state.items() if "lora" not in name}
            for name in after:
                after[name] += state[name] * (len(loader.dataset) / total)
        mean = after


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
