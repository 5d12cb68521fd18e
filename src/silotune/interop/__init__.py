"""To and from other libraries: exports of finished runs, and LoRAs of peft to begin with."""

from __future__ import annotations
