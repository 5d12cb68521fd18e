"""A run over machines: Flower carries the messages, a worker beside each SuperNode does a silo's work.

Imports point left: `protocol` ← `flower`, `processes` ← `silo`, `coordinator` ← `deploy`. No other room imports flwr.

- `protocol/`: frames, handshake, the configuration as it is sent, the numbers that may be sent
- `flower/`: the ClientApp, frames in Flower's messages, the coordinator's link, Flower's commands
- `processes/`: supervisor, fork server, restart policy, watchdog
- `silo/`: a silo's settings, worker, session, state store, privacy ledger
- `coordinator/`: the ServerApp, dispatcher, engine, run registry, status files
- `deploy/`: the commands of a deployment, node keys, `--engine flower-local`
"""

from __future__ import annotations
