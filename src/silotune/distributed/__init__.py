"""A federation over real machines: Flower carries the messages, a worker beside each SuperNode does a silo's work."""

from __future__ import annotations
