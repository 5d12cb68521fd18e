"""What runs silos. The method code is the same under every engine."""

from __future__ import annotations
