"""Against apple/pfl-research (PyPI `pfl`) with peft: see `benchmarks.peer` for what both do.

pfl trains one model in one process; it has no private parts, so that its classifier (as many outputs as the task with
most labels) is averaged with the adapters. Batches are padded to their longest row. Last key: seconds of its command
over ours, at the peer's last precision.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import BATCH, RATE, compare, options, require

__all__ = ["measure", "options"]


def measure(**arguments: Any) -> dict[str, Any]:
    """See `benchmarks.peer.compare`."""
    require("pfl", "peer-pfl: pfl-research", "pip install 'pfl[pytorch]'")
    return compare("benchmarks.peer_pfl", **arguments)


def main(path: str, precision: str, threads: int) -> None:
    """The peer's own command."""
    import itertools
    import types

    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchDataDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from transformers import AutoTokenizer, DataCollatorWithPadding

    from benchmarks.peer_training import lora_model, tokenized

    torch.set_num_threads(threads)
    setting = json.loads(Path(path).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    collate = DataCollatorWithPadding(tokenizer)
    silos = [tokenized(tokenizer, silo["rows"]) for silo in setting["silos"]]

    def batched(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
        batch = collate(rows)
        return tuple(batch[name] for name in ("input_ids", "attention_mask", "token_type_ids", "labels"))

    def user(number: int) -> PyTorchDataDataset:
        return PyTorchDataDataset(silos[number], user_id=str(number), shuffle=True, collate_fn=batched)

    turns = itertools.cycle(range(len(silos)))
    labels = max(silo["labels"] for silo in setting["silos"])
    network = lora_model(setting["model"], labels)

    def loss(self: Any, *batch: Any, eval: bool = False) -> Any:
        ids, mask, types_, targets = batch
        self.train(not eval)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return self(input_ids=ids, attention_mask=mask, token_type_ids=types_, labels=targets).loss

    def metrics(self: Any, *batch: Any, eval: bool = False) -> dict[str, Any]:
        with torch.no_grad():
            return {"loss": Weighted.from_unweighted(float(loss(self, *batch, eval=eval)))}

    network.loss = types.MethodType(loss, network)
    network.metrics = types.MethodType(metrics, network)
    trained = [p for p in network.parameters() if p.requires_grad]
    model = PyTorchModel(network, torch.optim.Adam, torch.optim.SGD(trained, 1.0))
    federated = FederatedDataset(user, lambda: next(turns))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=setting["rounds"],
            evaluation_frequency=setting["rounds"] + 1,
            train_cohort_size=len(silos),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=federated),
        model=model,
        model_train_params=NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
