"""Against Flower's simulation with peft, as one would write it: see `benchmarks.peer` for what both do.

The client builds its model from `from_pretrained` for every message, pads every batch to its longest row, and keeps its
classifier in its own state. fp32 is how users write it, bf16 (autocast) the best they could. One client at a time with
all threads. Last key: seconds of Flower's command over ours, at the peer's last precision.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import compare, options, require

__all__ = ["measure", "options"]


def measure(**arguments: Any) -> dict[str, Any]:
    """See `benchmarks.peer.compare`."""
    require("ray", "peer-flower: Flower's simulation (ray)", "pip install 'flwr[simulation]'")
    return compare("benchmarks.peer_flower", **arguments)


def main(path: str, precision: str, threads: int) -> None:
    """The peer's own command."""
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    setting = json.loads(Path(path).read_text(encoding="utf-8"))
    silos, rounds = len(setting["silos"]), setting["rounds"]
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        from peft import get_peft_model_state_dict

        model = _model(path, 0)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=silos, min_available_nodes=silos)
        start = ArrayRecord(
            {name: tensor for name, tensor in get_peft_model_state_dict(model).items() if "lora" in name}
        )
        metrics = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds).train_metrics_clientapp
        losses = [metrics[number]["train_loss"] if number in metrics else None for number in range(1, rounds + 1)]
        print("train_loss", *losses, flush=True)
        if None in losses:  # Flower goes on where clients fail
            os._exit(1)

    run_simulation(
        server_app=server,
        client_app=_client(path, precision, threads),
        num_supernodes=silos,
        backend_config={
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
            "init_args": {"num_cpus": threads, "include_dashboard": False},
        },
    )


def _client(path: str, precision: str, threads: int) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        import torch
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        from benchmarks.peer_training import train_epoch

        torch.set_num_threads(threads)
        number = int(context.node_config["partition-id"])
        model = _model(path, number)
        storage: Any = context.state
        content: Any = message.content
        if "head" in storage:
            head = storage["head"].to_torch_state_dict()
        else:
            head = {name: tensor for name, tensor in get_peft_model_state_dict(model).items() if "lora" not in name}
        set_peft_model_state_dict(model, content["arrays"].to_torch_state_dict() | head)
        loader = _loader(path, number)
        loss = train_epoch(model, loader, precision)
        state = get_peft_model_state_dict(model)
        storage["head"] = ArrayRecord({name: t for name, t in state.items() if "lora" not in name})
        shared = ArrayRecord({name: tensor for name, tensor in state.items() if "lora" in name})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
        return Message(content=RecordDict({"arrays": shared, "metrics": metrics}), reply_to=message)

    return client


def _model(path: str, number: int) -> Any:
    from benchmarks.peer_training import lora_model

    setting = json.loads(Path(path).read_text(encoding="utf-8"))
    return lora_model(setting["model"], setting["silos"][number]["labels"])


def _loader(path: str, number: int) -> Any:
    from benchmarks.peer_training import batches

    setting = json.loads(Path(path).read_text(encoding="utf-8"))
    return batches(setting["model"], setting["silos"][number]["rows"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
