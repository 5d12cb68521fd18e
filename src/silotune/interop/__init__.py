"""Exports of finished runs for other libraries: peft, transformers, or the loader `standalone.py`."""

from __future__ import annotations
