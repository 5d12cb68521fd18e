"""A run over machines: Flower carries the messages, a worker beside each SuperNode does a silo's work.

Imports point left: `protocol` ← `flower`, `metrics` ← `silo`, `coordinator` ← `local`. No other room imports flwr.
"""

from __future__ import annotations
