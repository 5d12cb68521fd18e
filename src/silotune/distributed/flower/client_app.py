"""Flower's ClientApp: passes a frame to the silo's worker and returns its reply, reading neither.

Flower starts it anew for every message, so it does not import torch. The SuperNode's operator names the worker's
socket in the node configuration (`worker="/path/worker.sock"`), so a coordinator cannot choose where messages go.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from silotune.distributed.flower.link import unwrap, wrap
from silotune.distributed.protocol.frames import PATIENCE, Frame, ProtocolError, ask_worker

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Forward one request; the reply is `unavailable` if no worker answers."""
    config = context.node_config
    try:
        reply = ask_worker(str(config["worker"]), unwrap(message), float(config.get("patience", PATIENCE)))
    except ProtocolError as error:
        silo = str(config.get("silo", ""))
        reply = Frame("unavailable", {"silo": silo, "reason": str(error)}).encode()
    return Message(wrap(reply), reply_to=message)
